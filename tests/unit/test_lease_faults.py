"""Leases when things happen together: late failures of attempts that were given up, a stopped buffer, a full disk, twins of one name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import framed
from leased import failed, grant, played, reopened, rules
from rollstream.buffer import wire
from rollstream.buffer.books import Books
from rollstream.buffer.ledger import Ledger

# --- attempts that were given up ----------------------------------------------------------------------------------------------------


def test_a_late_failure_of_a_given_up_attempt_does_not_take_the_lease_from_who_plays_it_now(ledger: Ledger) -> None:
    books = Books(ledger, rules(batch_groups=1, depth=0, max_lag=0, group_size=1))
    first = grant(books)
    books.give_up("actor-0")
    second = grant(books, peer_id="actor-1")
    assert (second.group_id, second.attempt) == (first.group_id, 1)
    assert books.receive(failed(first, 0), 1) == "retry"
    assert books.held("actor-1") == {first.group_id}
    assert books.grant("actor-2", 0.0) is None, "nobody else plays it beside actor-1"
    assert books.receive(failed(second, 0), 1) == "retry"
    assert books.held("actor-1") == frozenset()
    assert grant(books, peer_id="actor-2").attempt == 2


def test_both_budgets_count_over_the_attempts_of_several_holders_in_any_order(ledger: Ledger) -> None:
    """Two of the one kind and one of the other, told late and twice: the member ends with the kind whose budget is used up, and not before."""
    books = Books(ledger, rules(batch_groups=1, depth=0, max_lag=0, group_size=2, max_infra_attempts=2, max_env_attempts=2))
    attempts = []
    for actor in ("actor-0", "actor-1", "actor-2"):
        attempts.append(grant(books, peer_id=actor))
        books.give_up(actor)
    assert books.receive(failed(attempts[2], 0, "infra"), 1) == "retry"
    assert books.receive(failed(attempts[0], 0, "env"), 1) == "retry"
    assert books.receive(failed(attempts[0], 0, "env"), 1) == "duplicate"
    assert books.receive(failed(attempts[1], 0, "env"), 1) == "store"
    assert books.counters["retries_infra"] == books.counters["retries_env"] == 1
    assert books.receive(failed(attempts[2], 0, "infra"), 1) == "superseded"
    last = grant(books, peer_id="actor-3")
    assert last.members == [1]
    assert books.receive(played(last, 1, reward=1.0), 1) == "store"
    assert books.counts["ready"] == 1


def test_an_actor_may_not_claim_what_another_is_known_to_hold_and_may_claim_what_nobody_does(ledger: Ledger) -> None:
    """Buffer and actors were started again; the one that comes first says it plays both groups."""
    books = Books(ledger, rules(batch_groups=2, depth=0, max_lag=0))
    grant(books, peer_id="actor-0")
    other = grant(books, peer_id="actor-1")
    books = reopened(books)
    books.give_up("actor-1", keep=frozenset({0, 1}))
    books.claim("actor-1", [0, 1], 0.0)
    assert (books.held("actor-0"), books.held("actor-1")) == ({0}, {1})
    books.give_up("actor-0")  # it came back with nothing
    books.claim("actor-1", [0, 1], 0.0)
    assert books.held("actor-1") == {0, other.group_id}
    assert books.grant("actor-0", 0.0) is None


# --- time in which nobody could be heard --------------------------------------------------------------------------------------------


class Peer:
    """One connection to a buffer without a socket."""

    def __init__(self, buffer: Any, name: str, route: bytes, incarnation: str = "one", role: wire.Role = "actor") -> None:
        self.buffer, self.route, self.leases = buffer, route, []
        self.hello = wire.Hello(role, name, incarnation, 1)

    def say(self, message: wire.ClientMessage) -> list[Any]:
        answers = self.buffer.say(msgspec.msgpack.encode(wire.Envelope(wire.PROTOCOL_VERSION, framed.RUN_ID, 1, message)), route=self.route)
        self.leases += [lease for answer in answers if isinstance(answer, wire.Leases) for lease in answer.leases]
        return answers


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[Any]:
    made = framed.Buffer(tmp_path, depth=0, max_lag=0, lease_timeout_s=10.0, group_deadline_s=30.0)
    yield made
    made.close()


def test_a_buffer_that_was_stopped_takes_no_lease_away_and_closes_no_group_for_it(buffer: Any) -> None:
    actor, other = Peer(buffer, "actor-0", b"a"), Peer(buffer, "actor-1", b"b")
    for peer in (actor, other):
        peer.say(peer.hello)
    actor.say(wire.Credit(1))
    other.say(wire.Credit(1))
    (lease,) = actor.leases
    buffer.now += 600.0  # its process was stopped; what the actors said meanwhile waits in their sockets
    other.say(wire.Heartbeat([]))
    assert other.leases == []
    assert buffer.handlers.books.held("actor-0") == {lease.group_id}
    assert buffer.handlers.books.counts["open"] == 1
    actor.say(wire.Heartbeat([lease.group_id]))
    for _ in range(12):  # from now on silence counts
        buffer.now += 1.0
        other.say(wire.Heartbeat([]))
    assert [lease.attempt for lease in other.leases] == [1]


def test_a_lease_that_waited_in_a_round_that_a_full_disk_held_up_is_not_taken_back_by_the_next_heartbeat(buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Peer(buffer, "actor-0", b"a")
    actor.say(actor.hello)
    handlers = buffer.handlers
    monkeypatch.setattr("rollstream.buffer.hold.time.monotonic", lambda: buffer.now)
    monkeypatch.setattr("rollstream.buffer.handlers.time.monotonic", lambda: buffer.now)
    credit = msgspec.msgpack.encode(wire.Envelope(wire.PROTOCOL_VERSION, framed.RUN_ID, 0, wire.Credit(1)))
    handlers.receive([zmq.Frame(part) for part in (b"a", credit)], buffer.now)
    handlers.tick(buffer.now, drained=True)
    handlers.begin_hold("no space")
    buffer.now += 60.0
    handlers.commit()
    handlers.end_hold(handlers.hold)
    actor.say(wire.Heartbeat([]))  # said before the lease came
    assert handlers.books.held("actor-0") == {0}
    assert handlers.books.counts["open"] == 1, "its deadline did not pass while the disk was full"


# --- twins --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["actor", "evaluator"])
def test_of_two_processes_of_one_name_the_newer_stays_whatever_they_play(buffer: Any, role: wire.Role) -> None:
    older, newer = Peer(buffer, "twin", b"a", "one", role), Peer(buffer, "twin", b"b", "two", role)
    older.say(older.hello)
    newer.say(newer.hello)
    assert [answer.code for answer in older.say(wire.Heartbeat([]))] == ["unknown_peer"]
    assert [answer.code for answer in older.say(older.hello)] == ["replaced"]
    assert isinstance(newer.say(wire.Heartbeat([]))[0], wire.Acknowledged)
