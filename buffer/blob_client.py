"""How an actor gets blobs to the buffer: each at most once, however many trajectories name it and however many actors have it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from typing import Any

from ..errors import Refused
from . import wire
from .blobs import Blob

_MAX_KNOWN = 100_000
"""Digests an actor remembers as stored; of older ones it asks again."""

_PARCEL_BYTES = 4 * 2**20
"""Blobs go together in a message of about so much."""

Request = Callable[..., Awaitable[wire.ServerMessage]]


class BlobSender:
    """Asks the buffer which blobs it lacks and sends those. ``request`` says a message with its frames until it is answered."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._stored: OrderedDict[str, None] = OrderedDict()
        self._sending: dict[str, asyncio.Future[None]] = {}

    async def send(self, blobs: Iterable[Blob]) -> None:
        """Returns once the buffer has every one of them.

        Raises:
            Refused: the buffer will not store one; the reason says why.

        """
        wanted = {blob.digest: blob for blob in blobs if blob.digest not in self._stored}
        ours = [blob for digest, blob in wanted.items() if digest not in self._sending]
        others = [self._sending[digest] for digest in wanted if digest in self._sending]
        if ours:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._sending.update(dict.fromkeys((blob.digest for blob in ours), done))
            try:
                await self._send(ours)
            except BaseException as error:
                done.set_exception(error if isinstance(error, Refused) else Refused("unknown_blob", "the one who was sending it gave up"))
                done.exception()  # nobody else need wait for it
                raise
            else:
                done.set_result(None)
            finally:
                for blob in ours:
                    del self._sending[blob.digest]
        for other in others:
            await asyncio.shield(other)

    async def _send(self, blobs: list[Blob]) -> None:
        lacked = await self._request(wire.AskBlobs([blob.digest for blob in blobs]))
        if isinstance(lacked, wire.Refused):
            raise Refused(lacked.code, lacked.reason)
        assert isinstance(lacked, wire.LackedBlobs)
        answers = await asyncio.gather(*(self._put(some) for some in _parcels(blobs, set(lacked.digests))))
        if refused := next((answer for answer in answers if isinstance(answer, wire.Refused)), None):
            raise Refused(refused.code, refused.reason)
        self._stored.update(dict.fromkeys(blob.digest for blob in blobs))
        while len(self._stored) > _MAX_KNOWN:
            self._stored.popitem(last=False)

    async def _put(self, blobs: list[Blob]) -> wire.ServerMessage:
        return await self._request(wire.PutBlobs([blob.digest for blob in blobs]), *(blob.data for blob in blobs))

    def forget(self, blobs: Iterable[Any]) -> None:
        """The buffer says that it has some of these no more: it is asked again before they are relied on."""
        for blob in blobs:
            self._stored.pop(blob.digest, None)


def _parcels(blobs: Iterable[Blob], lacked: Container[str]) -> Iterator[list[Blob]]:
    """Those that are lacked, together as far as they are small."""
    parcel: list[Blob] = []
    for blob in blobs:
        if blob.digest in lacked:
            parcel.append(blob)
            if sum(len(each.data) for each in parcel) >= _PARCEL_BYTES:
                yield parcel
                parcel = []
    if parcel:
        yield parcel
