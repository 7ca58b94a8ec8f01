"""A full disk holds the learner as it holds the buffer: it waits and says so, ends nothing and leaves nothing out."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

RETRY_S = 2.0
_FULL = (errno.ENOSPC, errno.EDQUOT)

Written = TypeVar("Written")


def when_there_is_space(write: Callable[[], Written], path: Path, stop: threading.Event) -> Written:
    """What ``write``, which can be repeated, gives once the disk of ``path`` has room for it.

    Raises :class:`OSError`, with ``path`` as its file, where the disk refuses for another reason, or is still full when ``stop`` is set.
    """
    told = False
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in _FULL or stop.is_set():
                raise OSError(error.errno, error.strerror, str(path)) from error
        if not told:
            logger.warning("event=disk_full path=%s remedy='free space there and the run goes on'", path)
            told = True
        stop.wait(RETRY_S)


class Appending:
    """The end of the file at ``path``: every :meth:`write` is in the kernel when it returns, whole, however long the disk was full. Raises :class:`OSError`."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        self._path, self._stop = path, stop
        self._file = when_there_is_space(lambda: os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644), path, stop)

    def write(self, text: str) -> None:
        """Adds ``text``; waits for space."""
        left = memoryview(text.encode())
        while left:
            left = left[when_there_is_space(lambda left=left: os.write(self._file, left), self._path, self._stop) :]

    def close(self) -> None:
        """Flushes to the disk."""
        os.fsync(self._file)
        os.close(self._file)
