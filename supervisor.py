"""Watches over the roles of one run, however they were started.

consumes    the ends of the role processes; the buffer's status, for the view
waits for   a tenth of a second, again and again
released by the learner's end (last version, or its failure), Ctrl-C, SIGTERM
produces    role processes, restarts; at the end an :class:`Outcome`, and no process, socket or shared memory

A dead actor, evaluator or buffer is started again, the learner never: the death of any of its ranks ends the run with that rank's error on top. Without an
evaluator training goes on.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

from .buffer.client import SupervisorClient
from .buffer.curve import client_keys, prepare_keys
from .buffer.weights import remove_weights
from .buffer.wire import StatusReply
from .configs.run_folder import Run
from .errors import RoleFailed, RollstreamError, StreamError
from .processes import STOP_GRACE_S, Death, Launcher, Process, Role, roles_of
from .tail import last_version
from .watch import ProcessState, Snapshot, View
from .watchdog import Watchdog

POLL_S = 0.1
VIEW_EVERY_S = 0.5
RESTART_DELAY_S = 0.5
"""Before the first restart; doubles with each further one, up to :data:`MAX_RESTART_DELAY_S`."""
MAX_RESTART_DELAY_S = 30.0
HEALTHY_AFTER_S = 60.0
"""A process that lived this long starts its delays anew."""
BUFFER_GRACE_S = 8.0
"""Of the time to stop in order, what is kept for the buffer, which goes last."""
RANK_GRACE_S = 5.0
"""How long the ranks of a learner have to end after one of them failed, before they are ended by force."""
CUT_OFF_S = 60.0
"""The same while a rank's node does not answer: it may be the node that failed, and that takes longer to be told."""
STATUS_TIMEOUT_S = 0.3
ABORT_GRACE_S = 3.0
"""How long a silent actor may take to write where it was."""
SAME_SIGNAL_S = 0.5
"""Signals that come this soon after one another are one."""
QUICK_S = 30.0
"""Two equal failures, each sooner than this after a start, will not be cured by a third."""


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


@dataclass(slots=True)
class Restarts:
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
    """Owns the role processes of one run: those of a training, or the ``roles`` given."""

    def __init__(self, run: Run, launcher: Launcher, view: View, roles: Sequence[Role] = ()) -> None:
        self._run, self._launcher, self._view = run, launcher, view
        self._processes: Sequence[Process] = ()
        self._roles = roles or roles_of(run.config)
        self._restarts = {role.name: Restarts() for role in self._roles}
        prepare_keys(run)
        self._client: SupervisorClient | None = None
        self._signals: list[int] = []
        self._signalled_at = float("-inf")
        self._started_at = time.monotonic()
        self._viewed_at = float("-inf")
        self._phase = "running"
        self._notices: list[str] = []
        self._failure: RollstreamError | None = None
        self._ranks: list[tuple[float, Death]] = []
        self._finished = False
        self._watchdog = Watchdog(run.config.buffer.lease_timeout_s)
        self._aborted_at: dict[str, float] = {}

    def supervise(self) -> Outcome:
        """Starts the roles, waits for the end of the run, ends them. Never leaves a process behind."""
        with _signals(self._note_signal), self._view:
            try:
                self._clear()
                with self._launcher:
                    self._processes = self._launcher.processes(self._roles)
                    try:
                        for process in self._processes:
                            process.start()
                        while not (self._finished or self._failure or self._signals):
                            self._tick()
                    finally:
                        self._end_roles()
            except RollstreamError as error:  # no place for them
                self._failure = error
            finally:
                self._clear()
                if self._client is not None:
                    self._client.close()
        return self._outcome()

    @property
    def _buffer(self) -> Process:
        return self._processes[0]

    def _tick(self) -> None:
        self._collect()
        for text in self._launcher.news():
            self._notice(text)
        self._judge_learner()
        self._start_due()
        self._show()
        time.sleep(POLL_S)

    def _collect(self) -> None:
        for process in self._processes:
            death = process.poll()
            if death is not None:
                self._on_death(process, death)

    def _on_death(self, process: Process, death: Death) -> None:
        if process.role.kind == "scorer":
            self._finished = death.returncode == 0
            self._failure = None if self._finished else death.error()
            return
        if process.role.kind == "learner":
            self._ranks.append((time.monotonic(), death))
            return
        self._watchdog.forget(process.role.name)
        self._aborted_at.pop(process.role.name, None)
        restarts = self._restarts[process.role.name]
        refusal = restarts.refuse(death, self._run.config.launcher.max_restarts)
        if refusal is not None and process.role.kind == "evaluator" and any(other.role.kind == "learner" for other in self._processes):
            self._notice(f"{process.role.name} stays down, training goes on without it: {refusal}")
            return
        if refusal is not None:
            self._failure = RoleFailed(f"{process.role.name}: {refusal}")
            self._failure.exit_code = death.exit_code
            return
        delay_s = restarts.plan(death, time.monotonic())
        self._notice(f"{process.role.name} died: {death.message}; starting it again in {delay_s:g} s")

    def _judge_learner(self) -> None:
        """The learner's end, once it is clear: all of its ranks ended, or one failed. Those that only miss another one wait a moment for its own error."""
        if not self._ranks:
            return
        failed = [death for _, death in self._ranks if death.returncode != 0]
        alive = [process for process in self._processes if process.role.kind == "learner" and process.alive]
        if failed:
            own = [death for death in failed if "RankFailed" not in death.families]
            grace_s = CUT_OFF_S if any(process.doing for process in alive) else RANK_GRACE_S
            if own or not alive or time.monotonic() - self._ranks[0][0] > grace_s:
                self._failure = (own or failed)[0].error()
                began = time.monotonic()
                self._end(alive, ask_at=began, deadline=began + RANK_GRACE_S)
        elif not alive:
            version, last = last_version(self._run.metrics_path), self._run.config.learner.versions
            self._finished = version >= last
            if not self._finished:
                self._failure = RoleFailed(f"learner: was told to stop at version {version} of {last} by somebody else; go on with --resume")

    def _start_due(self) -> None:
        now = time.monotonic()
        for process in self._processes:
            restarts = self._restarts[process.role.name]
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
        if status is not None and self._phase == "running":
            self._end_the_silent(status)
        states = [ProcessState(process.role.name, self._state_of(process, status), max(0, process.num_starts - 1)) for process in self._processes]
        elapsed_s = time.monotonic() - self._started_at
        self._view.show(Snapshot(self._run, elapsed_s, self._phase, status, states, tuple(self._notices)))
        self._viewed_at = time.monotonic()

    def _end_the_silent(self, status: StatusReply) -> None:
        """Ends actors whose event loop has stood still for longer than their leases last; they are started again like any that died."""
        now = time.monotonic()
        actors = {process.role.name: process for process in self._processes if process.role.kind == "actor" and process.alive}
        for name, at in list(self._aborted_at.items()):
            if name in actors and now - at > ABORT_GRACE_S:
                actors[name].kill()
        for name in self._watchdog.silent(status, actors, now):
            self._watchdog.forget(name)
            self._aborted_at[name] = now
            actors[name].abort(
                f"said nothing for {self._watchdog.limit_s:g} s (buffer.lease_timeout_s {self._run.config.buffer.lease_timeout_s:g}) and was ended"
            )

    def _status(self) -> StatusReply | None:
        client = self._connection()
        if not self._buffer.alive or client is None:
            return None
        try:
            return client.status(timeout_s=STATUS_TIMEOUT_S)
        except StreamError:
            return None

    def _connection(self) -> SupervisorClient | None:
        """To the buffer; None while nobody knows where it is."""
        if self._client is None and (run := self._launcher.reach()) is not None:
            self._client = SupervisorClient(run.endpoint, run.run_id, keys=client_keys(run))
        return self._client

    def _state_of(self, process: Process, status: StatusReply | None) -> str:
        if not process.alive:
            return "restarting" if self._restarts[process.role.name].due_at is not None else "ended"
        if process.doing:
            return process.doing
        if process.role.kind == "buffer":
            return "running" if status is not None else "starting"
        known = status is not None and any(peer.peer_id == process.role.name for peer in status.peers)
        return "running" if known else "starting"

    # --- the end ---

    def _end_roles(self) -> None:
        """Actors and learner first, while the buffer still takes what they finish; then the buffer. A further signal ends all at once."""
        self._phase = "finishing" if self._finished else "stopping"
        began = time.monotonic()
        others = [process for process in self._processes if process is not self._buffer]
        self._end(others, ask_at=began, deadline=began + STOP_GRACE_S - BUFFER_GRACE_S)
        told = False
        if self._buffer.alive and self._client is not None and not self._at_once:
            with suppress(StreamError):  # actors started by hand hear of it too, and the buffer waits a little for them
                told = self._client.stop_everybody(timeout_s=1.0)
        now = time.monotonic()
        self._end([self._buffer], ask_at=now + BUFFER_GRACE_S / 2 if told else now, deadline=now + BUFFER_GRACE_S)
        self._show(now=True)

    def _end(self, processes: Sequence[Process], *, ask_at: float, deadline: float) -> None:
        """Waits until ``processes`` have ended: asked to at ``ask_at``, by force after ``deadline``."""
        asked: set[str] = set()
        forced = False
        while alive := [process for process in processes if process.alive]:
            now = time.monotonic()
            if self._at_once or now > deadline:
                if not forced:
                    self._notice(f"ended by force: {', '.join(process.role.name for process in alive)}")
                forced = True
                for process in alive:
                    process.kill()
            elif now >= ask_at:
                for process in alive:
                    if process.role.name not in asked:
                        asked.add(process.role.name)
                        process.terminate()
            for process in alive:
                death = process.poll()
                if death is not None and process.role.kind == "learner" and death.returncode > 0 and self._failure is None:
                    self._failure = death.error()
            self._show()
            time.sleep(POLL_S / 2)

    def _note_signal(self, number: int) -> None:
        """One that follows at once is the same wish: ``timeout`` and some terminals signal the process and then its group."""
        now = time.monotonic()
        if now - self._signalled_at > SAME_SIGNAL_S:
            self._signals.append(number)
        self._signalled_at = now

    @property
    def _at_once(self) -> bool:
        return len(self._signals) > 1

    def _clear(self) -> None:
        """Removes sockets, shared memory and half-built models, also those an earlier process of this run had to leave behind."""
        for path in self._run.folder.glob(".model-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)
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
        cpu_s: dict[str, float] = {process.role.name: process.cpu_s for process in self._processes}
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
