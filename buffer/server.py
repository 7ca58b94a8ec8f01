"""The buffer: one process, one thread, one loop.

:func:`serve` is the role; :class:`BufferServer` the loop; what each message does is in ``handlers``.
"""

from __future__ import annotations

import errno
import logging
import os
import socket as sockets
import threading
import time
from contextlib import closing
from pathlib import Path

import zmq

from ..configs.run_folder import Run
from ..errors import ConfigError, DiskFull
from . import wire
from .amendments import Amendments
from .blob_store import recover_blobs
from .books import Books
from .curve import Context, Gate, buffer_keys, prepare_keys
from .handlers import Handlers
from .ledger import Ledger
from .log import Log
from .memory import keep_freed_memory
from .recovery import forget, fork_once, newest_version, refuse_older
from .sealer import Sealer, recover_sealed
from .window import Rules

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_GRACE_S = 5.0
_MAX_ROUND_MESSAGES = 512
_MAX_WAITING = 64
_MAX_ROUND_BYTES = 4 * 1024 * 1024


def serve(run: Run, stop: threading.Event) -> None:
    """Runs the buffer of ``run`` until ``stop`` is set, or until the supervisor told everybody to stop and they left.

    Raises:
        ConfigError: the endpoint cannot be bound, or its keys cannot be used.
        RunFolderError: another buffer serves this run, or the folder belongs to another run.
        StreamError: the disk is full, or the books do not close; nothing of that round was acknowledged.

    """
    keep_freed_memory()
    rules = Rules.of(run.config)
    prepare_keys(run)
    log = Log(run.stream_folder, segment_bytes=run.config.buffer.segment_mb * 2**20)
    try:
        ledger = Ledger(run.ledger_path, run.run_id, log_folder=run.stream_folder)
        try:
            refuse_older(ledger, newest_version(run.checkpoints_folder))
            recover_sealed(ledger, run.stream_folder)
            log.start_after(ledger.last_segment())
            lost = log.recover(ledger.segment_ends(), ledger.unsynced())
            lost += sorted(set(recover_blobs(ledger, run.blobs_folder, log)) - set(lost))
            if lost:
                forget(ledger, lost, log.read)
            fork_once(ledger, run.fork, log.read)
            log.release()
            with closing(Amendments(run.amendments_folder, ledger, segment_bytes=run.config.buffer.segment_mb * 2**20)) as amendments:
                _serve(run, Handlers(run, Books(ledger, rules), log, amendments), stop)
        finally:
            ledger.close()
    finally:
        log.close()


def _serve(run: Run, handlers: Handlers, stop: threading.Event) -> None:
    """Binds the endpoint and runs the loop."""
    with (
        zmq.Context() as context,
        _router(context) as socket,
        Gate(context, socket, buffer_keys(run), handlers.count_refusal) as gate,
        Sealer(run, handlers.books, handlers.log, handlers.blobs, handlers.amendments) as sealer,
    ):
        _bind(socket, run)
        leased, version = handlers.books.num_leased, handlers.books.version
        logger.info("event=serving endpoint=%s run_id=%s leased=%d version=%d", run.bind_endpoint, run.run_id, leased, version)
        try:
            loop(socket, handlers, sealer, gate, stop)
        finally:
            if run.bind_endpoint.startswith("ipc://"):
                Path(run.bind_endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def loop(socket: zmq.Socket[bytes], handlers: Handlers, sealer: Sealer, gate: Gate, stop: threading.Event) -> None:
    """Receive, record, answer.

    Consumes: messages of actors, learner and supervisor.
    Waits for: any message, at most 0.1 s.
    Released by: any peer that speaks; the clock, for leases that expire and pulls that have waited a second; ``stop``.
    Produces: rows in the log and entries in the ledger; only then acknowledgements, leases, batches.

    One round drains what has arrived, up to a bound, and commits it together: one flush of the log, then one transaction. A round that finds the disk full is
    kept; nothing more is taken in and nothing of it answered until it is committed.
    """
    poller = zmq.Poller()
    for polled in (socket, *gate.sockets):
        poller.register(polled, zmq.POLLIN)
    while not stop.is_set() and not handlers.everybody_left(time.monotonic(), _STOP_GRACE_S):
        found = dict(poller.poll(int(_POLL_S * 1000)))
        gate.attend()
        drained = socket not in found or _drain(socket, handlers)
        try:
            if handlers.hold is None:
                handlers.tick(time.monotonic(), drained=drained)
                sealer.record()
                handlers.commit()
                sealer.recorded()
            elif handlers.hold.is_due(time.monotonic()):
                handlers.commit()
                logger.info("event=space_again held_s=%.1f", handlers.hold.held_s)
                put_aside = handlers.end_hold(handlers.hold)
                _send(socket, handlers)
                for frames in put_aside:
                    handlers.receive(frames, time.monotonic())
                continue
            else:
                handlers.answer_waiting(time.monotonic())
        except DiskFull as error:
            if handlers.hold is None:
                logger.warning("event=disk_full reason=%r", str(error))
                handlers.begin_hold(str(error))
        _send(socket, handlers)
    if handlers.hold is not None:
        handlers.blobs.abandon()
        handlers.log.abandon()
        handlers.amendments.abandon()
        handlers.books.ledger.abandon()
        raise DiskFull(f"stopped while the disk was full, nothing acknowledged is lost: {handlers.hold.reason}")


def _send(socket: zmq.Socket[bytes], handlers: Handlers) -> None:
    for parts in handlers.take_outbox():
        try:
            socket.send_multipart(parts, copy=False)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            if handlers.hold is None:
                handlers.unreachable(parts[0])


def _drain(socket: zmq.Socket[bytes], handlers: Handlers) -> bool:
    """Handles what has arrived; True when nothing is left, False where this round has enough."""
    for _ in range(_MAX_ROUND_MESSAGES):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return True
        handlers.receive(frames, time.monotonic())
        if handlers.round_bytes >= _MAX_ROUND_BYTES:
            break
    return False


# --- the socket ---------------------------------------------------------------------------------------------------------------------


def _router(context: Context) -> zmq.Socket[bytes]:
    """The buffer's socket, not yet bound."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # never drop: what is queued per peer is bounded by its own requests, its credit, and the clients' limit on what is unacknowledged
    socket.setsockopt(zmq.SNDHWM, 0)
    # whatever a peer sends: at most so many messages of it wait here, the rest at its own side
    socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 1000)
    return socket


def _bind(socket: zmq.Socket[bytes], run: Run) -> None:
    """Opens the run's endpoint."""
    if run.bind_endpoint.startswith("ipc://"):
        _prepare_folder(run)
        socket.setsockopt(zmq.RCVBUF, wire.LOCAL_SOCKET_BYTES)
    if "[" in run.bind_endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(run.bind_endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"buffer.endpoint {run.bind_endpoint} is in use; set another port, or `ipc` to stay on this machine") from error
        raise ConfigError(f"buffer.endpoint {run.bind_endpoint} cannot be bound: {error}") from error


def _prepare_folder(run: Run) -> None:
    """The private folder of the Unix socket; a socket file that nobody serves any more is replaced by the bind."""
    folder = run.socket_folder
    path = str(folder / "buffer")
    if len(path.encode()) > 107:
        raise ConfigError(f"the Unix socket {path} has {len(path.encode())} bytes, the limit is 107; set TMPDIR to a shorter folder, or buffer.endpoint to tcp")
    for private in (folder.parent, folder):
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private.stat().st_uid != os.getuid():
            raise ConfigError(f"{private} belongs to user {private.stat().st_uid}, not to {os.getuid()}; remove it or set TMPDIR")
        private.chmod(0o700)
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise ConfigError(f"another buffer serves {path}; stop that run first")
