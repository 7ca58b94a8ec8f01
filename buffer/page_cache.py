"""Keeps what the stream writes from filling the kernel's page cache.

Rows are read within a few batches of being written, and then hardly ever again. Left to itself the kernel keeps all of them until memory runs out. It then
drops what is read more often, models and datasets; and every page that is written is one it has never used, which on a virtual machine costs many times as
much as filling it. So pages are written to the disk early, and those behind the newest are given back: the next ones take their place.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

STEP_BYTES = 8 * 2**20
KEPT_BYTES = 256 * 2**20
"""Several times what a batch of long trajectories weighs."""


class Stretch(NamedTuple):
    """Bytes of a file."""

    path: Path
    offset: int
    size_bytes: int


class PageCache:
    """Keeps the newest ``kept_bytes`` of what was written; the kernel hears of it in steps, from a thread: on a slow disk it makes wait whoever tells it."""

    def __init__(self, step_bytes: int = STEP_BYTES, kept_bytes: int = KEPT_BYTES) -> None:
        self._step_bytes, self._kept_bytes = step_bytes, kept_bytes
        self._step: list[Stretch] = []
        self._step_size = 0
        self._kept: deque[tuple[list[Stretch], int]] = deque()
        self._kept_size = 0
        self._thread = ThreadPoolExecutor(1, "page-cache")

    def wrote(self, path: Path, offset: int, size_bytes: int) -> None:
        """So much was written there."""
        last = self._step[-1] if self._step else None
        if last is not None and last.path == path and last.offset + last.size_bytes == offset:
            self._step[-1] = Stretch(path, last.offset, last.size_bytes + size_bytes)
        else:
            self._step.append(Stretch(path, offset, size_bytes))
        self._step_size += size_bytes
        if self._step_size >= self._step_bytes:
            self._thread.submit(self._end_step, self._step, self._step_size)
            self._step, self._step_size = [], 0

    def close(self) -> None:
        """Ends the thread; what it was not told stays with the kernel."""
        self._thread.shutdown(cancel_futures=True)

    def _end_step(self, step: list[Stretch], size_bytes: int) -> None:
        """In the thread. The kernel is asked twice for the same: of pages not yet on the disk it only begins to write them."""
        _let_go(step)
        self._kept.append((step, size_bytes))
        self._kept_size += size_bytes
        while self._kept_size > self._kept_bytes:
            oldest, size_bytes = self._kept.popleft()
            self._kept_size -= size_bytes
            _let_go(oldest)


def _let_go(stretches: list[Stretch]) -> None:
    """Pages that somebody has mapped stay."""
    for path, offset, size_bytes in stretches:
        with contextlib.suppress(FileNotFoundError, AttributeError):  # removed since; a system that takes no such advice
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, offset, size_bytes, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
