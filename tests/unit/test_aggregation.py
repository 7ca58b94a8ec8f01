"""Weights of tokens, and the plan that hands them out."""

import numpy as np
import pytest

from rollstream.configs.learner_schema import Advantage, Loss, Overlong
from rollstream.errors import ConfigError, DataRefused
from rollstream.learner.aggregation import _MODES, register_aggregation, row_weights
from rollstream.learner.plan import Rows, StaleLimit, plan

COUNTS, TRAJECTORIES, GROUPS = np.array([4, 0, 2]), np.array([0, 0, 1]), np.array([5, 5, 9])


def rows_of(**changes):
    """Five trajectories of two groups, six rows of two tokens; trajectory 0 owns two rows."""
    values = {
        "offsets": np.arange(7) * 2,
        "mask": np.ones(12, np.uint8),
        "row_trajectory": np.array([0, 0, 1, 2, 3, 4]),
        "rewards": np.array([1.0, 0.0, 0.5, 0.5, 0.5]),
        "groups": np.array([7, 7, 3, 3, 3]),
        **changes,
    }
    return Rows(**values)


def test_weights_of_a_mean_sum_to_one_over_the_active_tokens():
    for mode in ("token_mean", "seq_mean_token_mean", "traj_mean_token_mean", "group_mean_token_mean"):
        weights = row_weights(COUNTS, TRAJECTORIES, GROUPS, mode)
        assert (weights * COUNTS).sum() == pytest.approx(1.0)
        assert weights[1] == 0


def test_a_batch_without_active_tokens_has_weights_zero():
    assert row_weights(np.array([0, 0]), np.array([0, 1]), np.array([0, 0]), "group_mean_token_mean").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["seq_mean_fixed", "fixed", "nope"])
def test_a_mode_without_its_constant_or_unknown_is_refused(mode):
    with pytest.raises(ConfigError):
        row_weights(COUNTS, TRAJECTORIES, GROUPS, mode)


def test_a_user_registers_an_aggregation():
    register_aggregation("root")(lambda counts: 1.0 / np.sqrt(counts.row))
    try:
        assert row_weights(COUNTS, TRAJECTORIES, GROUPS, "root").tolist() == pytest.approx([0.5, 0.0, 0.5**0.5])
    finally:
        del _MODES["root"]


def test_a_degenerate_group_stays_in_the_denominators_or_leaves_them():
    kept = plan(rows_of(), Loss(), Advantage(mode="mean"), "keep")
    assert kept.degenerate.tolist() == [False, False, True, True, True]
    assert kept.active_tokens == 12
    for leaving in ("mask", "refill"):
        left = plan(rows_of(), Loss(), Advantage(mode="mean"), leaving)
        assert left.row_counts.tolist() == [2, 2, 2, 0, 0, 0]
        assert left.row_weight.tolist() == pytest.approx([1 / 6] * 3 + [0] * 3)
    assert kept.row_advantage.tolist() == [0.5, 0.5, -0.5, 0.0, 0.0, 0.0]


def test_withheld_members_keep_their_place_in_the_baseline():
    decided = plan(rows_of(withheld=np.array([0, 1, 0, 0, 0])), Loss(), Advantage(mode="mean"), "keep")
    assert decided.advantages[:2].tolist() == [0.5, -0.5]
    assert decided.row_counts.tolist() == [2, 2, 0, 2, 2, 2]


def test_unscored_members_leave_baseline_and_loss_and_may_have_no_reward():
    rewards = np.array([1.0, np.nan, 0.0, 1.0, np.nan])
    decided = plan(rows_of(rewards=rewards, scored=np.array([1, 0, 1, 1, 0])), Loss(), Advantage(mode="mean"), "keep")
    assert decided.advantages.tolist() == [0.0, 0.0, -0.5, 0.5, 0.0]
    assert decided.row_counts.tolist() == [2, 2, 0, 2, 2, 0]


@pytest.mark.parametrize(("truncated", "advantages", "counts"), [("keep", [0.5, -0.5], 12), ("mask", [0.5, -0.5], 10), ("exclude", [0.0, 0.0], 10)])
def test_truncated_members_stay_leave_the_loss_or_leave_both(truncated, advantages, counts):
    decided = plan(rows_of(truncated=np.array([0, 1, 0, 0, 0])), Loss(), Advantage(mode="mean", truncated=truncated), "keep")
    assert decided.advantages[:2].tolist() == advantages
    assert decided.active_tokens == counts


def test_the_overlong_penalty_comes_before_the_baseline_and_counts_trained_tokens_over_all_rows():
    decided = plan(rows_of(rewards=np.ones(5)), Loss(), Advantage(mode="mean", overlong=Overlong(max_len=4, buffer=2)), "keep")
    assert decided.shaped_rewards.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert decided.advantages[:2].tolist() == [-0.5, 0.5]


def test_staleness_acts_after_the_baseline_on_what_is_left():
    versions = np.full(12, 4)
    versions[[4, 6]] = 1
    decided = plan(rows_of(versions=versions, stale=StaleLimit(5, 3)), Loss(), Advantage(mode="mean"), "mask")
    assert decided.advantages[:2].tolist() == [0.5, -0.5]
    assert decided.row_counts.tolist() == [2, 2, 0, 0, 0, 0]
    assert (decided.staleness.max, decided.staleness.dropped_tokens) == (4, 2)
    assert decided.staleness.tokens_by_lag.tolist() == [0, 5, 0, 0, 1]


def test_a_plan_where_nobody_trains_says_skip():
    decided = plan(rows_of(rewards=np.ones(5)), Loss(), Advantage(), "mask")
    assert decided.skip
    assert decided.row_weight.tolist() == [0.0] * 6


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": np.full(12, 0.5)},
        {"mask": np.ones(11)},
        {"rewards": np.array([1.0, np.nan, 0.0, 0.0, 0.0])},
        {"groups": np.array([1, 1])},
        {"row_trajectory": np.array([0, 0, 1, 2, 3, 5])},
        {"truncated": np.zeros(4)},
        {"versions": np.full(12, 6), "stale": StaleLimit(5, 3)},
        {"versions": np.full(11, 5), "stale": StaleLimit(5, 3)},
        {"stale": StaleLimit(5, 3)},
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(changes):
    with pytest.raises(DataRefused):
        plan(rows_of(**changes), Loss(), Advantage(mode="mean"), "keep")


def test_the_order_of_rows_changes_nothing():
    order = [3, 0, 5, 1, 4, 2]
    mode = Loss(agg="group_mean_token_mean")
    one = plan(rows_of(), mode, Advantage(), "keep")
    other = plan(rows_of(row_trajectory=rows_of().row_trajectory[order]), mode, Advantage(), "keep")
    assert other.row_weight.tolist() == one.row_weight[order].tolist()
    assert other.row_advantage.tolist() == one.row_advantage[order].tolist()
