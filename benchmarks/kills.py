"""A hundred kills of the real roles under ``rollstream train``: the books must close after every one, and nothing may be lost or trained twice.

A tiny policy trains without end. At random instants a random victim gets SIGKILL: the actor, the buffer, the learner, or everything at once; what the
supervisor does not start again by itself goes on with ``--resume``. After every kill ``audit`` runs beside the live run. Reported: seconds until the next
version after a kill, by victim, over the seconds that a first start takes (the yardstick), and what the kills cost. ``--quick`` makes ten kills.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from report import options, report, row

from rollstream.buffer.audit import audit

VICTIMS = ("actor-0", "actor-0", "buffer", "buffer", "learner", "everything")
SETTINGS = (
    "learner.versions=1000000",
    "launcher.max_restarts=1000000",
    "actors.slots=8",
    "learner.batch_groups=2",
    "learner.group_size=4",
    "learner.checkpoint={every: 5, keep_last: 2}",
    "warmup={steps: 2, demonstrations_per_step: 8}",
    "model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}",
)
PATIENCE_S = 180.0


class Training:
    """``rollstream train`` in ``folder``, started again whenever a kill ended it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "runs" / "quickstart"
        self.start()

    def start(self) -> None:
        """Begins, or goes on where it was."""
        command = [sys.executable, "-m", "rollstream", "train", "quickstart", "--quiet", *SETTINGS, *(["--resume"] if self.run.exists() else [])]
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def version(self) -> int:
        """The newest version that has a row of metrics."""
        path = self.run / "metrics.jsonl"
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
        return json.loads(lines[-1])["version"] if lines else 0

    def role(self, name: str) -> psutil.Process | None:
        """The live process of a role."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                line = child.cmdline()
                if "--id" in line and line[line.index("--id") + 1] == name:
                    return child
        return None

    def wait_for(self, version: int) -> float:
        """Seconds until ``version`` is trained, through whatever restarts that takes."""
        began = time.monotonic()
        while self.version() < version:
            if self.process.poll() is not None:
                self.start()
            if time.monotonic() - began > PATIENCE_S:
                logs = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted((self.run / "logs").glob("*.log")))
                sys.exit(f"no version {version} within {PATIENCE_S:g} s\n{logs}")
            time.sleep(0.05)
        return time.monotonic() - began

    def kill(self, victim: str) -> None:
        """SIGKILL, to one role or to all processes at once."""
        if victim == "everything":
            doomed = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        else:
            found = self.role(victim)
            doomed = [] if found is None else [found]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if victim in ("learner", "everything"):
            self.process.wait()

    def end(self) -> None:
        """Stops in order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)


def check(run: Path, what: str) -> None:
    """The books close and nothing is wrong with them."""
    found = audit(run)
    if found.problems or not found.closes or found.duplicates or found.num_age_drops:
        sys.exit(f"after {what}: closes={found.closes} duplicates={found.duplicates} age_drops={found.num_age_drops} {found.problems}")


def main() -> None:
    """Kill and count."""
    arguments = options(__doc__)
    seed = int(os.environ.get("ROLLSTREAM_FAULT_SEED", time.time_ns() % 2**31))
    print(f"ROLLSTREAM_FAULT_SEED={seed}", flush=True)
    draw = random.Random(seed)
    taken: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="rollstream-kills-") as folder:
        training = Training(Path(folder))
        first = training.wait_for(1)
        for number in range(1, (10 if arguments.quick else 100) + 1):
            victim = draw.choice(VICTIMS)
            time.sleep(draw.random() * 2.0)
            training.kill(victim)
            check(training.run, f"kill {number}, of {victim}")
            taken[victim].append(training.wait_for(training.version() + 1))
        training.end()
        check(training.run, "the end")
        versions = [json.loads(line)["version"] for line in (training.run / "metrics.jsonl").read_text().splitlines()]
        if versions != list(range(1, len(versions) + 1)):
            sys.exit(f"the metrics do not hold every version once: {len(versions)} rows, the last of version {versions[-1]}")
        rows = [row("first version after a first start", [first], "s")]
        rows += [
            row(f"next version after a kill of {victim} ({len(taken[victim])})", taken[victim], "s", yardstick="start", over=first) for victim in sorted(taken)
        ]
        rows.append(row("versions trained", [float(versions[-1])], "versions"))
        report(rows, arguments.json)
        print(f"{sum(map(len, taken.values()))} kills; after each the books closed, nothing lost, nothing trained twice")


if __name__ == "__main__":
    main()
