"""Keeps what the stream writes from filling the kernel's page cache.

Once they are trained, rows are hardly ever read again. Left to itself the kernel keeps all of them until memory runs out. It then drops what is read more
often, models and datasets; and every page that is written is one it has never used, which on a virtual machine costs many times as much as filling it. So
pages are written to the disk early, and those that no batch needs any more are given back: the next ones take their place.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

STEP_BYTES = 8 * 2**20
KEPT_BYTES = 256 * 2**20


class Stretch(NamedTuple):
    """Bytes of a file."""

    path: Path
    offset: int
    size_bytes: int


class _Step(NamedTuple):
    """What the kernel hears of at once; ``end`` counts all bytes ever written up to its last."""

    stretches: list[Stretch]
    size_bytes: int
    end: int


class PageCache:
    """Keeps the newest ``kept_bytes`` of what was written, and whatever is needed still.

    The kernel hears of it in steps, from a thread: where the disk is slow it makes wait whoever tells it.
    """

    def __init__(self, step_bytes: int = STEP_BYTES, kept_bytes: int = KEPT_BYTES) -> None:
        self._step_bytes, self._kept_bytes = step_bytes, kept_bytes
        self._step: list[Stretch] = []
        self._step_size = self._num_written = 0
        self._begun: dict[int, int] = {}
        self._needed_from = math.inf
        self._kept: deque[_Step] = deque()
        self._kept_size = 0
        self._thread = ThreadPoolExecutor(1, "page-cache")

    def begin(self, segment: int) -> None:
        """From here on ``segment`` of the log is written."""
        self._begun[segment] = self._num_written

    def keep_from(self, segment: int) -> None:
        """Whatever was written since ``segment`` was begun is needed, and nothing before it."""
        self._needed_from = min((begun for number, begun in self._begun.items() if number >= segment), default=math.inf)
        self._begun = {number: begun for number, begun in self._begun.items() if number >= segment}

    def wrote(self, path: Path, offset: int, size_bytes: int) -> None:
        """So much was written there."""
        last = self._step[-1] if self._step else None
        if last is not None and last.path == path and last.offset + last.size_bytes == offset:
            self._step[-1] = Stretch(path, last.offset, last.size_bytes + size_bytes)
        else:
            self._step.append(Stretch(path, offset, size_bytes))
        self._step_size += size_bytes
        self._num_written += size_bytes
        if self._step_size >= self._step_bytes:
            self._thread.submit(self._end_step, _Step(self._step, self._step_size, self._num_written))
            self._step, self._step_size = [], 0

    def close(self) -> None:
        """Ends the thread; what it was not told stays with the kernel."""
        self._thread.shutdown(cancel_futures=True)

    def _end_step(self, step: _Step) -> None:
        """In the thread. By the time its turn comes a step is on the disk, so that its pages can go."""
        _advise(step.stretches, _begin_writing)
        self._kept.append(step)
        self._kept_size += step.size_bytes
        while self._kept_size > self._kept_bytes and self._kept[0].end <= self._needed_from:
            oldest = self._kept.popleft()
            self._kept_size -= oldest.size_bytes
            _advise(oldest.stretches, _let_go)


def _advise(stretches: list[Stretch], advice: Callable[[int, int, int], None]) -> None:
    for path, offset, size_bytes in stretches:
        with contextlib.suppress(FileNotFoundError):  # removed since
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                advice(file, offset, size_bytes)
            finally:
                os.close(file)


def _begin_writing(file: int, offset: int, size_bytes: int) -> None:
    if _sync_file_range is not None:
        _sync_file_range(file, offset, size_bytes, _SYNC_FILE_RANGE_WRITE)


def _let_go(file: int, offset: int, size_bytes: int) -> None:
    """Pages that are not on the disk yet, and those that somebody has mapped, stay."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, offset, size_bytes, os.POSIX_FADV_DONTNEED)


_SYNC_FILE_RANGE_WRITE = 2  # <fcntl.h>
_sync_file_range: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux alone has it
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
