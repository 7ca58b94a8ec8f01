"""The composition root: checks a run, starts its roles, watches over them, ends them.

consumes    the exits of the role processes; the buffer's status, for the view
waits for   a tenth of a second, again and again
released by the learner's end (last version, or its failure), Ctrl-C, SIGTERM
produces    a run folder, role processes, restarts; at the end an :class:`Outcome`, and no process, socket or shared memory

It loads no torch: the roles do the work. A dead actor or buffer is started again, the learner never.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from .buffer.client import SupervisorClient
from .buffer.weights import remove_weights
from .buffer.wire import StatusReply
from .configs.checks import check_config, check_machine
from .configs.loader import create_run, load_run
from .configs.run_folder import Run
from .configs.schema import Config, FolderModel
from .envs import registry
from .envs.trial import try_out
from .errors import ConfigError, RoleFailed, RollstreamError, RunFolderError, StreamError
from .models import check_model_folder
from .roles import STOP_GRACE_S, Death, RoleProcess
from .tail import last_version
from .watch import ProcessState, Snapshot, View

POLL_S = 0.1
VIEW_EVERY_S = 0.5
RESTART_DELAY_S = 0.5
"""Before the first restart; doubles with each further one, up to :data:`MAX_RESTART_DELAY_S`."""
MAX_RESTART_DELAY_S = 30.0
HEALTHY_AFTER_S = 60.0
"""A process that lived this long starts its delays anew."""
BUFFER_GRACE_S = 8.0
"""Of the time to stop in order, what is kept for the buffer, which goes last."""
STATUS_TIMEOUT_S = 0.3
PROBE_TIMEOUT_S = 120.0
REFUSED = 2
"""Exit code where the input has to change."""
QUICK_S = 30.0
"""Two equal failures, each sooner than this after a start, will not be cured by a third."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``cpu_s`` are CPU seconds per role name, user and system, restarts included."""

    run: Run
    exit_code: int
    error: RollstreamError | None
    wall_s: float
    cpu_s: dict[str, float]
    num_restarts: int
    notices: tuple[str, ...] = ()


def train(config: Config, *, resume: bool, view: View) -> Outcome:
    """Runs ``config`` to its last version.

    Everything is checked first, and a refused run leaves nothing on disk. Raises :class:`ConfigError`, :class:`RunFolderError`,
    :class:`UnknownEnv` and the like; what goes wrong later is in the outcome.
    """
    folder = run_folder(config, resume=resume)
    check(config)
    with locked(folder):
        run = create_run(config, resume=resume)
        outcome = Supervisor(run, view).supervise()
        if outcome.exit_code == REFUSED and not resume and not any(run.checkpoints_folder.iterdir()):
            _forget(run)
        return outcome


def _forget(run: Run) -> None:
    """Empties the folder of a run that a role refused before there was anything to train from, so that the corrected one finds its name free."""
    for entry in run.folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != ".lock":
            entry.unlink()


def check(config: Config) -> list[str]:
    """Everything that can be known without torch: contradictions, the environment, the model, this machine. Writes nothing.

    Returns notices: what is worth a look although it can run. Raises the :class:`RollstreamError` of the first thing that is wrong.
    """
    check_config(config)
    if isinstance(config.model, FolderModel):
        check_model_folder(config.model.path)
    notices = check_env(config)
    folder = (Path(config.folder) / config.name).resolve()
    check_machine(Run(folder=folder, config=config, run_id="0" * 32))
    return notices


def check_env(config: Config) -> list[str]:
    """Makes the environment and tries it out: a plain turn, a call of each tool. Returns notices.

    Raises :class:`UnknownEnv`, or :class:`ConfigError` for whatever its code does wrong, arguments it does not take, a warm-up it cannot demonstrate.
    """
    registry.load_imports(config.imports)
    return try_out(config.env.id, config.env.kwargs, demonstrates=config.warmup is not None)


def check_learner(config: Config) -> None:
    """What torch alone can tell: the objective and the devices, in a process of its own. In a run the learner's process does this first.

    Raises :class:`ConfigError`.
    """
    command = [sys.executable, "-P", "-m", "rollstream", "probe"]
    done = subprocess.run(command, input=config.model_dump_json(), capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT_S)
    if done.returncode != 0:
        line = (done.stderr.strip().splitlines() or [f"the check of the learner ended with exit code {done.returncode}"])[-1]
        raise ConfigError(line.removeprefix("error: "))


def run_folder(config: Config, *, resume: bool) -> Path:
    """Folder of the run, found fit for it. Raises :class:`RunFolderError` where it holds another run, or none to resume, or cannot be made."""
    folder = (Path(config.folder) / config.name).resolve()
    if resume:
        load_run(folder)
        return folder
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; choose another name (name=NEW) or remove it")
    if folder.is_dir() and any(entry.name != ".lock" for entry in folder.iterdir()):
        with locked(folder):
            raise RunFolderError(f"{folder} already holds a run; go on with --resume, choose another name (name=NEW), or remove the folder")
    above = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise RunFolderError(f"{folder} cannot be made: {above} is not a folder this user may write to; choose another folder (folder=PATH)")
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
        raise RunFolderError(f"{str(folder)[:120]} cannot be made: {(error.strerror or str(error)).lower()}; choose another folder (folder=PATH)") from None
    path = folder / ".lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise RunFolderError(f"{folder} is in use by a live rollstream train (process {owner}); wait for it, stop it, or choose another name") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            if not any(entry.name != ".lock" for entry in folder.iterdir()):
                path.unlink()
                folder.rmdir()
                if above:
                    folder.parent.rmdir()


@dataclass(slots=True)
class _Restarts:
    """What is known of one process' failures."""

    last: Death | None = None
    delay_s: float = RESTART_DELAY_S
    due_at: float | None = None
    num: int = field(default=0)

    def refuse(self, death: Death, max_restarts: int) -> str | None:
        """Why ``death`` must not be answered with another start; None where it may be."""
        if death.needs_other_input or "EnvError" in death.families:  # an actor counts what one episode costs; what ends it is beyond the bound
            return death.message
        same = self.last is not None and death.kind != "" and (death.kind, death.message) == (self.last.kind, self.last.message)
        if same and self.last is not None and max(death.lived_s, self.last.lived_s) < QUICK_S and "StreamError" not in death.families:
            return f"{death.message} (twice in a row)"
        if self.num >= max_restarts:
            return f"{death.message} (died {self.num + 1} times, launcher.max_restarts {max_restarts}); see its log, or raise the bound"
        return None

    def plan(self, death: Death, now: float) -> float:
        """Plans the next start; returns the delay in seconds."""
        if death.lived_s >= HEALTHY_AFTER_S:
            self.delay_s = RESTART_DELAY_S
        delay_s, self.delay_s = self.delay_s, min(self.delay_s * 2, MAX_RESTART_DELAY_S)
        self.last, self.due_at, self.num = death, now + delay_s, self.num + 1
        return delay_s


class Supervisor:
    """Owns the role processes of one run."""

    def __init__(self, run: Run, view: View) -> None:
        config = run.config
        self._run, self._view = run, view
        self._buffer = RoleProcess(run, "buffer", "buffer", 1)
        self._processes = [self._buffer, RoleProcess(run, "learner", "learner", config.learner.num_threads)]
        self._processes += [RoleProcess(run, "actor", f"actor-{index}", config.actors.num_threads) for index in range(config.actors.num)]
        self._restarts = {process.name: _Restarts() for process in self._processes}
        self._client = SupervisorClient(run.endpoint, run.run_id)
        self._signals: list[int] = []
        self._started_at = time.monotonic()
        self._viewed_at = float("-inf")
        self._phase = "running"
        self._notices: list[str] = []
        self._failure: RoleFailed | None = None
        self._finished = False

    def supervise(self) -> Outcome:
        """Starts the roles, waits for the end of the run, ends them. Never leaves a process behind."""
        with _signals(self._signals.append), self._view:
            try:
                self._clear()
                for process in self._processes:
                    process.start()
                while not (self._finished or self._failure or self._signals):
                    self._tick()
            finally:
                try:
                    self._end_roles()
                finally:
                    self._clear()
                    self._client.close()
        return self._outcome()

    def _tick(self) -> None:
        self._collect()
        self._start_due()
        self._show()
        time.sleep(POLL_S)

    def _collect(self) -> None:
        for process in self._processes:
            death = process.poll()
            if death is not None:
                self._on_death(process, death)

    def _on_death(self, process: RoleProcess, death: Death) -> None:
        if process.role == "learner":
            version, last = last_version(self._run.metrics_path), self._run.config.learner.versions
            self._finished = death.returncode == 0 and version >= last
            if death.returncode != 0:
                self._failure = death.error()
            elif not self._finished:
                self._failure = RoleFailed(f"learner: was told to stop at version {version} of {last} by somebody else; go on with --resume")
            return
        restarts = self._restarts[process.name]
        refusal = restarts.refuse(death, self._run.config.launcher.max_restarts)
        if refusal is not None:
            self._failure = RoleFailed(f"{process.name}: {refusal}")
            self._failure.exit_code = death.exit_code
            return
        delay_s = restarts.plan(death, time.monotonic())
        self._notice(f"{process.name} died: {death.message}; starting it again in {delay_s:g} s")

    def _start_due(self) -> None:
        now = time.monotonic()
        for process in self._processes:
            restarts = self._restarts[process.name]
            if restarts.due_at is not None and now >= restarts.due_at:
                restarts.due_at = None
                process.start()

    def _notice(self, text: str) -> None:
        self._notices.append(text)
        with suppress(OSError), (self._run.logs_folder / "supervisor.log").open("a", encoding="utf-8") as log:  # a full disk must not end the run here
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n")

    def _show(self, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._viewed_at < VIEW_EVERY_S:
            return
        status = self._status()
        states = [ProcessState(process.name, self._state_of(process, status), max(0, process.num_starts - 1)) for process in self._processes]
        elapsed_s = time.monotonic() - self._started_at
        self._view.show(Snapshot(self._run, elapsed_s, self._phase, status, states, tuple(self._notices)))
        self._viewed_at = time.monotonic()

    def _status(self) -> StatusReply | None:
        if self._buffer.pid is None:
            return None
        try:
            return self._client.status(timeout_s=STATUS_TIMEOUT_S)
        except StreamError:
            return None

    def _state_of(self, process: RoleProcess, status: StatusReply | None) -> str:
        if process.pid is None:
            return "restarting" if self._restarts[process.name].due_at is not None else "ended"
        if process.role == "buffer":
            return "running" if status is not None else "starting"
        known = status is not None and any(peer.peer_id == process.name for peer in status.peers)
        return "running" if known else "starting"

    # --- the end ---

    def _end_roles(self) -> None:
        """Actors and learner first, while the buffer still takes what they finish; then the buffer. A further signal ends all at once."""
        self._phase = "finishing" if self._finished else "stopping"
        began = time.monotonic()
        others = [process for process in self._processes if process is not self._buffer]
        self._end(others, ask_at=began, deadline=began + STOP_GRACE_S - BUFFER_GRACE_S)
        told = False
        if self._buffer.pid is not None and not self._at_once:
            with suppress(StreamError):  # actors started by hand hear of it too, and the buffer waits a little for them
                told = self._client.stop_everybody(timeout_s=1.0)
        now = time.monotonic()
        self._end([self._buffer], ask_at=now + BUFFER_GRACE_S / 2 if told else now, deadline=now + BUFFER_GRACE_S)
        self._show(now=True)

    def _end(self, processes: Sequence[RoleProcess], *, ask_at: float, deadline: float) -> None:
        """Waits until ``processes`` have ended: asked to at ``ask_at``, by force after ``deadline``."""
        asked: set[str] = set()
        forced = False
        while alive := [process for process in processes if process.pid is not None]:
            now = time.monotonic()
            if self._at_once or now > deadline:
                if not forced:
                    self._notice(f"ended by force: {', '.join(process.name for process in alive)}")
                forced = True
                for process in alive:
                    process.kill()
            elif now >= ask_at:
                for process in alive:
                    if process.name not in asked:
                        asked.add(process.name)
                        process.terminate()
            for process in alive:
                death = process.poll()
                if death is not None and process.role == "learner" and death.returncode > 0 and self._failure is None:
                    self._failure = death.error()
            self._show()
            time.sleep(POLL_S / 2)

    @property
    def _at_once(self) -> bool:
        return len(self._signals) > 1

    def _clear(self) -> None:
        """Removes sockets and shared memory, also those an earlier process of this run had to leave behind."""
        remove_weights(self._run.weights_folder)
        shutil.rmtree(self._run.socket_folder, ignore_errors=True)
        with suppress(OSError):
            self._run.socket_folder.parent.rmdir()

    def _outcome(self) -> Outcome:
        if self._failure is not None:
            exit_code = self._failure.exit_code
        elif self._finished:
            exit_code = 0
        else:
            exit_code = 128 + self._signals[0] if self._signals else 1
        cpu_s: dict[str, float] = {process.name: process.cpu_s for process in self._processes}
        num_restarts = sum(max(0, process.num_starts - 1) for process in self._processes)
        return Outcome(self._run, exit_code, self._failure, time.monotonic() - self._started_at, cpu_s, num_restarts, tuple(self._notices))


@contextmanager
def _signals(note: Callable[[int], None]) -> Generator[None]:
    """Turns Ctrl-C, SIGTERM and the terminal's end into notes for the loop; the former handlers come back afterwards."""

    def handler(number: int, frame: FrameType | None) -> None:
        note(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, former in zip(numbers, before, strict=True):
            signal.signal(number, former)
