"""Who talks to the buffer: routes, heartbeats, credit, and the two clients' small print that belongs to a peer rather than to the stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import Refused
from . import wire
from .wire import Hello, PeerStatus, Role

BUDGET_BYTES = 256 * 2**20
"""What all actors together may have under way to the buffer."""
_MAX_NAME = 200
_PLAYERS: tuple[Role, ...] = ("actor", "evaluator")
_MAY_SAY: dict[type[wire.Message], tuple[Role, ...]] = {
    **dict.fromkeys((wire.Credit, wire.Release, wire.Append, wire.AskBlobs, wire.PutBlobs), _PLAYERS),
    **dict.fromkeys((wire.PullBatch, wire.Trained, wire.Published, wire.Retained, wire.Sync, wire.FetchBlobs), ("learner",)),
    wire.Amend: (*_PLAYERS, "scorer"),
}
"""Which roles may say what changes the run or hands out what it holds; the rest anybody may."""
_MOST_BYTES, _LEAST_BYTES = 32 * 2**20, 2**20


def check_name(peer_id: str) -> None:
    """Refuses a name that logs and views could not show. Raises :class:`Refused`."""
    if not 1 <= len(peer_id) <= _MAX_NAME or not peer_id.isprintable():
        raise Refused("malformed", f"a peer's name has 1 to {_MAX_NAME} printable characters, this one has {len(peer_id)}: {peer_id[:40]!r}")


def check_role(role: Role, message: wire.ClientMessage) -> None:
    """Refuses what is not for a peer of this ``role`` to say. Raises :class:`Refused`."""
    allowed = ("supervisor",) if isinstance(message, wire.Farewell) and message.everybody else _MAY_SAY.get(type(message))
    if allowed is not None and role not in allowed:
        raise Refused("malformed", f"{type(message).__name__} is for {' and '.join(allowed)} to say, not for the {role}")


@dataclass(slots=True)
class Peer:
    """One client.

    ``num_pushed`` counts leases since its Hello; ``credit`` is what it may still be given; ``probed_at`` is when it was last written to only to see whether
    it is there.
    """

    route: bytes
    role: Role
    peer_id: str
    incarnation: str
    last_heard: float
    counters: dict[str, float] = field(default_factory=dict[str, float])
    gauges: dict[str, float] = field(default_factory=dict[str, float])
    waiting_for: str = ""
    credit: int = 0
    num_pushed: int = 0
    probed_at: float = 0.0

    def status(self, now: float, num_leases: int) -> PeerStatus:
        """For the terminal view."""
        return PeerStatus(self.role, self.peer_id, now - self.last_heard, self.counters, self.gauges, self.waiting_for, num_leases)


class Peers:
    """Everyone who said Hello and has not left. A peer id has one main route, where leases are pushed; a client may open more connections under other ids."""

    def __init__(self) -> None:
        self._by_route: dict[bytes, Peer] = {}
        self._by_id: dict[str, Peer] = {}
        self._replaced: set[str] = set()

    def hello(self, route: bytes, hello: Hello, now: float) -> Peer:
        """Enters a peer; a new connection under a known id replaces the old one and keeps its numbers if the process is the same."""
        peer = Peer(route, hello.role, hello.peer_id, hello.incarnation, now)
        known = self._by_id.get(hello.peer_id)
        if known is not None:
            self._by_route.pop(known.route, None)
            if known.incarnation != hello.incarnation:
                self._replaced.add(known.incarnation)
            else:
                peer.counters, peer.gauges, peer.waiting_for = known.counters, known.gauges, known.waiting_for
        self._by_route[route] = self._by_id[hello.peer_id] = peer
        return peer

    def was_replaced(self, incarnation: str) -> bool:
        """Whether another process has taken the place of this one since: two that go by one id would take each other's leases for ever."""
        return incarnation in self._replaced

    def at(self, route: bytes) -> Peer | None:
        """The peer on a connection, None where it has not said Hello to this process."""
        return self._by_route.get(route)

    def named(self, peer_id: str) -> Peer | None:
        """The peer of that id."""
        return self._by_id.get(peer_id)

    def leave(self, peer: Peer) -> None:
        """Forgets a peer."""
        self._by_route.pop(peer.route, None)
        if self._by_id.get(peer.peer_id) is peer:
            del self._by_id[peer.peer_id]

    def credit_bytes(self) -> int:
        """Bytes of rows and blobs that each actor may have unacknowledged: its share of the budget."""
        num_actors = sum(peer.role in ("actor", "evaluator") for peer in self._by_id.values())
        return max(_LEAST_BYTES, min(_MOST_BYTES, BUDGET_BYTES // max(1, num_actors)))

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_id.values()))
