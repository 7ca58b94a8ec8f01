"""One golden stream per schema version: files as that version wrote them, and what they say.

    python tests/golden/stream_goldens.py      writes those of the present version where there are none

``stream_vN.arrows`` is a segment of the log, ``stream_vN.parquet`` the same one sealed, ``stream_vN.json`` the trajectories in them. Files of older versions
are never written again: they are what a reader of older streams is tested with.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollstream.buffer.columns import SCHEMA_VERSION, encode, frame_checksum, to_frame
from rollstream.buffer.log import Log, segment_path
from rollstream.buffer.sealed import StoredAppend, seal
from rollstream.buffer.types import MediaSpan, Segment, Trajectory, TrajectoryKey

FOLDER = Path(__file__).parent


def trajectories() -> list[Trajectory]:
    """Two trajectories in which no column is empty: one of two segments with an image and routed experts, one that failed."""
    first = Segment(
        np.array([5, 6, 7, 8, 9, 10], np.int32),
        np.array([0, 0, 0, 1, 1, 1], np.uint8),
        np.array([0, 0, 0, -0.5, -0.25, -1.5], np.float32),
        np.array([0, 5], np.int32),
        np.array([3, 4], np.int32),
        np.array([0, 3], np.int32),
        ("user", "assistant"),
        (None, 0.25),
        (MediaSpan("ab" * 32, "image/png", 1, 2),),
        (b"\x00\x01", b"\x02"),
    )
    second = msgspec.structs.replace(first, media=(), routed_experts=None, turn_rewards=(None, None))
    made = Trajectory(
        *(TrajectoryKey(1, 7, 2, 3), "Acme/Calculator-v0", 11, 99, "train", (first, second), 1.25, "terminated", "terminated"),
        *({"exact": 1.0}, {"success": 0.5}, "", 0.9, 0.95, 40, '[{"role": "user", "content": "é"}]', "actor-0", 1.5, 2.5, 0.25, 0.125),
    )
    failed = msgspec.structs.replace(
        made, key=TrajectoryKey(1, 7, 3, 0), segments=(second,), reward=None, status="failed", stop_reason="env", error="boom", purpose="eval", reward_parts={}
    )
    return [made, failed]


def plain(trajectory: Trajectory) -> Any:
    """A trajectory as JSON has it."""
    builtins = msgspec.to_builtins(trajectory, builtin_types=(bytes,), enc_hook=lambda array: array.tolist())
    return json.loads(json.dumps(builtins, default=bytes.hex))


def write(folder: Path) -> None:
    """Writes the golden files of the present version."""
    name = f"stream_v{SCHEMA_VERSION}"
    log = Log(folder / "log", segment_bytes=2**20)
    appends: list[StoredAppend] = []
    for append_id, trajectory in enumerate(trajectories(), 1):
        frame = to_frame(encode([trajectory]))
        location = log.append(frame, frame_checksum(frame))
        appends.append(StoredAppend(append_id, location.offset, location.size_bytes, location.checksum, len(trajectory.segments)))
    log.close()
    assert seal(segment_path(folder / "log", 1), folder / f"{SCHEMA_VERSION:06d}.parquet", appends, threading.Event()) is not None
    segment_path(folder / "log", 1).rename(FOLDER / f"{name}.arrows")
    (folder / f"{SCHEMA_VERSION:06d}.parquet").rename(FOLDER / f"{name}.parquet")
    (FOLDER / f"{name}.json").write_text(
        json.dumps([plain(trajectory) for trajectory in trajectories()], indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    import tempfile

    if (FOLDER / f"stream_v{SCHEMA_VERSION}.json").exists():
        sys.exit(f"the stream of schema version {SCHEMA_VERSION} is written already: raise SCHEMA_VERSION in buffer/columns.py where the columns changed")
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        write(Path(temporary))
