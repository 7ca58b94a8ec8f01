"""Finished trajectories on their way to the buffer: coalesced, within the bytes it granted, said again until they are answered.

consumes    what :meth:`Appends.append` is given
waits for   the buffer's Welcome; room in the bytes it granted
released by the buffer's answers
produces    appends and blobs on the wire; the end of each ``append``
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ..errors import DataRefused, Refused
from . import wire
from .blob_client import BlobSender
from .blobs import Blob
from .columns import Compression, encode, stated_checksum, to_frame
from .types import Trajectory

_COALESCE_S = 0.002
_COALESCE_BYTES = 1024 * 1024
_MAX_TRIES = 5  # of a trajectory whose blobs the buffer does not have, although it said so
_BYTES_PER_TOKEN = 9  # token id, mask, log-probability


@dataclass(slots=True)
class _Finished:
    """A trajectory on its way; ``stored`` resolves once it is durable."""

    trajectory: Trajectory
    size_bytes: int
    stored: asyncio.Future[None]
    blobs: tuple[Blob, ...] = ()
    num_tries: int = 0


@dataclass(slots=True)
class _Pending:
    """A message the buffer has not answered yet. ``num_beats`` counts the beats since it was first said in which the buffer had no excuse."""

    message: wire.ClientMessage
    payload: tuple[Any, ...]
    finished: list[_Finished]
    answer: asyncio.Future[wire.ServerMessage] | None
    sent_at: float
    num_beats: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(len(frame) for frame in self.payload)


class Appends:
    """One actor's appends and blobs.

    ``say`` puts a message on the wire under one of ``request_ids``; ``spawn`` runs a coroutine beside the others; ``welcome`` is set while the buffer
    knows this actor. ``credit_bytes`` is what it grants: rows and blobs that may be unacknowledged at once (but one message always may).
    """

    def __init__(
        self,
        say: Callable[..., None],
        request_ids: Iterator[int],
        welcome: asyncio.Event,
        spawn: Callable[[Coroutine[Any, Any, None]], Any],
        compression: Compression,
    ) -> None:
        self.credit_bytes = 0
        self._say, self._request_ids, self._welcome, self._spawn = say, request_ids, welcome, spawn
        self._compression: Compression = compression
        self._finished: deque[_Finished] = deque()
        self._finished_bytes = 0
        self._finished_came = asyncio.Event()
        self._pending: dict[int, _Pending] = {}
        self._room = asyncio.Event()
        self.blobs = BlobSender(self.request)

    @property
    def num_unacknowledged_bytes(self) -> int:
        """Bytes of rows and blobs that were said and not answered."""
        return sum(pending.size_bytes for pending in self._pending.values())

    async def append(self, trajectory: Trajectory, blobs: Sequence[Blob]) -> None:
        """See :meth:`ActorClient.append`."""
        missing = {span.digest for segment in trajectory.segments for span in segment.media} - {blob.digest for blob in blobs}
        if missing:
            raise DataRefused(f"{trajectory.key} names {len(missing)} images whose bytes were not given, the first is {min(missing)}")
        stored = asyncio.get_running_loop().create_future()
        size_bytes = trajectory.num_tokens * _BYTES_PER_TOKEN + len(trajectory.messages)
        await self._queue(_Finished(trajectory, size_bytes, stored, tuple(blobs)))
        await stored

    async def _queue(self, finished: _Finished) -> None:
        """Puts a trajectory in line once the buffer has its blobs."""
        if finished.blobs:
            await self.blobs.send(finished.blobs)
        self._finished.append(finished)
        self._finished_bytes += finished.size_bytes
        self._finished_came.set()

    async def _queue_again(self, finished: _Finished) -> None:
        """The buffer had removed a blob meanwhile, or lost it with its machine's power."""
        finished.num_tries += 1
        self.blobs.forget(finished.blobs)
        try:
            await self._queue(finished)
        except Refused as error:
            _fail(finished.stored, error)

    async def send_finished(self) -> None:
        """Coalesces what is finished into appends, for ever."""
        while True:
            self._finished_came.clear()
            if not self._finished:
                await self._finished_came.wait()
            if self._finished_bytes < _COALESCE_BYTES:
                await asyncio.sleep(_COALESCE_S if self._pending else 0)  # where nothing is under way, waiting for more would only cost time
            await self._welcome.wait()
            taken: list[_Finished] = []
            size_bytes = 0
            while self._finished and size_bytes < _COALESCE_BYTES:
                taken.append(self._finished.popleft())
                size_bytes += taken[-1].size_bytes
            self._finished_bytes -= size_bytes
            for message, frame, together in self._framed(taken):
                await self._wait_for_room(frame.size)
                self._put(message, (frame,), together, None)

    def _framed(self, taken: list[_Finished]) -> list[tuple[wire.Append, pa.Buffer, list[_Finished]]]:
        """As few appends as can be; a trajectory that does not fit fails alone."""
        if not taken:
            return []
        try:
            frame = to_frame(encode([finished.trajectory for finished in taken]), self._compression)
            if frame.size > wire.MAX_FRAME_BYTES:
                raise DataRefused(f"{taken[0].trajectory.key} has {frame.size:,} bytes; at most {wire.MAX_FRAME_BYTES:,} go over the wire at once")
        except DataRefused as error:
            if len(taken) > 1:
                return [framed for finished in taken for framed in self._framed([finished])]
            _fail(taken[0].stored, error)
            return []
        return [(wire.Append(len(taken), stated_checksum(frame)), frame, taken)]

    async def request(self, message: wire.ClientMessage, *payload: Any) -> wire.ServerMessage:
        """Says ``message`` until it is answered."""
        await self._welcome.wait()
        if payload:
            await self._wait_for_room(sum(len(frame) for frame in payload))
        answer = asyncio.get_running_loop().create_future()
        self._put(message, payload, [], answer)
        return await answer

    async def _wait_for_room(self, size_bytes: int) -> None:
        while (under_way := self.num_unacknowledged_bytes) and under_way + size_bytes > self.credit_bytes:
            self._room.clear()
            await self._room.wait()

    def _put(self, message: wire.ClientMessage, payload: tuple[Any, ...], finished: list[_Finished], answer: asyncio.Future[Any] | None) -> None:
        request_id = next(self._request_ids)
        self._pending[request_id] = _Pending(message, payload, finished, answer, time.monotonic())
        self._say(message, request_id, *payload)

    # --- answers --------------------------------------------------------------------------------------------------------------------

    def grant(self, credit_bytes: int) -> None:
        """The buffer's word on how many bytes may be unacknowledged from now on."""
        self.credit_bytes = credit_bytes
        self._room.set()

    def expects(self, request_id: int) -> bool:
        """Whether an answer under this id is ours."""
        return request_id in self._pending

    def answered(self, request_id: int, reply: wire.ServerMessage) -> None:
        """Takes the answer to one of ours."""
        pending = self._pending.pop(request_id)
        self._room.set()
        if pending.answer is not None:
            if not pending.answer.done():
                pending.answer.set_result(reply)
        elif not isinstance(reply, wire.Refused):
            for finished in pending.finished:
                if not finished.stored.done():
                    finished.stored.set_result(None)
        elif reply.code == "unknown_blob" and pending.finished[0].num_tries < _MAX_TRIES:
            for finished in pending.finished:
                self._spawn(self._queue_again(finished))
        elif len(pending.finished) == 1:
            _fail(pending.finished[0].stored, Refused(reply.code, reply.reason))
        else:
            for finished in pending.finished:  # one of them is bad: only that one must fail
                for message, frame, together in self._framed([finished]):
                    self._put(message, (frame,), together, None)

    def repeat(self, *, older_than_s: float) -> None:
        """Says again what was not answered for so long."""
        now = time.monotonic()
        for request_id, pending in self._pending.items():
            if now - pending.sent_at >= older_than_s:
                pending.sent_at = now
                self._say(pending.message, request_id, *pending.payload)

    def beat(self, *, excused: bool) -> tuple[int, str]:
        """One more beat went by; ``excused`` where the buffer said why it takes nothing in. Gives the most beats anything has waited, and what it is."""
        longest, name = 0, ""
        for pending in self._pending.values():
            pending.num_beats = 0 if excused else pending.num_beats + 1
            if pending.num_beats > longest:
                longest, name = pending.num_beats, f"{type(pending.message).__name__} of {pending.size_bytes:,} bytes"
        return longest, name


def _fail(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
