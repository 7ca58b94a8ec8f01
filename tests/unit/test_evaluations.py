"""The books of evaluations: pinned to one version, leased apart from what trains, closed in every case; each test a scenario."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leased import grant, played
from rollstream.buffer.books import Books
from rollstream.buffer.columns import Rows, encode
from rollstream.buffer.evaluation_facts import Played, played_of, purpose_of
from rollstream.buffer.evaluation_recovery import forget_evaluations
from rollstream.buffer.evaluation_rules import EvaluationRules
from rollstream.buffer.evaluation_tables import FIRST_GROUP, EvaluatedMember
from rollstream.buffer.evaluations import Evaluations
from rollstream.buffer.facts import facts
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.scores import pass_at, scores
from rollstream.buffer.types import Segment, Trajectory, TrajectoryKey
from rollstream.buffer.window import Rules
from rollstream.buffer.wire import Lease, Retained, RetainedVersion, SkippedVersion
from rollstream.configs.checks import check_config
from rollstream.configs.schema import Config
from rollstream.errors import ConfigError, DataRefused, Refused

SETTINGS = {"every": 10, "tasks": 2, "samples": 2, "k": [1, 2]}


def config(**evaluation: Any) -> Config:
    learner = {"versions": 45, "batch_groups": 2, "group_size": 2}
    return Config.model_validate({"name": "scores", "env": {"id": "Acme/Calculator-v0"}, "learner": learner, "evaluation": {**SETTINGS, **evaluation}})


def books(ledger: Ledger, **evaluation: Any) -> Evaluations:
    return Evaluations(ledger, EvaluationRules.of(config(**evaluation)))


def keep(*versions: int, digest: str = "d", written: int | None = None, known: int = 0) -> Retained:
    newest = (0, max(versions, default=0)) if written is None else (0, written)
    return Retained([RetainedVersion(0, version, digest) for version in versions], [], newest, known)


def won(lease: Lease, member: int, success: float | None = None, *, versions: tuple[int, int] | None = None, **changes: Any) -> Played:
    return Played(played(lease, member, **changes), success, versions or (lease.admit_version, lease.admit_version))


def lease_of(evaluations: Evaluations, peer: str = "evaluator-0") -> Lease:
    return grant(evaluations, peer_id=peer)


def play_all(evaluations: Evaluations, learner_version: int = 12) -> list[Lease]:
    leases: list[Lease] = []
    while (lease := evaluations.grant("evaluator-0", 0.0)) is not None:
        leases.append(lease)
        for member in lease.members:
            assert evaluations.receive(won(lease, member, float(member)), 1, learner_version) == "store"
    evaluations.check()
    return leases


def test_a_kept_version_opens_one_evaluation_whose_leases_pin_it(ledger: Ledger) -> None:
    evaluations = books(ledger)
    assert evaluations.grant("evaluator-0", 0.0) is None, "nothing is kept yet"
    reply = evaluations.retained(keep(10))
    assert [(item.version, item.state, item.num_members) for item in reply.open] == [(10, "open", 4)]
    evaluations.retained(keep(10))
    leases = play_all(evaluations)
    assert [(lease.purpose, lease.admit_version, lease.digest, lease.members) for lease in leases] == [("eval", 10, "d", [0, 1])] * 2
    assert [lease.group_id for lease in leases] == [FIRST_GROUP, FIRST_GROUP + 1]
    assert [lease.task_index for lease in leases] == [1_000_000_000, 1_000_000_001]
    reply = evaluations.retained(keep(10))
    assert reply.open == []
    assert [(item.version, item.state, item.number) for item in reply.closed] == [(10, "done", 1)]
    assert {name: reply.closed[0].values[name] for name in ("eval/reward_mean", "eval/success", "eval/pass_at_1", "eval/pass_at_2", "eval/lag")} == {
        "eval/reward_mean": 0.5, "eval/success": 0.5, "eval/pass_at_1": 0.5, "eval/pass_at_2": 1.0, "eval/lag": 2.0,
    }  # fmt: skip
    assert evaluations.retained(keep(10, known=1)).closed == [], "told once"
    assert evaluations.grant("evaluator-0", 0.0) is None, "an evaluation that is done is never played again"


def test_every_version_meets_the_same_tasks_and_training_never_meets_their_seeds(ledger: Ledger) -> None:
    evaluations = books(ledger, retain=2)
    evaluations.retained(keep(10, 20))
    tasks = [(lease.task_index, lease.seed) for lease in play_all(evaluations)]
    assert tasks[:2] == tasks[2:]
    assert all(2**31 <= seed < 2**32 for _, seed in tasks)
    rules = Rules.of(config())
    training = Books(ledger, rules)
    for _ in range(4):
        lease = training.grant("actor-0", 0.0)
        assert lease is not None
        assert lease.seed < 2**31


def test_books_that_train_never_count_what_is_evaluated(ledger: Ledger) -> None:
    training, evaluations = Books(ledger, Rules.of(config())), books(ledger)
    evaluations.retained(keep(10))
    play_all(evaluations)
    training.check()
    assert (training.num_leased, sum(training.counts.values()), ledger.num_groups(), ledger.counts()) == (0, 0, 0, {})
    assert Books(ledger, Rules.of(config())).num_leased == 0


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"versions": (9, 10)}, "malformed", "tokens of version 9 to 10; every token of this evaluation must be of version 10"),
        ({"versions": (11, 11)}, "malformed", "tokens of version 11"),
        ({"group_id": FIRST_GROUP + 7}, "unknown_group", "no evaluation leased it"),
        ({"group_id": 3}, "unknown_group", "no evaluation leased it"),
        ({"lineage": 1}, "unknown_group", "lineage 1"),
        ({"member": 2}, "malformed", "the group has 2 members"),
        ({"attempt": 1}, "not_leased", "attempt 1 was never leased"),
    ],
)
def test_what_is_not_exactly_what_was_leased_is_refused(ledger: Ledger, change: dict[str, Any], code: str, words: str) -> None:
    evaluations = books(ledger)
    evaluations.retained(keep(10))
    lease = lease_of(evaluations)
    given = {"member": 0, **change}
    with pytest.raises(Refused) as caught:
        evaluations.check_known([won(lease, given.pop("member"), **given)])
    assert caught.value.code == code
    assert words in str(caught.value)
    evaluations.check_known([won(lease, 0)])


def test_a_dead_evaluator_costs_only_the_members_it_had_not_finished(ledger: Ledger) -> None:
    evaluations = books(ledger)
    evaluations.retained(keep(10))
    lease = lease_of(evaluations)
    assert evaluations.receive(won(lease, 1), 1, 10) == "store"
    ledger.commit()
    again = books(ledger)  # the buffer was killed as well
    assert again.held("evaluator-0") == {lease.group_id}
    assert again.grant("evaluator-1", 0.0) is None, "not before the learner says again that it keeps the version"
    again.retained(keep(10))
    assert again.give_up("evaluator-0") == 1
    second = lease_of(again, "evaluator-1")
    assert (second.group_id, second.members, second.attempt, [done.member for done in second.finished]) == (lease.group_id, [0], 1, [1])
    assert again.receive(won(lease, 1), 2, 10) == "duplicate", "sent again, since nobody had acknowledged it"
    assert again.receive(won(second, 0), 2, 10) == "store"
    assert again.receive(won(lease, 0), 3, 10) == "superseded"
    again.check()


def test_a_failed_member_is_played_again_within_its_budget_and_never_counts_as_a_zero(ledger: Ledger) -> None:
    evaluations = books(ledger, tasks=1)
    evaluations.retained(keep(10))
    for attempt in range(3):
        lease = lease_of(evaluations)
        assert lease.attempt == attempt
        failed = won(lease, 0, reward=None, status="failed", stop_reason="infra")
        assert evaluations.receive(failed, 1, 10) == ("retry" if attempt < 2 else "store")
        assert evaluations.receive(failed, 1, 10) == "duplicate"
        if attempt == 0:
            assert evaluations.receive(won(lease, 1, 1.0), 1, 10) == "store"
    (closed,) = evaluations.retained(keep(10)).closed
    assert (closed.values["eval/trajectories"], closed.values["eval/invalid_episodes"], closed.values["eval/reward_mean"]) == (2, 1, 1.0)
    assert closed.values["eval/pass_at_1"] == 1.0
    assert "eval/pass_at_2" not in closed.values, "one sample says nothing of two"


def test_a_late_failure_of_a_given_up_attempt_does_not_take_the_lease_from_who_plays_it_now(ledger: Ledger) -> None:
    evaluations = books(ledger)
    evaluations.retained(keep(10))
    first = lease_of(evaluations)
    evaluations.give_up("evaluator-0")
    second = lease_of(evaluations, "evaluator-1")
    assert (second.group_id, second.attempt) == (first.group_id, 1)
    for member in first.members:
        failed = won(first, member, status="failed", stop_reason="infra", reward=None)
        assert evaluations.receive(failed, 1, 12) == "retry"
    assert evaluations.held("evaluator-1") == {first.group_id}


def test_a_version_that_found_no_room_is_skipped_with_the_reason_and_stays_so(ledger: Ledger) -> None:
    evaluations = books(ledger)
    evaluations.retained(Retained([], [SkippedVersion(0, 20, "no room")], (0, 20)))
    (closed,) = evaluations.retained(keep(20)).closed
    assert (closed.version, closed.state, closed.reason) == (20, "skipped", "no room")
    assert evaluations.grant("evaluator-0", 0.0) is None


def test_after_a_resume_an_evaluation_goes_on_once_its_version_is_made_again_and_is_dropped_where_it_cannot_be(ledger: Ledger) -> None:
    evaluations = books(ledger, retain=2)
    evaluations.retained(keep(10, 20))
    lease = lease_of(evaluations)
    evaluations.receive(won(lease, 0), 1, 20)
    ledger.commit()
    again = books(ledger, retain=2)
    open_now = again.retained(Retained([], [], None)).open
    assert [item.version for item in open_now] == [10, 20], "a learner that has written nothing yet says nothing of them"
    reply = again.retained(Retained([], [], (0, 15)))  # it resumed from the checkpoint of version 15
    assert [(item.version, item.state) for item in reply.closed] == [(10, "dropped")]
    assert "its weights are gone" in reply.closed[0].reason
    assert again.receive(won(lease, 1), 2, 15) == "superseded", "a late member of a dropped evaluation"
    assert [item.version for item in again.retained(keep(20)).open] == [20]
    assert len(play_all(again)) == 2
    again.check()


def test_a_version_made_again_with_other_weights_is_never_mixed_with_the_first(ledger: Ledger) -> None:
    evaluations = books(ledger)
    evaluations.retained(keep(10))
    lease = lease_of(evaluations)
    assert evaluations.awaits(lease.group_id)
    (closed,) = evaluations.retained(keep(10, digest="other")).closed
    assert not evaluations.awaits(lease.group_id), "so whoever plays it is told"
    assert (closed.state, closed.version) == ("dropped", 10)
    assert "digest other, before d" in closed.reason
    assert evaluations.holders() == []
    evaluations.check()


def test_changed_settings_drop_what_was_open_and_what_was_off_is_refused(ledger: Ledger) -> None:
    evaluations = books(ledger)
    evaluations.retained(keep(10))
    ledger.commit()
    again = books(ledger, sampling={"temperature": 0.5})
    assert [item.state for item in again.closed(after=0)] == ["dropped"]
    ledger.commit()
    off = Evaluations(ledger, None)
    with pytest.raises(Refused, match="evaluates nothing"):
        off.retained(keep(10))


def test_a_power_loss_opens_what_lost_rows_and_it_is_completed_once_its_version_is_kept_again(ledger: Ledger) -> None:
    evaluations = books(ledger, retain=2)
    evaluations.retained(keep(10, 20))
    play_all(evaluations)
    ledger.write("UPDATE evaluation_members SET append_id = 2 WHERE group_id = ? AND member = 0", (FIRST_GROUP,))
    forget_evaluations(ledger, [2])
    ledger.commit()
    again = books(ledger, retain=2)
    assert [(item.version, item.num_done) for item in again.status() if item.state == "open"] == [(10, 3)]
    assert [item.version for item in again.retained(keep(10, 20)).open] == [10]
    (lease,) = play_all(again)
    assert (lease.group_id, lease.members, lease.attempt) == (FIRST_GROUP, [0], 1)
    assert again.retained(keep(10, 20)).open == []


def test_after_a_fork_what_the_old_lineage_left_open_is_dropped_and_the_new_one_is_evaluated_anew(ledger: Ledger) -> None:
    evaluations = books(ledger, retain=2)
    evaluations.retained(keep(10, 20))
    reply = evaluations.retained(Retained([RetainedVersion(1, 10, "e")], [], (1, 10)))
    assert [(item.lineage, item.version) for item in reply.open] == [(1, 10)]
    assert {(item.lineage, item.version, item.state) for item in reply.closed} == {(0, 10, "dropped"), (0, 20, "dropped")}
    assert {lease.lineage for lease in play_all(evaluations)} == {1}


def test_pass_at_k_is_the_unbiased_estimator() -> None:
    rng = np.random.default_rng(0)
    for num_samples, num_successes, k in [(5, 2, 1), (5, 2, 3), (8, 1, 4), (4, 0, 2), (4, 3, 2), (4, 4, 4)]:
        draws = rng.permuted(np.tile(np.arange(num_samples) < num_successes, (40_000, 1)), axis=1)[:, :k].any(axis=1).mean()
        assert pass_at(k, num_samples, num_successes) == pytest.approx(draws, abs=0.01)
    for wrong in [(3, 2, 1), (0, 2, 1), (1, 2, 3)]:
        with pytest.raises(ValueError, match="pass@"):
            pass_at(*wrong)


def test_success_is_the_reward_from_a_bound_on_or_what_the_environment_says() -> None:
    members = [EvaluatedMember(0, place, 0, 1, reward, "terminated", "terminated", 4, 2, 3, 3, None) for place, reward in enumerate((0.2, 0.9))]
    assert "eval/success" not in scores(members, [1], None), "nobody says what succeeds"
    assert scores(members, [1], 0.5)["eval/success"] == 0.5
    told = [member._replace(success=1.0) for member in members]
    assert scores(told, [1], None)["eval/success"] == 1.0


def trajectory(purpose: Any, versions: tuple[int, ...]) -> Trajectory:
    """Tokens of these versions, of which the policy sampled the last."""
    num = len(versions)
    mask = (np.arange(num) == num - 1).astype(np.uint8)
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    starts, turn = np.arange(num, dtype=np.int32), np.array([0], np.int32)
    segment = Segment(starts, mask, logprobs, starts, np.array(versions, np.int32), turn, ("assistant",), (None,))
    key = TrajectoryKey(0, FIRST_GROUP, 0, 0)
    return Trajectory(key, "Acme/Calculator-v0", 0, 0, purpose, (segment,), 1.0, "terminated", "terminated", env_metrics={"success": 1.0, "calls": 2.0})


def test_rows_tell_their_purpose_and_the_versions_of_all_their_tokens_not_only_of_the_sampled() -> None:
    batch = encode([trajectory("eval", (3, 4))])
    (one,) = played_of(Rows(batch), facts(Rows(batch)))
    assert (one.versions, one.success, one.fact.min_version) == ((3, 4), 1.0, 4)
    assert purpose_of(Rows(batch)) == "eval"
    with pytest.raises(DataRefused, match="eval and train; send them apart"):
        purpose_of(Rows(encode([trajectory("eval", (3,)), trajectory("train", (3,))])))


def test_contradictions_are_refused_with_their_numbers() -> None:
    check_config(config())
    with pytest.raises(ConfigError, match=r"evaluation.k asks for pass@8, evaluation.samples 2 gives fewer .* raise evaluation.samples to 8"):
        check_config(config(k=[1, 8]))
    with pytest.raises(ConfigError, match=r"evaluation.sampling.max_trajectory_tokens 9000 is longer than the model's 512 positions"):
        check_config(config(sampling={"max_trajectory_tokens": 9000}))
    with pytest.raises(ConfigError, match=r"evaluation.envs: demo/A-v0 stands there 2 times"):
        check_config(config(envs=[{"id": "demo/A-v0"}, {"id": "demo/A-v0"}]))
