"""The books: leases, members, batches, redo; each test a scenario."""

from __future__ import annotations

from pathlib import Path

import pytest

from leased import failed, finish, leases, played, reopened, rules, train
from rollstream.buffer.books import Books
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.recovery import forget
from rollstream.errors import Refused, RunFolderError


def test_leases_are_granted_up_to_depth_plus_one_batches(ledger: Ledger) -> None:
    for depth, wanted in ((0, 2), (1, 4), (2, 6)):
        books = Books(ledger, rules(depth=depth, max_lag=3))
        leases(books)
        assert books.counts["open"] == wanted


def test_the_last_versions_leave_nothing_generated_and_untrained(ledger: Ledger) -> None:
    books = Books(ledger, rules(versions=3))
    for version in (1, 2, 3):
        for lease in leases(books):
            finish(books, lease)
        train(books, version)
    assert leases(books) == []
    assert (books.num_leased, books.counts["trained"]) == (6, 6)


def test_a_lease_says_what_to_play(ledger: Ledger) -> None:
    first, second = leases(Books(ledger, rules()))[:2]
    assert (first.group_id, first.sequence, first.attempt, first.members, first.admit_version, first.finished) == (0, 0, 0, [0, 1], 0, [])
    assert (second.group_id, second.task_index, second.env_id) == (1, 1, "Acme/Calculator-v0")
    assert first.seed != second.seed


def test_seeds_depend_on_the_run_and_the_group_alone(tmp_path: Path) -> None:
    seeds = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        made = Ledger(tmp_path / name, name)
        seeds.append([lease.seed for lease in leases(Books(made, rules(seed=seed)))])
        made.close()
    assert seeds[0] == seeds[1] != seeds[2]


def test_new_leases_carry_the_version_the_learner_holds(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    for lease in leases(books):
        finish(books, lease)
    train(books, 1)
    assert [lease.admit_version for lease in leases(books)] == [1, 1]


def test_assigned_groups_count_against_admission_until_they_are_trained(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    for lease in leases(books):
        finish(books, lease)
    assert books.batch(1) is not None
    assert leases(books) == []
    books.trained(1)
    assert len(leases(books)) == 2


def test_a_batch_is_formed_only_of_complete_groups_in_lease_order(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    granted = leases(books)
    finish(books, granted[2])
    assert books.batch(1) is None
    finish(books, granted[1])
    assert books.batch(1) is not None
    assert train(books, 1) == [1, 2]


def test_a_group_beyond_the_window_waits_for_its_head(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=3, max_lag=4))  # window 3: with head 0, leases 0 to 2
    granted = leases(books)
    for lease in granted[2:]:
        finish(books, lease)
    assert books.batch(1) is None
    finish(books, granted[1])
    assert train(books, 1) == [1, 2]
    assert books.batch(2) is None
    finish(books, granted[0])
    assert train(books, 2) == [0, 3]


def test_with_max_lag_equal_to_depth_batches_are_first_in_first_out(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=1, max_lag=1))
    granted = leases(books)
    for lease in granted[1:]:
        finish(books, lease)
    assert books.batch(1) is None
    finish(books, granted[0])
    assert train(books, 1) == [0, 1]


@pytest.mark.parametrize("batch_groups", [1, 2, 3])
@pytest.mark.parametrize("spare", [0, 1, 2])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_slowest_group_possible_reaches_max_lag_and_never_passes_it(ledger: Ledger, depth: int, spare: int, batch_groups: int) -> None:
    """Each lease in turn is the one that everything else overtakes as far as the window lets it."""
    books = Books(ledger, rules(depth=depth, max_lag=depth + spare, batch_groups=batch_groups))
    largest = version = 0
    for _ in range(3 * (depth + spare + 1)):
        victim, *others = [*leases(books), *(lease for lease in [books.grant("actor-0", 0)] if lease is not None)] or [None]
        for lease in others:
            finish(books, lease)
        while (batch := books.batch(version + 1)) is not None:
            books.trained(version := version + 1)
            largest = max(largest, batch.max_lag)
            assert batch.withheld == []
            for lease in leases(books):
                finish(books, lease)
        if victim is not None:
            finish(books, victim)
        while (batch := books.batch(version + 1)) is not None and victim is not None:
            books.trained(version := version + 1)
            largest = max(largest, batch.max_lag)
            assert batch.withheld == []
            if victim.group_id in batch.groups:
                break
            for lease in leases(books):
                finish(books, lease)
    assert largest == (depth + spare if depth else 0)  # synchronous training waits for everybody


def test_a_pulled_batch_stays_the_same(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    granted = leases(books)
    finish(books, granted[1])
    finish(books, granted[2])
    first = books.batch(1)
    finish(books, granted[0])
    assert books.batch(1) == first
    assert reopened(books).batch(1) == first


def test_a_batch_out_of_turn_is_refused(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    for version in (0, 2, -1):
        with pytest.raises(Refused, match="1 is next"):
            books.batch(version)


def test_a_version_left_out_is_refused_and_the_same_again_changes_nothing(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    for lease in leases(books):
        finish(books, lease)
    train(books, 1)
    books.trained(1)
    assert books.counts["trained"] == 2
    with pytest.raises(Refused, match="cannot be trained"):
        books.trained(3)
    with pytest.raises(Refused, match="cannot be trained"):
        books.trained(2)


def test_the_second_copy_of_a_member_is_a_duplicate_and_another_attempt_is_superseded(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    lease = leases(books)[0]
    assert books.receive(played(lease, 0), 1) == "store"
    assert books.receive(played(lease, 0), 2) == "duplicate"
    books.give_up("actor-0")
    again = books.grant("actor-1", 0)
    assert again is not None
    assert again.group_id == lease.group_id
    assert books.receive(played(lease, 1), 3) == "store"  # the first one was only slow
    assert books.receive(played(again, 1), 4) == "superseded"
    assert ledger.members(lease.group_id)[1].append_id == 3


def test_what_arrives_for_a_trained_group_is_judged_by_the_ledger(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    granted = leases(books)
    for lease in granted:
        finish(books, lease)
    train(books, 1)
    assert books.receive(played(granted[0], 0), 9) == "duplicate"
    assert books.receive(played(granted[0], 0, attempt=-1), 9) == "superseded"


def test_leases_given_up_are_offered_first_and_name_what_is_missing(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=0, max_lag=1))
    first, second = leases(books)
    books.receive(played(second, 1), 1)
    assert books.give_up("actor-0", keep={first.group_id}) == 1
    (again,) = leases(books, "actor-1")
    assert (again.group_id, again.attempt, again.members) == (second.group_id, 1, [0])
    assert [(done.member, done.reward) for done in again.finished] == [(1, 1.0)]
    assert books.held("actor-0") == {first.group_id}


def test_a_re_lease_asks_for_no_older_version_than_the_first_one_did(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    for lease in leases(books):
        finish(books, lease)
    train(books, 1)
    (lease, _) = leases(books)
    books.resume(0)
    books.give_up("actor-0")
    again = books.grant("actor-1", 0)
    assert again is not None
    assert (again.group_id, again.admit_version) == (lease.group_id, 1)


def test_a_failure_waits_for_the_rest_of_its_lease_before_it_is_offered_again(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=0, max_lag=1, group_size=3))
    lease = leases(books)[0]
    assert books.receive(failed(lease, 0), 1) == "retry"
    assert books.receive(played(lease, 1), 1) == "store"
    assert leases(books) == []
    assert books.receive(played(lease, 2), 1) == "store"
    (again,) = leases(books)
    assert (again.members, again.attempt) == ([0], 1)


def test_failures_are_remembered_over_a_restart(ledger: Ledger) -> None:
    books = Books(ledger, rules(max_infra_attempts=2))
    lease = leases(books)[0]
    assert books.receive(failed(lease, 0), 1) == "retry"
    books = reopened(books)
    assert books.receive(failed(lease, 0), 1) == "duplicate"
    books.give_up("actor-0")
    again = books.grant("actor-0", 0)
    assert again is not None
    assert books.receive(failed(again, 0), 1) == "store"


def test_a_group_that_failed_altogether_is_dropped_and_replaced(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=0, max_lag=1, max_infra_attempts=1))
    lease, _ = leases(books)
    for member in lease.members:
        assert books.receive(failed(lease, member), 1) == "store"
    assert (books.counts["dropped"], books.counts["open"]) == (1, 1)
    assert [new.group_id for new in leases(books)] == [2]
    row = ledger.group(lease.group_id)
    assert row is not None
    assert (row.state, row.reason) == ("dropped", "invalid")
    assert books.receive(played(lease, 0, attempt=1), 1) == "superseded"
    books.check()


def test_a_trajectory_beyond_max_lag_is_withheld_when_the_batch_is_committed(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=0, max_lag=0))
    finished = leases(books)
    for lease in finished:
        finish(books, lease)
    assert train(books, 1) == [0, 1]
    old, new = leases(books)
    finish(books, old, min_version=0)
    finish(books, new)
    batch = books.batch(2)
    assert batch is not None
    assert (batch.withheld, batch.max_lag, batch.lag_bound) == ([(2, 0), (2, 1)], 0, 0)
    assert books.counters["age_drops"] == 2


def test_a_trajectory_without_sampled_tokens_has_no_age(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    for lease in leases(books):
        finish(books, lease, min_version=None, max_version=None)
    batch = books.batch(1)
    assert batch is not None
    assert (batch.withheld, batch.max_lag) == ([], 0)


def test_resume_serves_recorded_batches_again_and_the_books_close_throughout(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    served = {}
    for version in (1, 2, 3):
        for lease in leases(books):
            finish(books, lease)
        served[version] = train(books, version)
    books = reopened(books)
    books.resume(1)
    assert (books.version, books.counts["trained"], books.counts["assigned"]) == (1, 2, 4)
    for version in (2, 3):
        assert train(books, version) == served[version]
    assert books.counts["trained"] == 6
    books.check()


def test_a_learner_ahead_of_the_ledger_is_believed_if_its_batches_are_recorded(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    for lease in leases(books):
        finish(books, lease)
    assert books.batch(1) is not None
    books.resume(1)
    assert (books.version, books.counts["trained"]) == (1, 2)
    with pytest.raises(Refused, match="resume from an older checkpoint"):
        books.resume(2)


def test_no_new_group_is_leased_while_more_than_depth_batches_are_redone(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=1))
    for version in (1, 2, 3):
        for lease in leases(books):
            finish(books, lease)
        train(books, version)
    leases(books)
    books.resume(0)
    books.give_up("actor-0")
    assert {lease.group_id for lease in leases(books)} == {8, 9}


def test_a_digest_is_compared_on_redo(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    assert books.published(0, "aa") == ""
    assert books.published(0, "aa") == ""
    assert "recorded was aa" in books.published(0, "bb")
    with pytest.raises(Refused, match="cannot be published"):
        books.published(1, "cc")


def test_rows_that_cannot_exist_are_refused(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    lease = leases(books)[0]
    for code, changes in {
        "unknown_group": {"group_id": 99},
        "not_leased": {"attempt": 1},
        "malformed": {"member": 2},
    }.items():
        with pytest.raises(Refused) as caught:
            books.check_known([played(lease, 0), played(lease, 1)._replace(**changes)])
        assert caught.value.code == code
    with pytest.raises(Refused, match="no batch beyond 0 was ever formed"):
        books.check_known([played(lease, 0, max_version=1)])
    with pytest.raises(Refused, match=r"of lineage 3: .* the newest lineage is 0"):
        books.check_known([played(lease, 0, lineage=3)])


def test_everything_is_as_it_was_after_a_restart(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    granted = leases(books)
    finish(books, granted[0])
    finish(books, granted[1])
    train(books, 1)
    books.receive(played(granted[2], 1), 1)
    found = reopened(books)
    assert (found.version, found.last_batch, found.num_leased) == (books.version, books.last_batch, books.num_leased)
    assert +found.counts == +books.counts
    assert found.counters == books.counters
    assert found.held("actor-0") == books.held("actor-0")
    found.give_up("actor-0", keep=found.held("actor-0"))
    found.claim("actor-0", [2, 3, 99, 0], 0)
    assert found.held("actor-0") == {2, 3}


def test_an_actor_claims_only_what_nobody_else_holds(ledger: Ledger) -> None:
    books = Books(ledger, rules(depth=0, max_lag=1))
    leases(books)
    books.give_up("actor-0")
    books.grant("actor-1", 0)
    books.claim("actor-0", [0, 1], 0)
    assert (books.held("actor-0"), books.held("actor-1")) == ({1}, {0})


def test_a_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.sqlite", "run-a").close()
    with pytest.raises(RunFolderError, match="has run_id run-a, this run has run-b"):
        Ledger(tmp_path / "ledger.sqlite", "run-b")


def test_after_power_loss_lost_members_are_reopened_with_the_batches_that_held_them(ledger: Ledger) -> None:
    books = Books(ledger, rules())
    append_id = 0
    for version in (1, 2, 3):
        for lease in leases(books):
            for member in lease.members:
                append_id += 1
                ledger.write("INSERT INTO appends VALUES(?, 1, 0, 8, '0', 1, 1)", (append_id,))
                assert books.receive(played(lease, member), append_id) == "store"
        train(books, version)
    lost = ledger.members(3)[1].append_id  # of batch 2
    forget(ledger, [lost], lambda location: None)
    books = Books(ledger, rules())
    assert (books.version, books.last_batch) == (1, 1)
    assert [(lease.lineage, lease.members) for lease in leases(books) if lease.group_id == 3] == [(1, [1])], "the history goes on in another lineage"
    assert sum(len(ledger.members(group)) for group in range(8)) == 15, "nothing else is lost: what version 2 of before sampled is known as its own"
    books.check()
