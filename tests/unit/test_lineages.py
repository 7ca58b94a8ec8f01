"""Lineages: whose versions are whose, how old what an abandoned history sampled is, and what a fork does to the books."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leased import leases
from rollstream.buffer.books import Books
from rollstream.buffer.facts import Fact
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.lineages import NEVER, Fork, Lineages, Span
from rollstream.buffer.log import Location
from rollstream.buffer.recovery import fork, fork_once
from rollstream.buffer.sealed import SealedFile
from rollstream.buffer.window import Rules
from rollstream.buffer.wire import Lease
from rollstream.configs.loader import load_config
from rollstream.configs.resume import changed_keys, resumed_config
from rollstream.configs.run_folder import ForkPoint
from rollstream.errors import Corrupt, Refused, RunFolderError

RULES = Rules(2, 2, 1, 3, 0, 3, 3, None, False, (("Acme/Calculator-v0", 1.0),), 7, 1_000_000)
TREE = Lineages([Fork(1, 0, 10, ""), Fork(2, 1, 14, ""), Fork(3, 0, 5, ""), Fork(4, 3, 8, ""), Fork(5, 3, 8, "")])


def played(lease: Lease, member: int, version: int | None = None, lineage: int | None = None) -> Fact:
    version = lease.admit_version if version is None else version
    lineage = lease.lineage if lineage is None else lineage
    return Fact(lineage, lease.group_id, member, lease.attempt, float(member), "terminated", "terminated", 9, 5, version, version, 0, 1)


def store(books: Books, fact: Fact) -> str:
    books.check_known([fact])
    append_id = books.ledger.last_append_id() + 1
    verdict = books.receive(fact, append_id)
    if verdict == "store":
        books.ledger.put_append(append_id, Location(1, 8 * append_id, 8, append_id), 1, 1)
    return verdict


def train_to(books: Books, last: int) -> dict[int, list[int]]:
    """Plays all that can be leased with the version the learner holds, and trains on, up to version ``last``; the groups of each batch."""
    served = {}
    while books.version < last:
        for lease in leases(books):
            for member in lease.members:
                assert store(books, played(lease, member, books.version)) == "store"
        batch = books.batch(books.version + 1)
        assert batch is not None
        books.trained(batch.version)
        served[batch.version] = batch.groups
        books.check()
    return served


def forked(books: Books, version: int, **options: Any) -> Books:
    books.save_counters()
    books.ledger.commit()
    fork(books.ledger, version, "asked for", **{"read": lambda location: None, **options})
    found = Books(books.ledger, books.rules)
    found.resume(version)
    return found


def test_each_version_belongs_to_the_lineage_that_made_it() -> None:
    assert TREE.spans(2) == [Span(0, 1, 10), Span(1, 11, 14), Span(2, 15, NEVER)]
    assert TREE.spans(4) == [Span(0, 1, 5), Span(3, 6, 8), Span(4, 9, NEVER)]
    assert [TREE.owner(2, version) for version in (0, 1, 10, 11, 14, 15, 99)] == [0, 0, 0, 1, 1, 2, 2]
    assert TREE.current == 5


def test_a_lineage_that_left_again_before_its_parent_began_shares_nothing_of_it() -> None:
    tree = Lineages([Fork(1, 0, 10, ""), Fork(2, 0, 4, "")])
    assert tree.spans(2) == [Span(0, 1, 4), Span(2, 5, NEVER)]
    assert (tree.common(1, 2), tree.common(0, 2), tree.common(0, 1)) == (4, 4, 10)


@pytest.mark.parametrize(("one", "other", "shared"), [(0, 1, 10), (1, 2, 14), (0, 2, 10), (2, 3, 5), (4, 5, 8), (0, 5, 5), (3, 4, 8), (2, 2, NEVER)])
def test_two_histories_share_what_lies_before_they_part(one: int, other: int, shared: int) -> None:
    assert TREE.common(one, other) == TREE.common(other, one) == shared


def test_only_versions_of_the_current_history_are_shared_with_it() -> None:
    assert [TREE.shares(*held) for held in ((0, 5), (0, 6), (3, 8), (3, 9), (4, 8), (4, 9), (5, 99), (9, 1))] == [
        True, False, True, False, True, False, True, False,
    ]  # fmt: skip


def test_what_an_abandoned_lineage_sampled_is_as_old_as_the_way_back_to_the_fork_and_on() -> None:
    tree = Lineages([Fork(1, 0, 10, "")])
    for learner, token in ((10, 12), (13, 12), (13, 11), (13, 10), (13, 4)):
        lag = learner - tree.reckoned(0, token, token, 1)
        assert lag == ((learner - 10) + (token - 10) if token > 10 else learner - token)
    assert 13 - tree.reckoned(0, 9, 12, 1) == 5, "the oldest of a trajectory over the fork is its newest version"
    assert 13 - tree.reckoned(1, 11, 12, 1) == 2, "within a lineage it is the oldest"


def test_after_a_fork_the_groups_of_undone_batches_are_trained_again_first_and_once(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    before = train_to(books, 4)
    in_flight = leases(books)
    books = forked(books, 2)
    assert (books.lineage, books.version, books.last_batch) == (1, 2, 2)
    assert (books.counts["trained"], books.counts["ready"], books.counts["open"]) == (4, 4 + 2, len(in_flight)), "two more were ready before"
    batch = books.batch(3)
    assert batch is not None
    assert (batch.lineage, batch.groups) == (1, before[3])
    books.trained(3)
    assert ledger.batch(0, 4) is not None
    assert [found.lineage for found in ledger.batches(1)] == [0, 0, 1]
    assert [found.lineage for found in ledger.batches(0)] == [0, 0, 0, 0], "what was abandoned can still be looked at"
    books.give_up("actor-0")
    train_to(books, 9)
    trained = [group_id for found in ledger.batches(1) for group_id in found.groups]
    assert len(trained) == len(set(trained))
    assert books.num_leased == sum(books.counts.values())


def test_beyond_max_lag_a_trajectory_is_withheld_whole_and_its_group_keeps_its_reward(ledger: Ledger) -> None:
    books = Books(ledger, replace(RULES, depth=0))
    train_to(books, 4)
    first, second = leases(books)[:2]
    for lease in (first, second):
        assert store(books, played(lease, 0, version=4)) == "store"  # lag (2 - 2) + (4 - 2) after the fork
        assert store(books, played(lease, 1, version=1)) == "store"  # older, and yet nearer: 2 - 1
    books = forked(books, 2)
    for version in (3, 4):
        assert (batch := books.batch(version)) is not None
        books.trained(version)
        assert batch.withheld == []
    assert (batch := books.batch(5)) is not None
    assert batch.groups == [first.group_id, second.group_id]
    assert batch.withheld == [(first.group_id, 0), (second.group_id, 0)], "lag (4 - 2) + (4 - 2) of 3 allowed"
    assert batch.max_lag == 3
    assert books.counters["age_drops"] == 2
    assert books.shared(batch) == {0: 2}


def test_a_group_of_which_nothing_can_ever_train_again_is_dropped_for_its_age_instead_of_filling_a_batch(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    train_to(books, 8)
    books = forked(books, 1)  # batches 2 to 8 are undone, sampled by versions 0 to 7: 0 to 6 beyond the fork
    assert books.counts["dropped"] > 0
    assert {row.reason for group_id in range(16) if (row := ledger.group(group_id)) is not None and row.state == "dropped"} == {"age"}
    assert books.counters["age_drops"] == 2 * books.counts["dropped"]
    while books.counts["ready"] >= 2:
        batch = books.batch(books.version + 1)
        assert batch is not None
        live = {(group_id, member) for group_id in batch.groups for member in range(2)} - set(batch.withheld)
        assert {group_id for group_id, _ in live} == set(batch.groups), "each group of the batch teaches something"
        books.trained(batch.version)
    books.check()
    assert len(leases(books)) > 0, "what is too old holds up no lease"


def test_what_is_still_played_from_before_the_fork_is_taken_and_what_was_leased_again_supersedes_it(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    train_to(books, 4)
    kept, lost = leases(books)[:2]
    assert store(books, played(kept, 0)) == "store"
    books = forked(books, 3)
    books.give_up("actor-0", keep={kept.group_id})
    assert store(books, played(kept, 1)) == "store"
    row = ledger.members(kept.group_id)[1]
    assert (row.lineage, row.max_version) == (0, 4)
    again = books.grant("actor-1", 0.0)
    assert again is not None
    assert (again.lineage, again.group_id, again.attempt, again.admit_version) == (1, lost.group_id, 1, 3)
    assert store(books, played(again, 0)) == "store"
    assert store(books, played(lost, 0)) == "superseded"
    assert store(books, played(lost, 1)) == "store", "the first committed attempt wins, whatever its lineage"
    assert store(books, played(again, 1)) == "superseded"


def test_nobody_waits_for_a_version_that_the_fork_undid(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    train_to(books, 6)
    leases(books)
    books = forked(books, 2)
    books.give_up("actor-0")
    assert all(row.admit_version <= 2 for row in ledger.unassigned())


def test_newer_than_the_learner_is_an_error_within_one_lineage_only(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    train_to(books, 5)
    leases(books)
    books = forked(books, 3)
    books.give_up("actor-0")
    while (lease := books.grant("actor-0", 0.0)) is None:
        assert books.batch(books.version + 1) is not None
        books.trained(books.version + 1)
    with pytest.raises(Refused, match="no batch beyond"):
        books.check_known([played(lease, 0, version=books.last_batch + 1)])
    books.check_known([played(lease, 0, version=99, lineage=0)])


def test_forks_of_forks_and_two_forks_at_one_version_keep_one_history_each(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    train_to(books, 5)
    for version, last in ((3, 6), (4, 5), (4, 4), (4, 6), (1, 3)):
        books = forked(books, version)
        train_to(books, last)
        for lineage in range(books.lineage + 1):
            groups = [group_id for batch in ledger.batches(lineage) for group_id in batch.groups]
            assert len(groups) == len(set(groups)), f"a group twice in the history of lineage {lineage}"
    assert [(found.parent, found.version) for found in ledger.lineages().forks] == [(0, 3), (1, 4), (1, 4), (1, 4), (0, 1)]
    assert [batch.lineage for batch in ledger.batches(5)] == [0, 5, 5]
    assert [batch.lineage for batch in ledger.batches(4)] == [0, 0, 0, 1, 4, 4]


def test_a_redo_over_the_fork_serves_the_batches_of_each_lineage_in_order(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    before = train_to(books, 4)
    books = forked(books, 3)
    after = train_to(books, 6)
    books = Books(ledger, RULES)
    books.resume(1, 0)
    assert (books.version, books.last_batch) == (1, 6)
    for version, expected in {2: before[2], 3: before[3], 4: after[4], 5: after[5], 6: after[6]}.items():
        found = books.batch(version)
        assert found is not None
        assert (found.lineage, found.groups) == (1 if version > 3 else 0, expected)
        books.trained(version)
    books.check()


def test_a_learner_of_an_abandoned_version_is_refused_and_one_of_the_shared_part_is_not(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    train_to(books, 5)
    books = forked(books, 3)
    with pytest.raises(Refused, match="version 5 of lineage 0, which was left after version 3"):
        books.resume(5, 0)
    with pytest.raises(Refused, match="lineage 4"):
        books.resume(2, 4)
    books.resume(3, 0)
    books.resume(2, 1)


def test_digests_are_kept_per_lineage(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    train_to(books, 3)
    for version in range(4):
        books.published(version, f"old-{version}")
    books = forked(books, 2)
    assert books.published(2, "old-2") == "", "the weights that both share"
    train_to(books, 3)
    assert books.published(3, "new-3") == ""
    assert (ledger.digest(0, 3), ledger.digest(1, 3), ledger.digest(1, 1)) == ("old-3", "new-3", "old-1")


def test_a_fork_that_was_asked_for_happens_once_whoever_is_killed_when(ledger: Ledger) -> None:
    train_to(Books(ledger, RULES), 3)
    asked = ForkPoint("a", 1, 2, "asked for")
    for _ in range(3):
        fork_once(ledger, asked, lambda location: None)
    fork_once(ledger, None, lambda location: None)
    assert ledger.lineages().current == 1
    fork_once(ledger, ForkPoint("b", 2, 1, "asked for"), lambda location: None)
    assert ledger.lineages().current == 2
    with pytest.raises(RunFolderError, match="a fork at version 7 was asked for, batches only up to 1 are recorded"):
        fork_once(ledger, ForkPoint("c", 3, 7, "asked for"), lambda location: None)


def test_members_whose_rows_are_damaged_are_played_again_and_groups_whose_rows_were_removed_are_dropped(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    served = train_to(books, 3)
    damaged, gone = served[2][0], served[3][0]
    broken = ledger.members(damaged)[1].append_id
    ledger.write("UPDATE appends SET segment = 2 WHERE append_id = ?", (ledger.members(gone)[0].append_id,))
    ledger.put_segment(SealedFile(2, 99, 8, "aa", 1))
    ledger.remove_segment(2)

    def read(location: Location) -> None:
        if location.checksum == broken:
            raise Corrupt("damaged")

    books = forked(books, 1, read=read)
    states = {group_id: ledger.group(group_id) for group_id in (damaged, gone)}
    assert [(row.state, row.reason) for row in states.values() if row is not None] == [("open", None), ("dropped", "removed")]
    assert next((lease.group_id, lease.members) for lease in leases(books)) == (damaged, [1])
    books.check()


def test_a_fork_plays_anew_what_is_lost_of_groups_that_no_batch_has_yet(ledger: Ledger) -> None:
    books = Books(ledger, RULES)
    train_to(books, 2)
    for lease in leases(books):
        for member in lease.members:
            store(books, played(lease, member, books.version))
    complete = [group.group_id for group in ledger.unassigned() if group.state == "ready"]
    damaged = complete[0]
    broken = ledger.members(damaged)[0].append_id

    def read(location: Location) -> None:
        if location.checksum == broken:
            raise Corrupt("damaged")

    books = forked(books, 2, read=read)
    states = {group.group_id: group.state for group in ledger.unassigned()}
    assert states[damaged] == "open"
    assert all(states[other] == "ready" for other in complete[1:])
    assert (damaged, [0]) in [(lease.group_id, lease.members) for lease in leases(books)]
    books.check()


def test_a_fork_may_change_how_a_run_is_trained_also_where_its_policy_is_sharded() -> None:
    options = ["learner.policy={kind: fsdp, ranks: 2}"]
    recorded = load_config("quickstart", options)
    asked = ["learner.loss.kind=gspo", "learner.policy.ranks=3"]
    config = resumed_config(load_config("quickstart", [*options, *asked]), recorded, asked, fork=True)
    assert (config.learner.loss.kind, config.seed) == ("gspo", recorded.seed)
    assert changed_keys(recorded, config) == ["learner.loss.kind", "learner.policy.ranks"]
    with pytest.raises(RunFolderError, match="seed is 0"):
        resumed_config(load_config("quickstart", [*options, "seed=3"]), recorded, ["seed=3"], fork=True)
