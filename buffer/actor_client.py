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
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from ..errors import ConfigError, DeadlineExceeded, Refused
from . import wire
from .amendments import Amendment, encode_amendments
from .appends import Appends
from .blobs import Blob
from .columns import SCHEMA_VERSION, Compression, frame_checksum
from .curve import ClientKeys, Door
from .types import Trajectory

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
_RESEND_S = 5.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(wire.Envelope[wire.ServerMessage])


class ActorClient:
    """The side of an actor, or by its ``role`` of an evaluator; ``async with ActorClient(...) as client``.

    ``stop_reason`` is the buffer's once it said Stop. The buffer grants how many bytes may be unacknowledged at once: further appends wait. ``silent_s``: how
    long the buffer may be silent (dead, restarting), or leave one message unanswered, before the client gives up. ``compression`` is that of its rows.
    ``tasks``: how many tasks environments have, where their number is finite.

    Raises (out of the ``async with`` block):
        DeadlineExceeded: the buffer was silent, or left something unanswered; the message names what.
        Refused: wrong run, protocol, schema or keys.
        ConfigError: another number of tasks than the run counts.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        peer_id: str,
        *,
        role: wire.Role = "actor",
        tasks: Mapping[str, int] | None = None,
        silent_s: float = 30.0,
        keys: ClientKeys | None = None,
        compression: Compression = "none",
    ) -> None:
        self._role: wire.Role = role
        self.stop_reason: str | None = None
        self._keys = keys
        self._endpoint = endpoint
        self._run_id = run_id
        self.peer_id = peer_id
        self._tasks_known = dict(tasks or {})
        self._silent_s = silent_s
        self._incarnation = uuid.uuid4().hex
        self._request_ids = itertools.count(1)
        self._leases: deque[wire.Lease] = deque()
        self._lease_came = asyncio.Event()
        self._holding: Counter[int] = Counter()
        self._closed: set[int] = set()
        self._closed_came = asyncio.Event()
        self._num_received = 0
        self._capacity = 0
        self._credit_sent: tuple[int, int] | None = None
        self._released: dict[int, asyncio.Future[None]] = {}
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._waiting_for = ""
        self._welcome = asyncio.Event()
        self._appends = Appends(self._say, self._request_ids, self._welcome, lambda work: self._tasks.create_task(work), compression)
        self._hello_id = 0
        self._hello_at = 0.0
        self._silent_beats = self._unknown_beats = 0
        self._excused = False

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the bytes that the buffer grants
        if self._endpoint.startswith("ipc://"):
            self._socket.setsockopt(zmq.SNDBUF, wire.LOCAL_SOCKET_BYTES)
        self._door = Door(self._socket, self._endpoint, self._keys)
        self._socket.connect(self._endpoint)
        self._silent_beats = 0
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._background = [self._tasks.create_task(work()) for work in (self._receive, self._appends.send_finished, self._beat, self._watch_door)]
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

    async def closed(self) -> frozenset[int]:
        """The next groups that wait for no member any more although a lease of them was taken here; those not yet taken never come.

        The buffer says so with every heartbeat until :meth:`finish` is called, so a group may be named again.
        """
        await self._closed_came.wait()
        self._closed_came.clear()
        closed, self._closed = frozenset(self._closed), set()
        return closed

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

    def _close(self, group_ids: Sequence[int]) -> None:
        waiting = [lease for lease in self._leases if lease.group_id in group_ids]
        for lease in waiting:
            self._leases.remove(lease)
            self.finish(lease.group_id)
        if closed := set(group_ids) & self._holding.keys():
            self._closed |= closed
            self._closed_came.set()
        if waiting:
            self._post_credit()

    def _post_credit(self) -> None:
        """Sends the credit if it changed: capacity less the leases that came and were not taken yet."""
        stated = (max(0, self._capacity - len(self._leases)), self._num_received)
        if stated != self._credit_sent and self._welcome.is_set():
            self._credit_sent = stated
            self._say(wire.Credit(*stated), next(self._request_ids))

    # --- trajectories ---------------------------------------------------------------------------------------------------------------

    async def append(self, trajectory: Trajectory, blobs: Sequence[Blob] = ()) -> None:
        """Returns once ``trajectory`` is durable (or another attempt at its member already was). ``blobs`` are the images that it names.

        Raises:
            DataRefused: it does not fit the columns or the wire, or names an image that is not among ``blobs``.
            Refused: the buffer will not store it; the reason names the field.

        """
        await self._appends.append(trajectory, blobs)

    async def amend(self, amendments: Sequence[Amendment]) -> wire.Amended:
        """Returns once ``amendments`` are durable; all of them, or none. Saying the same again changes nothing.

        So that an actor can score, or say more of, what it has appended: a reward that was left open (``reward`` None), any other column at any time.

        Raises:
            DataRefused: they do not fit their columns.
            Refused: as :meth:`rollstream.buffer.client.ScorerClient.amend` does.

        """
        frame = encode_amendments(amendments)
        answer = await self._appends.request(wire.Amend(len(amendments), frame_checksum(frame)), frame)
        if isinstance(answer, wire.Refused):
            raise Refused(answer.code, answer.reason)
        assert isinstance(answer, wire.Amended)
        return answer

    # --- the connection -------------------------------------------------------------------------------------------------------------

    def _say(self, message: wire.ClientMessage, request_id: int = 0, *payload: Any) -> None:
        """Queues one message; the socket has no limit of its own, so this never waits."""
        header = _encoder.encode(wire.Envelope(wire.PROTOCOL_VERSION, self._run_id, request_id, message))
        self._socket.send_multipart([header, *payload], copy=not payload)

    def _say_hello(self) -> None:
        self._welcome.clear()
        self._hello_id = next(self._request_ids)
        self._hello_at = time.monotonic()
        self._num_received = 0
        self._say(wire.Hello(self._role, self.peer_id, self._incarnation, SCHEMA_VERSION, list(self._holding), tasks=self._tasks_known), self._hello_id)

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
            case wire.Closed():
                self._close(message.groups)
            case wire.Welcome() if request_id == self._hello_id:
                self._welcome.set()
                self._credit_sent = None
                self._post_credit()
                self._appends.grant(message.credit_bytes)
                self._appends.repeat(older_than_s=0)
                for released in self._released.values():  # the Hello did not list them
                    _resolve(released)
            case wire.Stop():
                self.stop(message.reason)
            case wire.Refused(code="unknown_peer"):
                if self._welcome.is_set():
                    self._say_hello()
            case wire.Wait():
                self._excused = True
            case _ if self._appends.expects(request_id):
                if isinstance(message, wire.Appended):
                    self._appends.grant(message.credit_bytes)
                self._appends.answered(request_id, message)
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
                    f"the buffer at {self._endpoint} was silent for {self._silent_s:g} s; {self.peer_id} waited for it; is its process alive?"
                )
            excused, self._excused = self._excused, False
            if not self._welcome.is_set():
                self._unknown_beats = 0 if excused else self._unknown_beats + 1
                if self._unknown_beats * _BEAT_S > self._silent_s:
                    raise DeadlineExceeded(f"the buffer at {self._endpoint} did not answer the Hello of {self.peer_id} for {self._silent_s:g} s")
                if now - self._hello_at > _RESEND_S:
                    self._say_hello()
                continue
            self._unknown_beats = 0
            num_beats, what = self._appends.beat(excused=excused)
            if num_beats * _BEAT_S > self._silent_s:
                raise DeadlineExceeded(
                    f"the buffer at {self._endpoint} did not acknowledge the {what} of {self.peer_id} for {self._silent_s:g} s, though it answers heartbeats"
                )
            self._say(wire.Heartbeat(list(self._holding), self._counters, self._gauges, self._waiting_for), next(self._request_ids))
            self._appends.repeat(older_than_s=_RESEND_S)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
