"""Keys for endpoints that other machines can reach: who may speak to the buffer, and how a peer that may not hears of it.

    keys/buffer.json   the buffer's key pair, and the public keys it lets in
    keys/client.json   the key pair of the run's actors, learners and supervisors, and the buffer's public key

Both are made once per run, mode 0600 in a folder of mode 0700; ``client.json`` is what an actor on another machine is given. On this machine (``ipc``,
loopback) there are no keys. The mechanism is ZeroMQ's CURVE (RFC 25 and 26): whoever lacks the client's key gets no further than the handshake. The buffer
answers ZAP requests (RFC 27) in its own loop and watches its socket, so that everyone turned away is counted, by reason.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ..configs.run_folder import Run
from ..errors import ConfigError, Refused

logger = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"rollstream"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_MAX_UNEXPLAINED = 3  # a buffer that is being killed may cut a handshake short; not one after the other
_LOG_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class BufferKeys:
    """The buffer's side. ``clients`` are the public keys it lets in."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A client's side. ``buffer`` is the public key of the buffer it means."""

    buffer: bytes
    public: bytes
    secret: bytes = field(repr=False)


# --- files --------------------------------------------------------------------------------------------------------------------------


def prepare_keys(run: Run) -> None:
    """Makes the keys of a run whose buffer other machines can reach, unless they are there.

    Raises:
        ConfigError: the folder cannot be written.

    """
    if not run.needs_keys or run.keys_folder.is_dir():
        return
    temporary = run.keys_folder.with_name(f".keys.{os.getpid()}.tmp")
    try:
        temporary.mkdir(mode=0o700, parents=True)
        (public, secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        _write(temporary / "buffer.json", {"public": public, "secret": secret, "clients": [client_public]})
        _write(temporary / "client.json", {"buffer": public, "public": client_public, "secret": client_secret})
        temporary.rename(run.keys_folder)  # fails where another process was quicker: its keys count
    except OSError as error:
        if not run.keys_folder.is_dir():
            raise ConfigError(f"the keys of the run cannot be written to {run.keys_folder}: {error.strerror}; free space or mend the permissions") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def buffer_keys(run: Run) -> BufferKeys | None:
    """The buffer's keys; None where nobody beyond this machine can reach it.

    Raises:
        ConfigError: they are missing, damaged or readable by others.

    """
    if not run.needs_keys:
        return None
    values = _read(run.keys_folder / "buffer.json")
    return BufferKeys(_key(values, "public"), _key(values, "secret"), frozenset(key.encode() for key in values.get("clients", ())))


def client_keys(run: Run) -> ClientKeys | None:
    """The keys that open the run's buffer to its roles; None where none are needed.

    Raises:
        ConfigError: they are missing, damaged or readable by others.

    """
    if not run.needs_keys and run.keys is None:
        return None
    values = _read(run.keys or run.keys_folder / "client.json")
    return ClientKeys(*(_key(values, name) for name in ("buffer", "public", "secret")))


def _write(path: Path, values: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump(values, file, default=bytes.decode)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Any]:
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"the keys {path} cannot be read: {reason}; start the buffer first, or give --keys a copy of the run's keys/client.json") from None
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others than its owner; run `chmod 600 {path}`, or make a new run if somebody may have seen it")
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise ConfigError(f"{path} holds no keys; copy the run's keys/client.json anew") from None


def _key(values: dict[str, Any], name: str) -> bytes:
    key = str(values.get(name, "")).encode()
    if len(key) != 40:
        raise ConfigError(f"the keys hold no {name} key; copy the run's keys/client.json anew")
    return key


# --- the client's side --------------------------------------------------------------------------------------------------------------


class Door:
    """A client's way in, for its socket before it connects: keys, addresses of the newer kind, and word of handshakes that failed.

    ``monitor`` is None for Unix sockets, where nobody is turned away; else each of its messages goes to :meth:`check`.
    """

    def __init__(self, socket: Any, endpoint: str, keys: ClientKeys | None) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._has_keys = keys is not None
        self._num_unexplained = 0
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.buffer)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self.monitor: Any = socket.get_monitor_socket(_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED) if endpoint.startswith("tcp:") else None

    def close(self) -> None:
        """Ends the watch; before the socket itself closes."""
        if self.monitor is not None:
            self._socket.disable_monitor()
            self.monitor.close(0)

    def check(self, message: list[bytes]) -> None:
        """Takes one message of the socket's monitor.

        Raises:
            Refused: ``no_key`` or ``wrong_key``; trying again would not help.

        """
        event = parse_monitor_message(message)
        code = reason_for(event)
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_unexplained = 0
        elif code == "no_key":
            what = "asks for no keys, and this peer has some: is it the buffer of that run?" if self._has_keys else "lets in only who has the run's keys"
            raise Refused("no_key", f"the buffer at {self._endpoint} {what}; give the run's folder, or --keys with a copy of its keys/client.json")
        elif code == "wrong_key":
            raise Refused(
                "wrong_key", f"the buffer at {self._endpoint} does not know this peer's key: it is of another run; copy its run's keys/client.json anew"
            )
        else:
            self._num_unexplained += 1
            if self._num_unexplained >= _MAX_UNEXPLAINED and self._has_keys:
                raise Refused("wrong_key", f"the buffer at {self._endpoint} has other keys than this peer was given: they are of another run; copy them anew")


def reason_for(event: Any) -> str:
    """The refusal code behind a failed handshake, empty where the other side ended it without a word."""
    if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "wrong_key"
    if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "wrong_key" if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC else "no_key"
    return ""


# --- the buffer's side --------------------------------------------------------------------------------------------------------------

_WHY = {
    "no_key": "a peer without keys knocked, or one that broke off or does not speak ZeroMQ; it was not let in",
    "wrong_key": "a peer with the keys of another run knocked; it was not let in",
}


class Gate:
    """Guards the buffer's socket: answers who may come in, and counts through ``refused(code, num)`` who may not. Without keys it guards nothing.

    ``sockets`` are to be polled with the buffer's own; :meth:`attend` is called whenever one may have something.
    """

    def __init__(self, context: Context, socket: zmq.Socket[bytes], keys: BufferKeys | None, refused: Callable[[str], None]) -> None:
        self.sockets: list[zmq.Socket[bytes]] = []
        self._refused = refused
        self._socket = socket
        self._known = frozenset[bytes]()
        self._quiet_until: dict[str, float] = {}
        if keys is None:
            return
        self._known = keys.clients
        self._zap = context.socket(zmq.ROUTER)
        self._zap.bind(_ZAP)
        for option, value in (
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_PUBLICKEY, keys.public),
            (zmq.CURVE_SECRETKEY, keys.secret),
            (zmq.ZAP_DOMAIN, _DOMAIN),
            (zmq.HANDSHAKE_IVL, 10_000),
        ):
            socket.setsockopt(option, value)
        self._monitor = socket.get_monitor_socket(_FAILED)
        self.sockets = [self._zap, self._monitor]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.sockets:
            self._socket.disable_monitor()
            for socket in self.sockets:
                socket.close(0)

    def attend(self, now: float | None = None) -> None:
        """Answers whoever knocks, and counts whoever was turned away."""
        now = time.monotonic() if now is None else now
        for socket in self.sockets:
            while True:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if socket is self._zap:
                    self._answer(frames)
                else:
                    self._count(reason_for(parse_monitor_message(frames)) or "no_key", now)

    def _answer(self, frames: list[bytes]) -> None:
        """One ZAP request: envelope, empty frame, version, request id, domain, address, identity, mechanism, credentials."""
        start = frames.index(b"") + 1
        version, request_id, domain, address, _, mechanism, *credentials = frames[start:]
        known = (domain, mechanism) == (_DOMAIN, b"CURVE") and len(credentials) == 1 and z85.encode(credentials[0]) in self._known
        if not known:
            logger.warning("event=key_not_known address=%s", address.decode("ascii", "replace"))
        status = (b"200", b"known") if known else (b"400", b"this key is not of the run")
        self._zap.send_multipart([*frames[:start], version, request_id, *status, b"", b""])

    def _count(self, code: str, now: float) -> None:
        """Peers try again twenty times a second: each time counts, not each time is worth a line."""
        self._refused(code)
        if now >= self._quiet_until.get(code, 0.0):
            self._quiet_until[code] = now + _LOG_EVERY_S
            logger.warning("event=refused code=%s reason=%r", code, _WHY[code])
