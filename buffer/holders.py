"""Who holds leases: given out against credit, kept by heartbeats, offered again after silence, and told of once nobody waits for them any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from . import wire
from .books import Books
from .evaluations import Evaluations
from .peers import Peer, Peers

logger = logging.getLogger(__name__)

_RESTART_GRACE_S = 5.0
_PROBE_S = 2.0  # twice the clients' heartbeat
_SETTLE_S = 5.0  # a lease younger than this may still be on its way to its actor


class Holders:
    """Leases and peers. What it gives is to be sent once the round is committed: (route, message)."""

    def __init__(self, books: Books, evaluations: Evaluations, peers: Peers, lease_timeout_s: float) -> None:
        self._books, self._evaluations, self._peers = books, evaluations, peers
        self._lease_timeout_s = lease_timeout_s
        self._started_at = time.monotonic()

    def _of(self, peer: Peer) -> Books | Evaluations:
        """The books that this peer's leases are in: evaluators are never given one to train, nor actors one to evaluate."""
        return self._evaluations if peer.role == "evaluator" else self._books

    def num_held(self, peer: Peer) -> int:
        """Groups that a peer holds."""
        return self._of(peer).num_held(peer.peer_id)

    def greet(self, peer: Peer, holding: list[int], now: float) -> None:
        """A process says Hello: it keeps what it says it plays, if nobody else has it by now; the rest of what it held is offered again."""
        leases = self._of(peer)
        leases.give_up(peer.peer_id, keep=frozenset(holding))
        leases.claim(peer.peer_id, holding, now)

    def keep(self, peer: Peer, holding: list[int], now: float) -> None:
        """A heartbeat: what the peer does not name, although it must have reached it, is offered again."""
        self._of(peer).give_up(peer.peer_id, keep=frozenset(holding), granted_before=now - _SETTLE_S)

    def give_back(self, peer: Peer, group_ids: Iterable[int] | None = None) -> None:
        """Offers again what a peer held, all of it or these groups."""
        leases = self._of(peer)
        leases.give_up(peer.peer_id, keep=frozenset() if group_ids is None else leases.held(peer.peer_id) - frozenset(group_ids))

    def closed(self, peer: Peer, holding: list[int]) -> wire.Closed | None:
        """Of the groups that a peer says it plays, those that wait for no member any more; None where all do.

        It follows from the books alone, so it is told again until the peer holds them no more, by whichever process of the buffer.
        """
        leases = self._of(peer)
        closed = [group_id for group_id in holding if not leases.awaits(group_id)]
        return wire.Closed(closed) if closed else None

    def postpone(self, seconds: float, now: float) -> None:
        """Nobody could be heard for so long before ``now``: it counts for no deadline, no lease and nobody's silence."""
        self._started_at += seconds
        self._books.postpone(seconds)
        self._evaluations.postpone(seconds)
        for peer in self._peers:
            peer.last_heard = min(now, peer.last_heard + seconds)

    def expire(self, now: float) -> list[tuple[bytes, wire.ServerMessage]]:
        """Offers again what silent actors hold; after a restart, what actors hold that have not come back."""
        grace_s = min(self._lease_timeout_s, _RESTART_GRACE_S)
        for book, peer_id in [(owner, holder) for owner in (self._books, self._evaluations) for holder in owner.holders()]:
            peer = self._peers.named(peer_id)
            gone = now - self._started_at > grace_s if peer is None else now - peer.last_heard > self._lease_timeout_s
            if gone:
                num_expired = book.give_up(peer_id)
                self._books.counters["leases_expired"] += num_expired
                logger.warning("event=leases_expired peer=%s leases=%d timeout_s=%g", peer_id, num_expired, self._lease_timeout_s)
                if peer is not None:
                    self._peers.leave(peer)
        probes: list[tuple[bytes, wire.ServerMessage]] = []
        for peer in self._peers:
            if peer.role in ("actor", "evaluator") and now - max(peer.last_heard, peer.probed_at) > _PROBE_S:
                peer.probed_at = now
                probes.append((peer.route, wire.Acknowledged()))  # fails at once where the process is dead: see Handlers.unreachable
        return probes

    def grant(self, now: float) -> list[tuple[bytes, wire.ServerMessage]]:
        """Leases to push, as far as admission and credit go."""
        pushed: dict[bytes, list[wire.Lease]] = {}
        for role in ("actor", "evaluator"):
            while (peer := self._neediest(role)) is not None and (lease := self._of(peer).grant(peer.peer_id, now)) is not None:
                peer.credit -= 1
                peer.num_pushed += 1
                pushed.setdefault(peer.route, []).append(lease)
        return [(route, wire.Leases(leases)) for route, leases in pushed.items()]

    def _neediest(self, role: str) -> Peer | None:
        """Of those with credit the one that holds fewest leases: who asks for more than it plays keeps no other waiting. None where nobody has credit."""
        asking = (peer for peer in self._peers if peer.role == role and peer.credit > 0)
        return min(asking, key=lambda peer: (self.num_held(peer), -peer.credit), default=None)
