"""One role as a process, seen from inside: what it does from its start to its end. How it is started is in ``processes``.

Only :func:`run_role` loads what a role needs.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, cast

from .buffer.weights import remove_weights
from .configs.learner_schema import FsdpPolicy
from .configs.loader import load_run
from .configs.run_folder import Run
from .configs.schema import Config, LocalLauncher
from .envs.registry import load_imports
from .errors import ConfigError, RollstreamError, describe
from .processes import STOP_GRACE_S, RoleName, error_path, write_error

ORPHANED_BUFFER_S = 8.0
"""How long a buffer without a supervisor goes on serving, so that the others can leave in order."""

_logger = logging.getLogger(__name__)
_ADDRESS = re.compile(r"tcp://([\w.-]+|\[[\da-fA-F:.]+\]):\d{1,5}")
_PEER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def run_role(
    role: RoleName,
    folder: Path,
    name: str,
    *,
    supervised: bool,
    rank: int = 0,
    meet: str | None = None,
    address: str | None = None,
    keys: Path | None = None,
) -> int:
    """Runs one role of the run in ``folder`` until its work is done or somebody stops it.

    ``address`` and ``keys`` are for a machine that reaches the buffer from outside: where, and with which copy of the run's client keys.

    ``name`` labels the process in logs and to the buffer; ``rank`` is that of a learner, ``meet`` the address at which ranks on several machines meet.

    SIGTERM, SIGINT and, when ``supervised``, the end of standard input set the stop event that the role's loop watches; a second SIGINT ends it at once.
    Raises what the role raised, after recording it for the supervisor.
    """
    if not _PEER_ID.fullmatch(name):
        raise ConfigError(f"--id {name!r} must be 1 to 64 letters, digits, '.', '_' or '-', such as actor-1")
    if address is not None and not _ADDRESS.fullmatch(address):
        raise ConfigError(f"--endpoint {address} must be tcp://HOST:PORT, where the buffer of the run is reached from here")
    run = dataclasses.replace(load_run(folder), address=address, keys=keys)
    stop = threading.Event()
    _stop_on_signals(stop)
    _log_to_stderr(name)
    try:
        if supervised:
            threading.Thread(target=_stop_when_orphaned, args=(stop, role, run), name="orphan-watch", daemon=True).start()
        _logger.info("event=started pid=%d run=%s", os.getpid(), run.run_id)
        load_imports(run.config.imports)
        _main_of(role, run, name, rank, meet)(stop)
    except Exception as error:
        cause = root_cause(error)
        if supervised:
            write_error(error_path(run, name), cause)
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


def probe(config: Config, *, alone: bool = True) -> None:
    """Builds what a learner builds first, without data: the objective, the advantages, the devices.

    ``alone`` means that every role has this machine; where they are spread, a process knows the learner's device only.

    Raises :class:`ConfigError` for names nobody registered, combinations that mean nothing, and devices this machine lacks.
    """
    import torch

    from .learner.objective import Objective
    from .learner.token_advantages import check_mode

    policy, device = config.learner.policy, config.learner.device
    if alone and isinstance(policy, FsdpPolicy) and device == "cuda" and (found := torch.cuda.device_count()) < policy.ranks:
        raise ConfigError(f"learner.policy.ranks {policy.ranks} with learner.device cuda: each rank needs a GPU, this machine has {found}; lower ranks")
    Objective(config.learner.loss)
    check_mode(config.learner)
    devices = {"learner.device": config.learner.device}
    if alone:
        devices["actors.device"] = config.actors.device
    if alone and config.evaluation is not None and config.evaluation.device is not None:
        devices["evaluation.device"] = config.evaluation.device
    for key, name in devices.items():
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"{key} {name!r} cannot be used: {str(error).splitlines()[0]}; use cpu, or a device this machine has") from None


def _main_of(role: RoleName, run: Run, name: str, rank: int, meet: str | None) -> Callable[[threading.Event], None]:
    """The blocking loop of a role. Imports it here, so that each process loads only what it needs."""
    if role == "buffer":
        from .buffer.server import serve

        return lambda stop: serve(run, stop)
    import torch

    if role == "learner":
        from .learner.loop import learn

        torch.set_num_threads(run.config.learner.num_threads)
        probe(run.config, alone=meet is None and isinstance(run.config.launcher, LocalLauncher))
        return lambda stop: learn(run, stop, rank, meet)
    if role == "scorer":
        from .learner.scorer import score

        return lambda stop: score(run, stop)
    if role == "evaluator":
        from .actors.evaluator import evaluate

        return lambda stop: evaluate(run, name, stop)
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
    if role in ("learner", "scorer"):
        shutil.rmtree(run.weights_folder, ignore_errors=True)  # this very process still holds its lock
    _tidy(role, run)
    _logger.error("event=ended_by_force after_s=%d", STOP_GRACE_S)
    os._exit(1)


def _tidy(role: RoleName, run: Run) -> None:
    """Removes what outlives a process and belongs to this role: shared memory of the learner, sockets of the buffer."""
    if role in ("learner", "scorer"):
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
