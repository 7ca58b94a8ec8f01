"""Leases under failures and deadlines: two budgets of attempts, groups closed with what they have."""

from __future__ import annotations

from typing import Any

import pytest

import leased
from leased import failed, grant, played, reopened
from rollstream.buffer.books import Books
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.recovery import forget
from rollstream.buffer.window import Rules
from rollstream.configs.checks import check_config
from rollstream.configs.loader import load_config
from rollstream.errors import ConfigError


def rules(**changes: Any) -> Rules:
    return leased.rules(
        **({"batch_groups": 1, "group_size": 4, "depth": 0, "max_lag": 1, "max_env_attempts": 2, "min_group": 2, "group_deadline_s": 30.0} | changes)
    )


# --- budgets ------------------------------------------------------------------------------------------------------------------------


def test_infrastructure_and_environment_failures_use_up_separate_budgets(ledger: Ledger) -> None:
    books = Books(ledger, rules(group_size=2))
    lease = grant(books)
    assert books.receive(played(lease, 0), 1) == "store"
    for reason in ("infra", "env", "infra"):
        assert books.receive(failed(lease, 1, reason), 2) == "retry"
        assert books.receive(failed(lease, 1, reason), 2) == "duplicate"
        lease = grant(books)
        assert lease.members == [1]
    assert books.receive(failed(lease, 1, "infra"), 2) == "store", "the third infrastructure failure is its outcome"
    assert books.counts["ready"] == 1
    assert {name: books.counters[name] for name in ("invalid_infra", "invalid_env", "retries_infra", "retries_env")} == {
        "invalid_infra": 3,
        "invalid_env": 1,
        "retries_infra": 2,
        "retries_env": 1,
    }


def test_the_environment_budget_ends_a_member_whatever_is_left_of_the_other_one(ledger: Ledger) -> None:
    books = Books(ledger, rules(group_size=1))
    lease = grant(books)
    for reason in ("infra", "infra", "env"):
        assert books.receive(failed(lease, 0, reason), 1) == "retry"
        books = reopened(books)  # failures are counted over restarts
        lease = grant(books)
    assert books.receive(failed(lease, 0, "env"), 1) == "store"
    row = ledger.group(lease.group_id)
    assert row is not None
    assert (row.state, row.reason) == ("dropped", "invalid")


def test_members_of_a_group_have_budgets_of_their_own(ledger: Ledger) -> None:
    books = Books(ledger, rules(group_size=2, max_env_attempts=1))
    lease = grant(books)
    assert books.receive(failed(lease, 0, "infra"), 1) == "retry"
    assert books.receive(failed(lease, 1, "env"), 1) == "store"
    assert grant(books).members == [0]


# --- deadlines ----------------------------------------------------------------------------------------------------------------------


def test_a_group_with_enough_members_is_closed_at_its_deadline_and_trains_without_the_others(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    lease = grant(books)
    for member in (0, 2):
        assert books.receive(played(lease, member), 1) == "store"
    books.close_late(29.9)
    assert books.batch(1) is None
    books.close_late(30.0)
    assert (books.counts["open"], books.counts["ready"]) == (0, 1)
    assert ledger.unplayed(lease.group_id) == {1, 3}
    assert books.held("actor-0") == frozenset(), "nobody owes anything any more"
    batch = books.batch(1)
    assert batch is not None
    assert batch.groups == [lease.group_id]
    books.trained(1)
    assert {name: books.counters[name] for name in ("unplayed_members", "groups_closed_early", "groups_dropped_late")} == {
        "unplayed_members": 2,
        "groups_closed_early": 1,
        "groups_dropped_late": 0,
    }


@pytest.mark.parametrize("moment", ["ready", "assigned"])
def test_who_comes_after_the_deadline_is_superseded_and_never_stored(ledger: Ledger, moment: str) -> None:
    books = Books(ledger, rules())
    lease = grant(books)
    for member in (0, 2):
        books.receive(played(lease, member), 1)
    books.close_late(31.0)
    if moment == "assigned":
        assert books.batch(1) is not None
    assert books.receive(played(lease, 1), 2) == "superseded"
    assert books.receive(failed(lease, 3, "infra"), 2) == "superseded"
    assert [member.member for member in ledger.members(lease.group_id)] == [0, 2]
    books.check()


def test_a_group_with_too_few_scored_members_is_dropped_for_its_deadline_and_replaced(ledger: Ledger) -> None:
    books = Books(ledger, rules(max_env_attempts=1))
    lease = grant(books)
    books.receive(played(lease, 0), 1)
    books.receive(failed(lease, 1, "env"), 1)  # finished, but without a reward: it does not count
    books.close_late(30.0)
    row = ledger.group(lease.group_id)
    assert row is not None
    assert (row.state, row.reason) == ("dropped", "deadline")
    assert books.counters["groups_dropped_late"] == 1
    assert grant(books).group_id == lease.group_id + 1
    assert books.receive(played(lease, 2), 2) == "superseded"


def test_the_deadline_counts_from_the_first_lease_whoever_holds_it_later(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    first = grant(books, now=5.0)
    for member in (0, 1):
        books.receive(played(first, member), 1)
    books.give_up("actor-0")
    again = grant(books, now=30.0, peer_id="actor-1")
    assert (again.group_id, again.members) == (first.group_id, [2, 3])
    books.close_late(35.0)
    assert books.counts["ready"] == 1
    assert books.holders() == []


def test_time_in_which_the_buffer_was_away_or_took_nothing_in_does_not_count(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    lease = grant(books, now=0.0)
    books.close_late(20.0)
    books = reopened(books)
    books.close_late(10_000.0)
    books.close_late(10_029.0)
    books.postpone(600.0)  # a full disk
    books.close_late(10_620.0)
    assert books.counts["open"] == 1
    books.close_late(10_630.0)
    row = ledger.group(lease.group_id)
    assert row is not None
    assert row.reason == "deadline"


def test_without_a_deadline_groups_wait_for_all_their_members(ledger: Ledger) -> None:
    books = Books(ledger, rules(group_deadline_s=None))
    lease = grant(books)
    for member in (0, 1, 2):
        books.receive(played(lease, member), 1)
    books.close_late(1e9)
    assert books.counts["open"] == 1


def test_a_group_that_lost_a_member_with_the_power_is_played_again_whole(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    lease = grant(books)
    books.receive(played(lease, 0), 1)
    books.receive(played(lease, 1), 2)
    books.close_late(30.0)
    books.save_counters()
    ledger.commit()
    forget(ledger, [2], lambda location: None)
    books = Books(ledger, books.rules)
    assert ledger.unplayed(lease.group_id) == set()
    again = grant(books)
    assert (again.group_id, again.members) == (lease.group_id, [1, 2, 3])


def test_a_minimum_above_the_group_size_is_refused_where_there_is_a_deadline() -> None:
    check_config(load_config("quickstart", ["buffer.min_group=99"]))
    with pytest.raises(ConfigError, match=r"buffer\.min_group 99 is larger than learner\.group_size 8"):
        check_config(load_config("quickstart", ["buffer.min_group=99", "buffer.group_deadline_s=5"]))
