"""Which actors have gone silent: their leases are expired by then, and their processes are alive and stuck.

A busy loop in an environment's method holds up the actor's event loop, and with it the heartbeats. The buffer offers the leases to others once an actor has
been silent for ``buffer.lease_timeout_s``; the process itself is the supervisor's to end.
"""

from __future__ import annotations

from collections.abc import Collection

from .buffer.wire import StatusReply

MARGIN_S = 2.0
"""Beyond the time-out of leases, so that they are expired first."""
_UNHEARD_S = 2.0
"""Between two answers of the buffer: longer, and the buffer was away, which is not the actors' silence."""


class Watchdog:
    """Knows when each actor was last heard, by what the buffer says of its peers. Times are on the caller's clock, in seconds."""

    def __init__(self, timeout_s: float) -> None:
        self.limit_s = timeout_s + MARGIN_S
        self._heard: dict[str, float] = {}
        self._answered_at: float | None = None

    def silent(self, status: StatusReply, names: Collection[str], now: float) -> list[str]:
        """Those of ``names`` that have spoken to the buffer before and have been silent for too long."""
        away = 0.0 if self._answered_at is None else now - self._answered_at
        self._answered_at = now
        if away > _UNHEARD_S:
            self._heard = {name: at + away for name, at in self._heard.items()}
        for peer in status.peers:
            if peer.role == "actor":
                self._heard[peer.peer_id] = now - peer.silent_s
        return [name for name in names if name in self._heard and now - self._heard[name] > self.limit_s]

    def forget(self, name: str) -> None:
        """The process has ended, or is being ended: the next one of that name has not spoken yet."""
        self._heard.pop(name, None)
