"""One role as a process, seen from both ends: what runs inside it, and the handle the supervisor holds.

Between the two: the command line ``python -m rollstream ROLE RUN --id NAME --supervised``, ``logs/NAME.log`` (the process' output),
``logs/NAME.error.json`` (why it failed, for whoever started it), a pipe on standard input that ends when the supervisor is gone, SIGTERM to
stop in order, and the exit code. Only :func:`run_role` loads what a role needs; the handle stays light.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, cast

from .buffer.weights import remove_weights
from .configs.loader import load_run
from .configs.run_folder import Run
from .configs.schema import Config
from .envs.registry import load_imports
from .errors import ConfigError, RoleFailed, RollstreamError, describe

RoleName = Literal["buffer", "learner", "actor"]
STOP_GRACE_S = 30.0
"""How long a role may take to stop in order before it is ended."""
ORPHANED_BUFFER_S = 8.0
"""How long a buffer without a supervisor goes on serving, so that the others can leave in order."""

_logger = logging.getLogger(__name__)
_PEER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


# --- inside the process -------------------------------------------------------------------------------------------------------------


def run_role(role: RoleName, folder: Path, name: str, *, supervised: bool) -> int:
    """Runs one role of the run in ``folder`` until its work is done or somebody stops it.

    ``name`` labels the process in logs and to the buffer. SIGTERM, SIGINT and, when ``supervised``, the end of standard input set the stop event
    that the role's loop watches; a second SIGINT ends it at once. Raises what the role raised, after recording it for the supervisor.
    """
    if not _PEER_ID.fullmatch(name):
        raise ConfigError(f"--id {name!r} must be 1 to 64 letters, digits, '.', '_' or '-', such as actor-1")
    run = load_run(folder)
    stop = threading.Event()
    _stop_on_signals(stop)
    _log_to_stderr(name)
    try:
        if supervised:
            threading.Thread(target=_stop_when_orphaned, args=(stop, role, run), name="orphan-watch", daemon=True).start()
        _logger.info("event=started pid=%d run=%s", os.getpid(), run.run_id)
        load_imports(run.config.imports)
        _main_of(role, run, name)(stop)
    except Exception as error:
        cause = root_cause(error)
        if supervised:
            _write_error(_error_path(run, name), cause)
        _logger.critical("event=failed error=%s", json.dumps(describe(cause)), exc_info=error)
        if supervised:
            _leave(getattr(cause, "exit_code", 1))
        raise cause from None
    _tidy(role, run)
    _logger.info("event=ended stopped=%s", stop.is_set())
    if supervised:
        _leave(0)
    return 0


def _leave(exit_code: int) -> NoReturn:
    """Ends the process without taking the interpreter apart: with torch loaded that takes seconds in which the supervisor waits for nothing."""
    atexit._run_exitfuncs()  # pyright: ignore[reportAttributeAccessIssue] - as multiprocessing does
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)


def probe(config: Config) -> None:
    """Builds what a learner builds first, without data: the objective, the advantages, the devices.

    Raises :class:`ConfigError` for names nobody registered, combinations that mean nothing, and devices this machine lacks.
    """
    import torch

    from .learner.advantages import advantage_named
    from .learner.objective import Objective

    Objective(config.learner.loss)
    advantage_named(config.learner.advantage.mode)
    for key, name in (("learner.device", config.learner.device), ("actors.device", config.actors.device)):
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"{key} {name!r} cannot be used: {str(error).splitlines()[0]}; use cpu, or a device this machine has") from None


def _main_of(role: RoleName, run: Run, name: str) -> Callable[[threading.Event], None]:
    """The blocking loop of a role. Imports it here, so that each process loads only what it needs."""
    if role == "buffer":
        from .buffer.server import serve

        return lambda stop: serve(run, stop)
    import torch

    if role == "learner":
        from .learner.loop import learn

        torch.set_num_threads(run.config.learner.num_threads)
        probe(run.config)
        return lambda stop: learn(run, stop)
    from .actors.loop import act

    torch.set_num_threads(run.config.actors.num_threads)
    return lambda stop: act(run, name, stop)


def _stop_on_signals(stop: threading.Event) -> None:
    def on_signal(number: int, frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


def _stop_when_orphaned(stop: threading.Event, role: RoleName, run: Run) -> None:
    """Waits for the end of standard input: the supervisor is gone, and nobody is left to tidy up."""
    while os.read(0, 4096):
        pass
    _logger.warning("event=orphaned reason=%s", json.dumps("the supervisor ended without stopping this role"))
    if role == "buffer":
        stop.wait(ORPHANED_BUFFER_S)
    stop.set()
    time.sleep(STOP_GRACE_S)
    if role == "learner":
        shutil.rmtree(run.weights_folder, ignore_errors=True)  # this very process still holds its lock
    _tidy(role, run)
    _logger.error("event=ended_by_force after_s=%d", STOP_GRACE_S)
    os._exit(1)


def _tidy(role: RoleName, run: Run) -> None:
    """Removes what outlives a process and belongs to this role: shared memory of the learner, sockets of the buffer."""
    if role == "learner":
        remove_weights(run.weights_folder)
    if role == "buffer":
        shutil.rmtree(run.socket_folder, ignore_errors=True)


class _KeyValues(logging.Formatter):
    """``ts=2026-01-31T12:00:00.000Z level=info role=actor-0 logger=rollstream.actors.loop event=…``."""

    def __init__(self, name: str) -> None:
        super().__init__(f"ts=%(asctime)s.%(msecs)03dZ level=%(level)s role={name} logger=%(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        record.level = record.levelname.lower()
        return super().format(record)


def _log_to_stderr(name: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_KeyValues(name))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(__package__).setLevel(logging.INFO)
    logging.captureWarnings(capture=True)


def root_cause(error: BaseException) -> Exception:
    """The failure a person should read first: the first of our own errors inside a group of tasks that failed together, else the first one."""
    found: list[Exception] = []

    def collect(item: BaseException) -> None:
        if isinstance(item, BaseExceptionGroup):
            for inner in cast("BaseExceptionGroup[BaseException]", item).exceptions:
                collect(inner)
        elif isinstance(item, Exception):
            found.append(item)

    collect(error)
    ours = [item for item in found if isinstance(item, RollstreamError)]
    return (ours or found or [RuntimeError(str(error))])[0]


def _write_error(path: Path, error: Exception) -> None:
    record = {
        "kind": type(error).__name__,
        "families": [base.__name__ for base in type(error).__mro__],
        "message": describe(error),
        "exit_code": getattr(error, "exit_code", 1),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)


def _error_path(run: Run, name: str) -> Path:
    return run.logs_folder / f"{name}.error.json"


# --- the supervisor's handle --------------------------------------------------------------------------------------------------------


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


class RoleProcess:
    """A role process, started, watched, restarted and ended by the supervisor."""

    def __init__(self, run: Run, role: RoleName, name: str, num_threads: int) -> None:
        self.run, self.role, self.name = run, role, name
        self.cpu_s = 0.0
        """CPU seconds, user and system, of every process of this role that has ended."""
        self.num_starts = 0
        self._num_threads = num_threads
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    @property
    def log_path(self) -> Path:
        """Where the process' output goes."""
        return self.run.logs_folder / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        """Process id; None while none runs."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process in a session of its own, so that the terminal's Ctrl-C reaches the supervisor alone."""
        _error_path(self.run, self.name).unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "rollstream", self.role, str(self.run.folder), "--id", self.name, "--supervised"]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment(), start_new_session=True, close_fds=True
            )
        self._started_at = time.monotonic()
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

    def _environment(self) -> dict[str, str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(self._num_threads))
        return os.environ | threads | {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}

    def _describe_death(self, returncode: int) -> Death:
        lived_s = time.monotonic() - self._started_at
        if returncode == 0:
            return Death(self.name, 0, "ended", lived_s)
        record = _read_error(_error_path(self.run, self.name))
        if record is not None:
            families = tuple(str(family) for family in record["families"])
            return Death(self.name, returncode, str(record["message"]), lived_s, str(record["kind"]), families, int(record["exit_code"]))
        if returncode < 0:
            hint = "; out of memory?" if returncode == -signal.SIGKILL else ""
            return Death(self.name, returncode, f"killed by signal {-returncode} ({_signal_name(-returncode)}){hint}", lived_s)
        last = _last_line(self.log_path) or "it wrote nothing"
        return Death(self.name, returncode, f"exit code {returncode}: {last}", lived_s)


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


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""
