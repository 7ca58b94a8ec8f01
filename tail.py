"""What the files of a run say: its metrics and its logs, followed while they grow or read as a whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, cast

SMOOTH = 5
"""Versions averaged for what is shown of reward and success."""
MAX_ROWS = 2048
"""Rows kept in memory: when there are more, every second one of the older half is forgotten."""
MAX_LOG_BYTES = 1 << 16
"""Of one log taken in at a time."""

_LOG_LINE = re.compile(r"ts=(?P<ts>\S+) level=(?P<level>\w+) role=\S+ logger=\S+ (?P<message>.*)")

_WARNINGS = ("warning", "error")

Row = Mapping[str, Any]

_SHOWN = frozenset(
    {
        "version",
        "train/reward_mean",
        "train/success",
        "train/lag_mean",
        "train/lag_max",
        "train/age_drops",
        "time/step_s",
        "time/wait_batch_s",
        "time/wall_s",
        "learner/tokens_per_s",
        "actors/tokens_per_s",
    }
)


class MetricsTail:
    """Follows ``metrics.jsonl``: each call of :meth:`read` takes in the lines that are complete since the last one, and of them what is shown.

    A version that is written again, after a crash and its redo, replaces its earlier row and those after it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = (0, 0)
        self._offset = 0
        self._rows: list[Row] = []

    def read(self) -> list[Row]:
        """The rows so far in the order of versions, thinned out towards the start of a long run."""
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if (facts.st_dev, facts.st_ino) != self._file or facts.st_size < self._offset:  # the learner cut it when it resumed
                    self._file, self._offset, self._rows = (facts.st_dev, facts.st_ino), 0, []
                file.seek(self._offset)
                fresh = file.read()
        except FileNotFoundError:
            fresh = b""
        complete, newline, _ = fresh.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        for line in complete.splitlines():
            row = _parse(line)
            if row is not None:
                while self._rows and self._rows[-1]["version"] >= row["version"]:
                    self._rows.pop()
                self._rows.append(row)
        if len(self._rows) > MAX_ROWS:
            half = MAX_ROWS // 2
            self._rows = self._rows[:half:2] + self._rows[half:]
        return self._rows


class LogTail:
    """Follows ``logs/*.log`` from now on: what the learner said last, and the warnings of every role."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets = {path: path.stat().st_size for path in folder.glob("*.log")}
        self.learner_said = ""
        self.num_warnings = 0
        self.last_warning = ""

    def read(self) -> Self:
        """Takes in the lines that are complete since the last call."""
        for path in self._folder.glob("*.log"):
            with path.open("rb") as file:
                offset = self._offsets.get(path, 0)
                file.seek(offset)
                complete, newline, _ = file.read(MAX_LOG_BYTES).rpartition(b"\n")
            self._offsets[path] = offset + len(complete) + len(newline)
            for line in complete.decode("utf-8", "replace").splitlines():
                self._take(path.stem, line)
        return self

    def _take(self, role: str, line: str) -> None:
        found = _LOG_LINE.match(line)
        if found is None:
            return
        if role == "learner":
            self.learner_said = found["message"]
        if found["level"] in _WARNINGS:
            self.num_warnings += 1
            self.last_warning = f"logs/{role}.log: {_told(found['message'])}"


def _told(message: str) -> str:
    """A warning for people, who may see only its beginning: what it was, and what to do about it before all else."""
    remedy = re.search(r"remedy=(['\"])(?P<text>.*?)\1", message)
    return (
        message
        if remedy is None
        else f"{message[: remedy.start()].split(' ')[0]}: {remedy['text']} ({(message[: remedy.start()] + message[remedy.end() :]).strip()})"
    )


def warnings_in(folder: Path) -> tuple[int, str]:
    """How many warnings the logs in ``folder`` hold, of all starts of the run, and the newest of them behind the log it is in."""
    found: list[tuple[str, str]] = []
    for path in folder.glob("*.log"):
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = filter(None, map(_LOG_LINE.match, file))
            found += [(line["ts"], f"logs/{path.name}: {_told(line['message'])}") for line in lines if line["level"] in _WARNINGS]
    return len(found), max(found, default=("", ""))[1]


def _parse(line: bytes) -> Row | None:
    try:
        row: object = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or "version" not in row:
        return None
    return {name: value for name, value in cast("Row", row).items() if name in _SHOWN}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every complete row of ``metrics.jsonl``; empty where there is none."""
    rows: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def last_version(path: Path) -> int:
    """Version of the last complete row; 0 where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            lines = file.read().rpartition(b"\n")[0].splitlines()
    except FileNotFoundError:
        return 0
    row = _parse(lines[-1]) if lines else None
    return int(row["version"]) if row is not None else 0


def smoothed(rows: Sequence[Row], name: str, width: int = SMOOTH) -> list[float]:
    """Trailing mean over ``width`` versions of metric ``name``; versions without it are left out."""
    values = [float(row[name]) for row in rows if row.get(name) is not None]
    sums = list(accumulate(values, initial=0.0))
    return [(sums[index] - sums[max(0, index - width)]) / min(index, width) for index in range(1, len(sums))]


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
