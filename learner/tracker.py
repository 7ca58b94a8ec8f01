"""The run's numbers: one JSON object per policy version in ``metrics.jsonl``, the same names in TensorBoard and where a mirror takes them.

A row is written and handed to the kernel before the next step starts. Values that are not finite are left out, so every line is plain JSON. On resume,
rows after the checkpoint go (by one atomic replacement) and TensorBoard is told to forget the same steps; the steps that are done again write them
again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

_events: Any = event_pb2
_summaries: Any = summary_pb2


class Mirror(Protocol):
    """Takes the same rows elsewhere, and never raises."""

    def row(self, version: int, values: Mapping[str, float]) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Tracker:
    """Writes one row per version. ``version`` is the one the run starts from: rows after it are cut. ``mirror`` gets every row too."""

    def __init__(self, metrics_path: Path, tensorboard_folder: Path, version: int, mirror: Mirror | None = None) -> None:
        self._mirror = mirror
        last = cut_rows(metrics_path, version)
        self.earlier_s = float(last.get("time/wall_s", 0.0))
        """Seconds the run had taken up to ``version``."""
        self._started = time.monotonic()
        self._first = version
        self._file = metrics_path.open("a", encoding="utf-8")
        tensorboard_folder.mkdir(parents=True, exist_ok=True)
        self._board: Any = EventFileWriter(str(tensorboard_folder), max_queue_size=100, flush_secs=5)
        self._board.add_event(_events.Event(wall_time=time.time(), step=version + 1, session_log=_events.SessionLog(status=_events.SessionLog.START)))

    @property
    def wall_s(self) -> float:
        """Seconds since the start of the run, over all its starts."""
        return self.earlier_s + time.monotonic() - self._started

    def row(self, lineage: int, version: int, values: Mapping[str, float]) -> None:
        """Writes the row of ``version``, whose batch ``lineage`` formed, with the wall time so far."""
        values = {**values, "time/wall_s": self.wall_s}
        finite = {name: as_written(value) for name, value in values.items() if math.isfinite(value)}
        try:
            self._file.write(json.dumps({"version": version, "lineage": lineage, **finite}) + "\n")
            self._file.flush()
            self._tell_board(version, finite)
        except OSError as error:
            error.filename = error.filename or "metrics.jsonl or tensorboard"
            raise
        if self._mirror is not None:
            self._mirror.row(version, {"lineage": lineage, **finite})

    def evaluated(self, path: Path, rows: Sequence[Mapping[str, Any]], *, anew: bool) -> None:
        """Adds evaluations to their own file at ``path``, one object each, and what was measured to TensorBoard at the version it belongs to.

        With ``anew`` the file is written from its beginning: the rows are all there are. TensorBoard is then told of those that it forgot at the start.
        """
        text = "".join(json.dumps({name: as_written(value) if isinstance(value, float) else value for name, value in row.items()}) + "\n" for row in rows)
        if anew:
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        else:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        for row in rows:
            values = {name: value for name, value in row.items() if name.startswith("eval/")}
            if values and (not anew or row["version"] > self._first):
                self._tell_board(row["version"], values)
                if self._mirror is not None:
                    self._mirror.row(row["version"], values)

    def _tell_board(self, version: int, values: Mapping[str, float]) -> None:
        summary = _summaries.Summary(value=[_summaries.Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()])
        self._board.add_event(_events.Event(wall_time=time.time(), step=version, summary=summary))

    def close(self) -> None:
        """Flushes both to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._board.close()
        if self._mirror is not None:
            self._mirror.close()


def cut_rows(path: Path, version: int) -> dict[str, Any]:
    """Removes the rows after ``version``, and a last line that was cut short. Returns the last row that stays, empty where none does."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return {}
    kept: list[str] = []
    last: dict[str, Any] = {}
    content = path.read_text(encoding="utf-8")
    for line in content.splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            row: dict[str, Any] = json.loads(line)
            if line.endswith("\n") and row["version"] <= version:
                kept.append(line)
                last = row
    if "".join(kept) != content:
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return last


def as_written(value: float) -> float | int:
    """Whole numbers as integers, others to nine digits: the file stays readable and float32 values survive."""
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(f"{value:.9g}")
