"""Groups that teach nothing are replaced, at every depth and every bound on the lag, and never by more than ``max_refill`` in a batch."""

from __future__ import annotations

import heapq
from pathlib import Path

import numpy as np
import pytest

from leased import failed, finish, grant, leases, played, reopened, rules, train
from rollstream.buffer.books import Books
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.wire import Lease
from rollstream.configs.learner_schema import Overlong


def flat(books: Books, lease: Lease) -> None:
    finish(books, lease, reward=1.0)


def test_at_depth_0_a_group_that_teaches_nothing_is_replaced_under_the_weights_of_its_batch(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=0, max_lag=0, max_refill=2))
    first, second = leases(books)
    flat(books, first)
    replacement = grant(books)
    assert replacement.admit_version == first.admit_version == 0
    assert books.grant("actor-0", 0.0) is None, "one for one"
    finish(books, second)
    assert books.batch(1) is None, "it waits for the replacement"
    assert "1 of them teach nothing and are replaced" in books.waits_for()
    finish(books, replacement)
    assert train(books, 1) == [0, 1, 2]
    assert books.counters["refilled_groups"] == 1
    assert [lease.admit_version for lease in leases(books)] == [1, 1]


def test_replacements_that_teach_nothing_are_replaced_up_to_the_bound_and_then_what_is_live_is_trained(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=0, max_lag=1, max_refill=3))
    num_played = 0
    while granted := leases(books):
        for lease in granted:
            flat(books, lease)
            num_played += 1
    assert num_played == 5
    assert train(books, 1) == [0, 1, 2, 3, 4]


def test_without_refill_nothing_more_is_leased_and_nothing_is_waited_for(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=0, max_lag=0))
    for lease in leases(books):
        flat(books, lease)
    assert leases(books) == []
    assert train(books, 1) == [0, 1]


def test_with_depth_the_replacements_are_the_next_groups_and_the_lead_is_made_up_for(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=1, max_lag=3, max_refill=1))
    granted = leases(books)
    assert len(granted) == 4
    for lease in granted[:2]:
        flat(books, lease)
    assert len(leases(books)) == 1, "two are known, one may be replaced in the next batch"
    finish(books, granted[2])
    assert train(books, 1) == [0, 1, 2], "the bound is reached: it trains what is live"
    assert len(leases(books)) == 2


def test_a_full_batch_of_live_groups_takes_no_more(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=3, max_lag=9, max_refill=2))
    for lease in leases(books):
        if lease.group_id in (0, 2, 3, 4, 5):
            flat(books, lease)
        else:
            finish(books, lease)
    assert train(books, 1) == [0, 1, 2, 3]
    assert train(books, 2) == [4, 5, 6, 7]


def test_what_is_known_of_groups_outlives_the_buffer(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=0, max_lag=0, max_refill=1))
    flat(books, leases(books)[0])
    books = reopened(books)
    assert len(leases(books, "actor-1")) == 1
    assert leases(reopened(books), "actor-1") == []


def test_rewards_are_shaped_before_a_group_is_called_degenerate_and_unscored_members_do_not_count(ledger: Ledger) -> None:
    """Equal rewards of which one is fined for its length do teach; two different rewards of which one is not scored do not."""
    books = Books(
        ledger, rules(batch_groups=1, depth=3, max_lag=4, max_refill=1, overlong=Overlong(max_len=10, buffer=5), max_env_attempts=1),
    )  # fmt: skip
    fined, single, live = (grant(books) for _ in range(3))
    for member, length in ((0, 5), (1, 9)):
        books.receive(played(fined, member, reward=1.0, num_trained_tokens=length), 1)
    books.receive(played(single, 0, reward=1.0), 1)
    books.receive(failed(single, 1, "env"), 1)
    finish(books, live)
    assert train(books, 1) == [fined.group_id], "it teaches, so nothing replaces it"
    assert train(books, 2) == [single.group_id, live.group_id], "one that teaches nothing is replaced"


# --- whole runs ---------------------------------------------------------------------------------------------------------------------


class Play:
    """A run on a clock of its own: actors that play with the oldest weights a lease allows for heavy-tailed times, a learner that pulls and trains."""

    def __init__(self, books: Books, seed: int, share: float) -> None:
        self.books, self.rules, self.share = books, books.rules, share
        self.rng = np.random.default_rng(seed)
        self.now, self.order = 0.0, 0
        self.ends: list[tuple[float, int, Lease]] = []
        self.live: dict[int, bool] = {}
        self.slots = int(self.rng.integers(1, 12))

    def take_leases(self) -> None:
        while len(self.ends) < self.slots and (lease := self.books.grant("actor-0", self.now)) is not None:
            assert lease.admit_version == self.books.version
            self.order += 1
            heapq.heappush(self.ends, (self.now + float(self.rng.pareto(1.1)) + 0.1, self.order, lease))

    def until(self, moment: float) -> None:
        """Plays on; nothing that is pulled meanwhile."""
        self.take_leases()
        while self.ends and self.ends[0][0] <= moment:
            self.now, _, lease = heapq.heappop(self.ends)
            self.live[lease.group_id] = bool(self.rng.random() >= self.share)
            for member in lease.members:
                self.books.receive(played(lease, member, reward=float(member) * self.live[lease.group_id]), 1)
            self.take_leases()
        self.now = max(self.now, moment)

    def next_batch(self, version: int) -> list[int]:
        while (batch := self.books.batch(version)) is None:
            self.take_leases()
            assert self.ends, f"stuck before batch {version}: {self.books.waits_for()}"
            self.until(self.ends[0][0])
        assert batch.withheld == []
        assert batch.max_lag <= self.rules.max_lag
        return batch.groups


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_whole_runs_keep_the_bounds_of_lag_and_refill_and_leave_nothing_unused(tmp_path: Path, depth: int, share: float) -> None:
    for seed in range(8):
        rng = np.random.default_rng([depth, seed])
        versions, batch_groups, max_refill, spare = int(rng.integers(1, 9)), int(rng.integers(1, 5)), int(rng.integers(1, 6)), int(rng.integers(0, 3))
        ledger = Ledger(tmp_path / f"{seed}.sqlite", "run-a")
        books = Books(ledger, rules(depth=depth, max_lag=depth + spare, batch_groups=batch_groups, max_refill=max_refill, versions=versions))
        run = Play(books, seed, share)
        for version in range(1, versions + 1):
            groups = run.next_batch(version)
            num_live = sum(run.live[group_id] for group_id in groups)
            assert num_live == batch_groups or len(groups) == batch_groups + max_refill, "each batch is refilled as far as the bound allows"
            assert num_live <= batch_groups
            if depth == 0:
                assert all(row.admit_version == version - 1 for group_id in groups if (row := ledger.group(group_id)) is not None), "on policy"
            run.until(run.now + float(rng.exponential(2.0)))
            books.trained(version)
            books.check()
        run.take_leases()
        assert not run.ends
        assert books.num_leased == books.counts["trained"] == len(run.live), "something was generated and not trained"
        ledger.close()
