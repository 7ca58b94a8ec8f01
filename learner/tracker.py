"""The run's numbers: one JSON object per policy version in ``metrics.jsonl``, the same names in TensorBoard and where a mirror takes them.

A row is written and handed to the kernel before the next step starts; on a full disk it waits for space. Values that are not finite are left out, so every
line is plain JSON. On resume, rows after the checkpoint go (by one atomic replacement) and TensorBoard is told to forget the same steps; the steps that are
done again write them again. TensorBoard's own writer does not survive a full disk: another one begins anew, and is told every row since the start.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from .space import Appending, when_there_is_space

_events: Any = event_pb2
_summaries: Any = summary_pb2


class Mirror(Protocol):
    """Takes the same rows elsewhere, and never raises."""

    def row(self, version: int, values: Mapping[str, float]) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Tracker:
    """Writes one row per version. ``version`` is the one the run starts from: rows after it are cut. ``mirror`` gets every row too.

    ``stop`` ends the wait for space on a full disk, with the :class:`OSError` that names it.
    """

    def __init__(self, metrics_path: Path, tensorboard_folder: Path, version: int, mirror: Mirror | None, stop: threading.Event) -> None:
        self._mirror = mirror
        self._stop = stop
        self._path, self._board_folder = metrics_path, tensorboard_folder
        last = when_there_is_space(lambda: cut_rows(metrics_path, version), metrics_path, stop)
        self.earlier_s = float(last.get("time/wall_s", 0.0))
        """Seconds the run had taken up to ``version``."""
        self._started = time.monotonic()
        self._first = version
        self._file = Appending(metrics_path, stop)
        self._board: Any = self._new_board()

    def _new_board(self) -> Any:
        """A writer of TensorBoard's, which forgets what it knew of later versions than the one the run starts from."""

        def begin() -> Any:
            self._board_folder.mkdir(parents=True, exist_ok=True)
            board = EventFileWriter(str(self._board_folder), max_queue_size=100, flush_secs=5)
            board.add_event(_events.Event(wall_time=time.time(), step=self._first + 1, session_log=_events.SessionLog(status=_events.SessionLog.START)))
            return board

        return when_there_is_space(begin, self._board_folder, self._stop)

    @property
    def wall_s(self) -> float:
        """Seconds since the start of the run, over all its starts."""
        return self.earlier_s + time.monotonic() - self._started

    def row(self, lineage: int, version: int, values: Mapping[str, float]) -> None:
        """Writes the row of ``version``, whose batch ``lineage`` formed, with the wall time so far."""
        values = {**values, "time/wall_s": self.wall_s}
        finite = {name: as_written(value) for name, value in values.items() if math.isfinite(value)}
        self._file.write(json.dumps({"version": version, "lineage": lineage, **finite}) + "\n")
        self._tell_board(version, finite)
        if self._mirror is not None:
            self._mirror.row(version, {"lineage": lineage, **finite})

    def evaluated(self, path: Path, rows: Sequence[Mapping[str, Any]], *, anew: bool) -> None:
        """Adds evaluations to their own file at ``path``, one object each, and what was measured to TensorBoard at the version it belongs to.

        With ``anew`` the file is written from its beginning: the rows are all there are. TensorBoard is then told of those that it forgot at the start.
        """
        text = "".join(json.dumps({name: as_written(value) if isinstance(value, float) else value for name, value in row.items()}) + "\n" for row in rows)
        if anew:
            temporary = path.with_name(f".{path.name}.tmp")
            when_there_is_space(lambda: temporary.write_text(text, encoding="utf-8"), temporary, self._stop)
            temporary.replace(path)
        else:
            with contextlib.closing(Appending(path, self._stop)) as file:
                file.write(text)
        for row in rows:
            values = {name: value for name, value in row.items() if name.startswith("eval/")}
            if values and (not anew or row["version"] > self._first):
                self._tell_board(row["version"], values)
                if self._mirror is not None:
                    self._mirror.row(row["version"], values)

    def _tell_board(self, version: int, values: Mapping[str, float]) -> None:
        try:
            self._board.add_event(_event_of(version, values))
        except OSError:  # its thread could not write some earlier event, and is gone
            self._board = self._new_board()
            for row in map(json.loads, self._path.read_text(encoding="utf-8").splitlines()):
                if row["version"] > self._first:
                    self._board.add_event(_event_of(row["version"], {name: value for name, value in row.items() if "/" in name}))

    def close(self) -> None:
        """Flushes both to disk."""
        self._file.close()
        with contextlib.suppress(OSError):  # metrics.jsonl has it all
            self._board.close()
        if self._mirror is not None:
            self._mirror.close()


def _event_of(version: int, values: Mapping[str, float]) -> Any:
    summary = _summaries.Summary(value=[_summaries.Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()])
    return _events.Event(wall_time=time.time(), step=version, summary=summary)


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
