"""What the ray launcher runs on a node: a keeper, which holds the place of one role and the role's process in it.

consumes    start, terminate, kill, from the launcher
waits for   the end of its process
released by that end; its own death, by which the process loses its standard input and stops
produces    the process, its log and its error in the run's folder, exactly as on one machine; how it ended

It imports no ray: Ray makes an actor of it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from . import __version__
from .configs.learner_schema import FsdpPolicy
from .configs.loader import load_run
from .configs.run_folder import Run
from .errors import RollstreamError
from .processes import Death, Role, RoleProcess

_LOOK_S = 0.05
_SHARED = "put it on a file system that all nodes share (folder=PATH)"


@dataclass(frozen=True, slots=True)
class Place:
    """What a process finds where it runs. ``memory``, ``sockets`` and ``network`` are equal where two processes share those of the weights and the buffer.

    ``problem`` says why no role of the run can live there; empty where one can. ``meeting_port`` is kept free for the ranks of a learner, where rank 0 is.
    """

    host: str
    memory: str
    sockets: str
    network: str
    problem: str = ""
    meeting_port: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A process: its host, its id, and when it was made, since ids are used again."""

    host: str
    pid: int
    created_at: float


def place_of(run: Run) -> Place:
    """Where this process runs."""
    kernel = _kernel()
    memory, sockets = run.weights_folder.parent, Path(tempfile.gettempdir())
    return Place(socket.gethostname(), f"{kernel} {_device(memory)}", f"{kernel} {_device(sockets)} {sockets}", f"{kernel} {_network()}")


def _unfit(problem: str) -> Place:
    return Place(socket.gethostname(), "", "", "", problem)


def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{uuid.getnode():x}"


def _device(folder: Path) -> str:
    try:
        found = folder.stat()
    except OSError:
        return "missing"
    return f"{found.st_dev}:{found.st_ino}"


def _network() -> str:
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


class Keeper:
    """Holds one role of the run in ``folder``. Its process starts in ``working_folder``, with ``environment`` added to the node's own."""

    def __init__(self, folder: Path, run_id: str, version: str, role: Role, working_folder: Path, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        tempfile.tempdir = None
        self._folder, self._run_id, self._version, self._role = folder, run_id, version, role
        self._working_folder = working_folder
        self._process: RoleProcess | None = None
        self._started: tuple[int, Started] | None = None
        self._ended: tuple[Death, float] | None = None
        self._collecting = threading.Lock()
        self._waiters = 0
        self._reserved: socket.socket | None = None

    def place(self) -> Place:
        """Where it landed, and whether the role can live there."""
        if self._version != __version__:
            return _unfit(f"has rollstream {__version__}, the run was started by {self._version}: install the same everywhere")
        try:
            run = load_run(self._folder)
        except RollstreamError as error:
            return _unfit(f"does not see the run's folder ({error}): {_SHARED}")
        if run.run_id != self._run_id:
            return _unfit(f"sees another run in {self._folder}: {_SHARED}")
        if not self._working_folder.is_dir():
            return _unfit(f"lacks the working folder {self._working_folder}: start the run from a folder that all nodes share")
        place = place_of(run)
        meets = self._role.kind == "learner" and self._role.rank == 0 and isinstance(run.config.learner.policy, FsdpPolicy)
        return replace(place, meeting_port=self._reserve()) if meets else place

    def _reserve(self) -> int:
        """A port that the system gives to nobody else while this process lives, and on which rank 0 may listen all the same."""
        if self._reserved is None:
            self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reserved.bind(("", 0))  # it never listens
        return int(self._reserved.getsockname()[1])

    def start(self, number: int, address: str | None, meet: str | None, before: Started | None) -> Started:
        """Starts the process for the ``number``-th time, after whatever is left of the one ``before``, whose keeper was lost."""
        if self._started is not None and self._started[0] == number:
            return self._started[1]
        if before is not None and self._process is None:
            end(before)
        self._ended = None
        self._process = RoleProcess(load_run(self._folder), self._role, folder=self._working_folder, address=address, meet=meet)
        self._process.start()
        pid = self._process.pid
        assert pid is not None
        try:
            created_at = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            created_at = time.time()
        started = Started(_kernel(), pid, created_at)
        self._started = (number, started)
        return started

    def wait(self) -> tuple[Death, float] | None:
        """How the process ended, and the CPU seconds it took; returns when it has. None where it is asked again meanwhile: who asked first was cut off."""
        process = self._process
        assert process is not None
        with self._collecting:
            self._waiters += 1
            mine = self._waiters
        while True:
            with self._collecting:
                if self._ended is None and (death := process.poll()) is not None:
                    self._ended = (death, process.cpu_s)
                if self._ended is not None or mine != self._waiters:
                    return self._ended
            time.sleep(_LOOK_S)

    def terminate(self) -> None:
        """Asks the process to stop in order."""
        if self._process is not None:
            self._process.terminate()

    def abort(self, reason: str) -> None:
        """Ends the process, stuck as it is, with a trace of where it was."""
        if self._process is not None:
            self._process.abort(reason)

    def kill(self) -> None:
        """Ends the process and everything it started, at once."""
        if self._process is not None:
            self._process.kill()


def end(started: Started) -> None:
    """Ends a process of this machine that outlived its keeper, with all it started: two of one role must not live at once."""
    if started.host != _kernel():
        return
    with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
        process = psutil.Process(started.pid)
        if abs(process.create_time() - started.created_at) < 1.0:
            sys.stderr.write(f"ends process {started.pid}, which outlived its keeper\n")
            os.killpg(started.pid, signal.SIGKILL)
            process.wait(10)
