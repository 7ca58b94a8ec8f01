"""What the buffer frees serves the next message: it is not given back and got again page by page."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, sys
from rollstream.buffer.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def take(): return [bytearray(1 << 20) for _ in range(16)]
for _ in range(3): take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): take()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


def faults(how: str) -> float:
    """Page faults of taking 16 MB, the fourth time and later."""
    return float(subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True).stdout)


def test_memory_that_was_freed_is_there_for_the_next_round() -> None:
    assert faults("keep") < 100 < 1000 < faults("leave")
