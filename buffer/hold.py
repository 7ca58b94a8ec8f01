"""What the buffer still does while its disk is full.

The round that could not be committed is kept with its answers. Appends and blobs are neither kept nor answered: actors hold what is not acknowledged and
send it again. Heartbeats, pulls and looks are answered at once, so nobody takes the buffer for dead. Everything else is put aside, answered with the reason,
and handled when there is space again; requests are idempotent, and one that is sent again meanwhile takes the place of its first copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq

from . import wire

DISK_FULL = "disk full"
_RETRY_S = 0.5
_LOOKS = (wire.StatusRequest, wire.PullBatch, wire.AskBlobs, wire.FetchBlobs)


class Hold:
    """One stretch of time in which the disk takes nothing; ``outbox`` are the answers that wait, ``put_aside`` the messages, by route and request id."""

    def __init__(self, error: str, outbox: list[Sequence[Any]]) -> None:
        self.reason = f"{DISK_FULL}: {error}"
        self.outbox = outbox
        self.put_aside: dict[tuple[bytes, int], Sequence[zmq.Frame]] = {}
        self._since = self._tried = time.monotonic()

    @property
    def held_s(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._since

    def is_due(self, now: float) -> bool:
        """Whether it is time to try the disk again."""
        if now - self._tried < _RETRY_S:
            return False
        self._tried = now
        return True

    def lets_through(self, message: wire.ClientMessage) -> bool:
        """Whether a message is handled as ever: it changes nothing that must be written."""
        return isinstance(message, wire.StatusRequest | wire.PullBatch | wire.AskBlobs | wire.FetchBlobs) or (
            isinstance(message, wire.Farewell) and message.everybody
        )
