"""How an actor speaks to the buffer: leases in, finished trajectories out, on one asyncio loop.

Four background tasks: *receive* hands answers to whoever waits for them, *send* coalesces finished trajectories into appends, *beat* keeps the leases alive
and says again what was not answered, *door* hears of keys that were refused. They live in a task group: the first that fails ends the ``async with`` block
with its own error.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import pyarrow as pa
import zmq
import zmq.asyncio

from ..errors import ConfigError, DataRefused, DeadlineExceeded, Refused
from . import wire
from .columns import SCHEMA_VERSION, encode, frame_checksum, to_frame
from .curve import ClientKeys, Door
from .types import Trajectory

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
_RESEND_S = 5.0
_COALESCE_S = 0.002
_COALESCE_BYTES = 1024 * 1024
_MAX_UNACKNOWLEDGED_BYTES = 32 * 1024 * 1024
_BYTES_PER_TOKEN = 9  # token id, mask, log-probability

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(wire.Envelope[wire.ServerMessage])


@dataclass(slots=True)
class _Finished:
    """A trajectory on its way; ``stored`` resolves once it is durable."""

    trajectory: Trajectory
    size_bytes: int
    stored: asyncio.Future[None]


@dataclass(slots=True)
class _Append:
    """An append the buffer has not answered yet."""

    message: wire.Append
    frame: pa.Buffer
    finished: list[_Finished]
    sent_at: float


class ActorClient:
    """The actor's side of the stream; ``async with ActorClient(...) as client``.

    ``stop_reason`` is the buffer's once it said Stop. At most 32 MB are unacknowledged at once: further appends wait. ``silent_s``: how long the buffer may
    be silent (dead, restarting) before the client gives up. ``tasks``: how many tasks environments have, where their number is finite.

    Raises (out of the ``async with`` block):
        DeadlineExceeded: the buffer was silent.
        Refused: wrong run, protocol, schema or keys.
        ConfigError: another number of tasks than the run counts.
    """

    def __init__(
        self, endpoint: str, run_id: str, peer_id: str, *, tasks: Mapping[str, int] | None = None, silent_s: float = 30.0, keys: ClientKeys | None = None
    ) -> None:
        self.stop_reason: str | None = None
        self._keys = keys
        self._endpoint = endpoint
        self._run_id = run_id
        self._peer_id = peer_id
        self._tasks_known = dict(tasks or {})
        self._silent_s = silent_s
        self._incarnation = uuid.uuid4().hex
        self._request_ids = itertools.count(1)
        self._leases: deque[wire.Lease] = deque()
        self._lease_came = asyncio.Event()
        self._holding: Counter[int] = Counter()
        self._num_received = 0
        self._capacity = 0
        self._credit_sent: tuple[int, int] | None = None
        self._finished: deque[_Finished] = deque()
        self._finished_came = asyncio.Event()
        self._unacknowledged: dict[int, _Append] = {}
        self._room = asyncio.Event()
        self._released: dict[int, asyncio.Future[None]] = {}
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._waiting_for = ""
        self._welcome = asyncio.Event()
        self._hello_id = 0
        self._hello_at = 0.0
        self._silent_beats = 0

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by _MAX_UNACKNOWLEDGED_BYTES
        self._door = Door(self._socket, self._endpoint, self._keys)
        self._socket.connect(self._endpoint)
        self._silent_beats = 0
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._background = [self._tasks.create_task(work()) for work in (self._receive, self._send_finished, self._beat, self._watch_door)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._background:
            task.cancel()
        try:
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            with contextlib.suppress(zmq.ZMQError):
                self._say(wire.Farewell())
            self._door.close()
            self._socket.close()
            self._context.term()

    # --- leases ---------------------------------------------------------------------------------------------------------------------

    def credit(self, num_groups: int) -> None:
        """States how many more groups the actor could take from :meth:`next_lease`, which counts down by itself."""
        self._capacity = num_groups
        self._post_credit()

    async def next_lease(self) -> wire.Lease | None:
        """The next group to play; None once the run ends or :meth:`stop` was called."""
        while self.stop_reason is None and not self._leases:
            self._lease_came.clear()
            await self._lease_came.wait()
        if self.stop_reason is not None:
            return None
        self._capacity = max(0, self._capacity - 1)
        return self._leases.popleft()

    def finish(self, group_id: int) -> None:
        """The actor plays this lease no more; call it when all members were appended."""
        self._holding[group_id] -= 1
        if self._holding[group_id] <= 0:
            del self._holding[group_id]

    def stop(self, reason: str = "the actor stops") -> None:
        """Makes :meth:`next_lease` give None from now on."""
        if self.stop_reason is None:
            self.stop_reason = reason
        self._lease_came.set()

    async def release(self) -> None:
        """Gives back all leases; finished members stay. Returns once the buffer knows, or after five seconds (it finds out by itself)."""
        held = list(self._holding)
        self._holding.clear()
        self._leases.clear()
        self._capacity = 0
        request_id = next(self._request_ids)
        released = self._released[request_id] = asyncio.get_running_loop().create_future()
        self._say(wire.Release(held), request_id)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(released, 5.0)
        del self._released[request_id]

    def report(self, counters: dict[str, float], gauges: dict[str, float], waiting_for: str) -> None:
        """The actor's latest numbers, sent with the next heartbeat: counters only grow, gauges are levels, ``waiting_for`` is for people."""
        self._counters, self._gauges, self._waiting_for = dict(counters), dict(gauges), waiting_for

    def _post_credit(self) -> None:
        """Sends the credit if it changed: capacity less the leases that came and were not taken yet."""
        stated = (max(0, self._capacity - len(self._leases)), self._num_received)
        if stated != self._credit_sent and self._welcome.is_set():
            self._credit_sent = stated
            self._say(wire.Credit(*stated), next(self._request_ids))

    # --- trajectories ---------------------------------------------------------------------------------------------------------------

    async def append(self, trajectory: Trajectory) -> None:
        """Returns once ``trajectory`` is durable (or another attempt at its member already was).

        Raises:
            DataRefused: it does not fit the columns.
            Refused: the buffer will not store it; the reason names the field.

        """
        stored = asyncio.get_running_loop().create_future()
        self._finished.append(_Finished(trajectory, trajectory.num_tokens * _BYTES_PER_TOKEN + len(trajectory.messages), stored))
        self._finished_came.set()
        await stored

    async def _send_finished(self) -> None:
        while True:
            self._finished_came.clear()
            if not self._finished:
                await self._finished_came.wait()
            if sum(finished.size_bytes for finished in self._finished) < _COALESCE_BYTES:
                await asyncio.sleep(_COALESCE_S)
            await self._welcome.wait()
            while sum(append.frame.size for append in self._unacknowledged.values()) > _MAX_UNACKNOWLEDGED_BYTES:
                self._room.clear()
                await self._room.wait()
            taken: list[_Finished] = []
            size_bytes = 0
            while self._finished and size_bytes < _COALESCE_BYTES:
                taken.append(self._finished.popleft())
                size_bytes += taken[-1].size_bytes
            if taken:
                self._append_together(taken)

    def _append_together(self, taken: list[_Finished]) -> None:
        try:
            frame = to_frame(encode([finished.trajectory for finished in taken]))
        except DataRefused as error:
            if len(taken) == 1:
                _fail(taken[0].stored, error)
                return
            for finished in taken:  # one of them does not fit: only that one fails
                self._append_together([finished])
            return
        append = _Append(wire.Append(len(taken), frame_checksum(frame)), frame, taken, time.monotonic())
        request_id = next(self._request_ids)
        self._unacknowledged[request_id] = append
        self._say(append.message, request_id, frame)

    def _answered(self, request_id: int, reply: wire.Appended | wire.Refused) -> None:
        append = self._unacknowledged.pop(request_id, None)
        self._room.set()
        if append is None:
            return
        if isinstance(reply, wire.Appended):
            for finished in append.finished:
                _resolve(finished.stored)
        elif len(append.finished) == 1:
            _fail(append.finished[0].stored, Refused(reply.code, reply.reason))
        else:
            for finished in append.finished:  # one of them is bad: only that one must fail
                self._append_together([finished])

    # --- the connection -------------------------------------------------------------------------------------------------------------

    def _say(self, message: wire.ClientMessage, request_id: int = 0, *payload: pa.Buffer) -> None:
        """Queues one message; the socket has no limit of its own, so this never waits."""
        header = _encoder.encode(wire.Envelope(wire.PROTOCOL_VERSION, self._run_id, request_id, message))
        self._socket.send_multipart([header, *payload], copy=not payload)

    def _say_hello(self) -> None:
        self._welcome.clear()
        self._hello_id = next(self._request_ids)
        self._hello_at = time.monotonic()
        self._num_received = 0
        self._say(wire.Hello("actor", self._peer_id, self._incarnation, SCHEMA_VERSION, list(self._holding), tasks=self._tasks_known), self._hello_id)

    async def _receive(self) -> None:
        while True:
            frames: list[Any] = await self._socket.recv_multipart(copy=False)
            envelope = _decoder.decode(frames[0].buffer)
            self._silent_beats = 0
            self._take(envelope.request_id, envelope.message)

    def _take(self, request_id: int, message: wire.ServerMessage) -> None:
        match message:
            case wire.Leases():
                self._num_received += len(message.leases)
                for lease in message.leases:
                    self._holding[lease.group_id] += 1
                    self._leases.append(lease)
                self._lease_came.set()
            case wire.Welcome() if request_id == self._hello_id:
                self._welcome.set()
                self._credit_sent = None
                self._post_credit()
                self._repeat_appends(older_than_s=0)
                for released in self._released.values():  # the Hello did not list them
                    _resolve(released)
            case wire.Stop():
                self.stop(message.reason)
            case wire.Refused(code="unknown_peer"):
                if self._welcome.is_set():
                    self._say_hello()
            case wire.Appended() | wire.Refused() if request_id in self._unacknowledged:
                self._answered(request_id, message)
            case wire.Refused(code="wrong_tasks"):
                raise ConfigError(message.reason)
            case wire.Refused():
                raise Refused(message.code, message.reason)
            case wire.Acknowledged() if request_id in self._released:
                _resolve(self._released[request_id])
            case _:
                pass

    async def _watch_door(self) -> None:
        while self._door.monitor is not None:
            self._door.check(await self._door.monitor.recv_multipart())

    async def _beat(self) -> None:
        self._say_hello()
        while True:
            await asyncio.sleep(_BEAT_S)
            now = time.monotonic()
            self._silent_beats += 1  # beats, not a clock: a process that slept must not blame the buffer
            if self._silent_beats * _BEAT_S > self._silent_s:
                raise DeadlineExceeded(
                    f"the buffer at {self._endpoint} was silent for {self._silent_s:g} s; {self._peer_id} waited for it; is its process alive?"
                )
            if not self._welcome.is_set():
                if now - self._hello_at > _RESEND_S:
                    self._say_hello()
                continue
            self._say(wire.Heartbeat(list(self._holding), self._counters, self._gauges, self._waiting_for), next(self._request_ids))
            self._repeat_appends(older_than_s=_RESEND_S)

    def _repeat_appends(self, *, older_than_s: float) -> None:
        now = time.monotonic()
        for request_id, append in self._unacknowledged.items():
            if now - append.sent_at >= older_than_s:
                append.sent_at = now
                self._say(append.message, request_id, append.frame)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
