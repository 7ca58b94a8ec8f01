"""One role as a process, seen from outside: how it is started, watched and ended, and what a launcher is to the supervisor.

Between a role and whoever started it: the command line ``python -m rollstream ROLE RUN --id NAME --supervised``, ``logs/NAME.log`` (the process' output),
``logs/NAME.error.json`` (why it failed), a pipe on standard input that ends when its starter is gone, SIGTERM to stop in order, and the exit code.
Nothing else knows how it was started. Light: no torch, no ray.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Protocol, Self, cast

from .configs.learner_schema import FsdpPolicy
from .configs.run_folder import Run
from .configs.schema import Config
from .errors import RoleFailed, describe

RoleName = Literal["buffer", "learner", "actor", "evaluator", "scorer"]
STOP_GRACE_S = 30.0
"""How long a role may take to stop in order before it is ended."""


@dataclass(frozen=True, slots=True)
class Role:
    """One process a run consists of. ``num_threads`` is how many threads its numerical libraries may use; ``rank`` counts the learner's processes."""

    kind: RoleName
    name: str
    num_threads: int = 1
    rank: int = 0


def roles_of(config: Config) -> list[Role]:
    """Every process of a run, in the order in which they are started."""
    actors = [Role("actor", f"actor-{index}", config.actors.num_threads) for index in range(config.actors.num)]
    policy = config.learner.policy
    num_ranks = policy.ranks if isinstance(policy, FsdpPolicy) else 1
    learners = [Role("learner", f"learner-{rank}" if rank else "learner", config.learner.num_threads, rank) for rank in range(num_ranks)]
    evaluation = config.evaluation
    evaluators = [Role("evaluator", f"evaluator-{index}", evaluation.num_threads) for index in range(evaluation.num)] if evaluation is not None else []
    return [Role("buffer", "buffer"), *learners, *actors, *evaluators]


def scoring_roles_of(config: Config) -> list[Role]:
    """Every process of a run that only scores a checkpoint."""
    return [Role("buffer", "buffer"), Role("scorer", "scorer"), *(role for role in roles_of(config) if role.kind == "evaluator")]


def error_path(run: Run, name: str) -> Path:
    """Where a role leaves the reason of its failure."""
    return run.logs_folder / f"{name}.error.json"


def write_error(path: Path, error: Exception) -> None:
    """Leaves the reason of a failure for whoever started this process."""
    record = {
        "kind": type(error).__name__,
        "families": [base.__name__ for base in type(error).__mro__],
        "message": describe(error),
        "exit_code": getattr(error, "exit_code", 1),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)


@dataclass(frozen=True, slots=True)
class Death:
    """How a role process ended. ``kind`` and ``families`` name the class of the error and its bases; empty where the process left none."""

    name: str
    returncode: int
    message: str
    lived_s: float
    kind: str = ""
    families: tuple[str, ...] = ()
    exit_code: int = 1

    @property
    def needs_other_input(self) -> bool:
        """True where starting it again cannot help: what the user gave has to change."""
        return self.exit_code == 2

    def error(self) -> RoleFailed:
        """The failure as an exception with the exit code of its cause."""
        failure = RoleFailed(f"{self.name}: {self.message}")
        failure.exit_code = self.exit_code
        return failure


class Process(Protocol):
    """A role as the supervisor holds it: started, watched, started again, ended. No call waits for the process."""

    role: Role
    num_starts: int
    cpu_s: float
    """CPU seconds, user and system, of every process of this role that has ended."""

    @property
    def alive(self) -> bool:
        """True from :meth:`start` until :meth:`poll` has told the end."""
        ...

    @property
    def doing(self) -> str:
        """What keeps a started process from running, in a word for people (``placing``); empty where it runs."""
        ...

    def start(self) -> None:
        """Starts it; a failure to start is told by :meth:`poll`."""

    def poll(self) -> Death | None:
        """How it ended, once; None while it runs and after that."""
        ...

    def terminate(self) -> None:
        """Asks it to stop in order."""

    def kill(self) -> None:
        """Ends it and everything it started, at once."""

    def abort(self, reason: str) -> None:
        """Ends it, stuck as it is, so that it leaves a trace of where it was; ``reason`` opens the message of its death."""


class Launcher(Protocol):
    """Where the roles of a run live. A context manager: what it holds for them is taken at the start and given back at the end."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def processes(self, roles: Sequence[Role]) -> Sequence[Process]:
        """A handle per role, in the given order. Raises the :class:`RollstreamError` that says why there can be none."""
        ...

    def reach(self) -> Run | None:
        """The run as this process reaches its buffer; None while nobody knows where that is."""
        ...

    def news(self) -> list[str]:
        """What happened to the places of the roles since the last call, for people."""
        ...


class LocalLauncher:
    """The roles are processes of this machine."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def processes(self, roles: Sequence[Role]) -> list[RoleProcess]:
        """A handle per role."""
        return [RoleProcess(self._run, role) for role in roles]

    def reach(self) -> Run:
        """The run itself."""
        return self._run

    def news(self) -> list[str]:
        """None: their place is here."""
        return []


class RoleProcess:
    """A role as a child process of this one.

    ``folder`` is the working folder it starts in, by default this process' own; ``address`` is where it finds the buffer, unless the run's folder says so;
    ``meet`` is where the ranks of the learner meet, unless they are all on this machine.
    """

    doing = ""

    def __init__(self, run: Run, role: Role, *, folder: Path | None = None, address: str | None = None, meet: str | None = None) -> None:
        self.run, self.role = run, role
        self.cpu_s = 0.0
        self.num_starts = 0
        self._folder = folder
        self._options = [text for name, value in (("--endpoint", address), ("--meet", meet)) if value is not None for text in (name, value)]
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._aborted = ""

    @property
    def log_path(self) -> Path:
        """Where the process' output goes."""
        return self.run.logs_folder / f"{self.role.name}.log"

    @property
    def alive(self) -> bool:
        """True from the start until the end was collected."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Process id; None while none runs."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process in a session of its own, so that the terminal's Ctrl-C reaches the supervisor alone."""
        error_path(self.run, self.role.name).unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "rollstream", self.role.kind, str(self.run.folder), "--id", self.role.name, "--supervised", *self._options]
        command += ["--rank", str(self.role.rank)] if self.role.rank else []
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment(), cwd=self._folder, start_new_session=True, close_fds=True
            )
        self._started_at = time.monotonic()
        self._aborted = ""
        self.num_starts += 1

    def poll(self) -> Death | None:
        """Collects the process if it has ended: how, once; None while it runs and after that."""
        if self._process is None:
            return None
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return None
        process, self._process = self._process, None
        process.returncode = os.waitstatus_to_exitcode(status)
        cast("IO[bytes]", process.stdin).close()
        _signal_group(pid, signal.SIGKILL)  # whatever an environment may have left running
        self.cpu_s += usage.ru_utime + usage.ru_stime
        return self._describe_death(process.returncode)

    def terminate(self) -> None:
        """Asks it to stop in order. Not through ``Popen``, which would collect a dead process and its CPU time before :meth:`poll` does."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and everything it started, at once."""
        if self._process is not None:
            _signal_group(self._process.pid, signal.SIGKILL)

    def abort(self, reason: str) -> None:
        """Ends it with the traces of its threads in its log, from which its death tells where it was; by force if it cannot even do that."""
        self._aborted = reason
        if self._process is not None:
            pid = self._process.pid
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
                os.kill(pid, signal.SIGCONT)  # one that was stopped takes no signal before

    def _environment(self) -> dict[str, str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(self.role.num_threads))
        return os.environ | threads | {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}

    def _describe_death(self, returncode: int) -> Death:
        lived_s = time.monotonic() - self._started_at
        if returncode == 0:
            return Death(self.role.name, 0, "ended", lived_s)
        record = _read_error(error_path(self.run, self.role.name))
        if record is not None:
            families = tuple(str(family) for family in record["families"])
            return Death(self.role.name, returncode, str(record["message"]), lived_s, str(record["kind"]), families, int(record["exit_code"]))
        if self._aborted:
            return Death(self.role.name, returncode, f"{self._aborted}{where_it_was(_tail(self.log_path))}", lived_s)
        if returncode < 0:
            hint = "; out of memory?" if returncode == -signal.SIGKILL else ""
            return Death(self.role.name, returncode, f"killed by signal {-returncode} ({_signal_name(-returncode)}){hint}", lived_s)
        last = _last_line(self.log_path) or "it wrote nothing"
        said = last.removeprefix("error: ") if last.startswith("error: ") else f"exit code {returncode}: {last}"
        return Death(self.role.name, returncode, said, lived_s)


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _read_error(path: Path) -> dict[str, Any] | None:
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def where_it_was(log: str) -> str:
    """In which method of an environment a process was when it was aborted, from the traces at the end of its log; empty where it was in none.

    The method is what lies right above the environment's own border to user code; the line is the innermost one, where it does not return.
    """
    traces = log.rpartition("Fatal Python error")[2].split("(most recent call first):")
    for trace in traces[1:]:
        frames = _FRAME.findall(trace)
        border = next((place for place, (path, _, name) in enumerate(frames) if name == "_ask" and path.endswith(os.path.join("envs", "chat.py"))), 0)
        if border:
            method, (path, line, _) = frames[border - 1][2], next((frame for frame in frames[:border] if frame[0] == frames[border - 1][0]), frames[border - 1])
            return (
                f"; it was in {method} ({Path(path).name}, line {line}): a method that takes long has to be async and give way, or hand its work to a process"
            )
    return ""


_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_TAIL_BYTES = 65_536


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _last_line(path: Path) -> str:
    """What a process said last, but for what the interpreter adds while it is taken apart."""
    lines = [line.strip() for line in _tail(path).splitlines() if line.strip() and not line.startswith("sys:1: ")]
    return lines[-1] if lines else ""
