"""Who may write a run folder: whether a run can be made or resumed there, and the lock that a live one holds."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import RunFolderError
from .loader import load_run
from .schema import Config

_LOCK = ".lock"
ROLES_END_S = 60.0
"""How long roles without a supervisor may take to notice, on a busy machine."""


def run_folder(config: Config, *, resume: bool) -> Path:
    """Folder of the run, found fit for it. Writes nothing.

    Raises :class:`RunFolderError` where it holds another run, a live one, or none to resume, or cannot be made.
    """
    folder = (Path(config.folder) / config.name).resolve()
    try:
        _check(folder, resume=resume)
    except OSError as error:
        raise RunFolderError(f"{str(folder)[:120]} cannot be used: {_reason(error)}; choose another folder (folder=PATH)") from None
    return folder


def _check(folder: Path, *, resume: bool) -> None:
    if resume:
        load_run(folder)
    elif folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; choose another name (name=NEW) or remove it")
    elif folder.is_dir() and any(entry.name != _LOCK for entry in folder.iterdir()):
        _refuse_live(folder)
        raise RunFolderError(f"{folder} already holds a run; go on with --resume, choose another name (name=NEW), or remove the folder")
    above = _above(folder)
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise RunFolderError(f"{folder} cannot be made: {above} is not a folder this user may write to; choose another folder (folder=PATH)")
    _refuse_live(folder)


def try_folder(config: Config, *, resume: bool) -> Path:
    """:func:`run_folder`, tried: a file is written where the run would be, and removed again.

    Raises :class:`RunFolderError` as there, and where the file system takes no file.
    """
    folder = run_folder(config, resume=resume)
    above = _above(folder)
    try:
        with tempfile.TemporaryFile(dir=above) as file:
            file.write(b"rollstream check")
            file.flush()
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {above} takes no file ({_reason(error)}); choose another folder (folder=PATH)") from None
    return folder


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Holds ``folder`` for this process. Raises :class:`RunFolderError` where another live process holds it.

    The lock goes with the process, however it ends. A folder that stayed empty is removed again.
    """
    above = not folder.parent.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{str(folder)[:120]} cannot be made: {_reason(error)}; choose another folder (folder=PATH)") from None
    path = folder / _LOCK
    with path.open("a+") as file:
        _take(folder, file)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            if not any(entry.name != _LOCK for entry in folder.iterdir()):
                path.unlink()
                folder.rmdir()
                if above:
                    folder.parent.rmdir()


def wait_for_roles(stream: Path, timeout_s: float = ROLES_END_S) -> None:
    """Waits for the buffer of a start whose supervisor was killed, which notices and ends by itself; while it lives it holds the log in ``stream``.

    Raises :class:`RunFolderError` where it still does after ``timeout_s``.
    """
    deadline, told = time.monotonic() + timeout_s, False
    while stream.is_dir() and _is_held(stream):
        if time.monotonic() > deadline:
            raise RunFolderError(f"{stream} is still in use by another buffer after {timeout_s:g} s; stop that run first")
        if not told:
            sys.stderr.write("the roles of a start that was killed are still ending: waiting for them\n")
            told = True
        time.sleep(0.2)


def _is_held(folder: Path) -> bool:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False


def _refuse_live(folder: Path) -> None:
    """Raises :class:`RunFolderError` where a live run holds ``folder``; makes no lock where there is none."""
    if (folder / _LOCK).is_file():
        with (folder / _LOCK).open("a+") as file:
            _take(folder, file)


def _take(folder: Path, file: IO[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        raise RunFolderError(f"{folder} is in use by a live rollstream train (process {owner}); wait for it, stop it, or choose another name") from None


def _above(folder: Path) -> Path:
    """The nearest folder that is there already: ``folder`` itself, or one it will be made in."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
