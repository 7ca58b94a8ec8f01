"""Advantages: what a group teaches when it is small, constant, partly scored, or measured by a mode of one's own."""

import numpy as np
import pytest

from rollstream.configs.learner_schema import Advantage
from rollstream.errors import ConfigError, DataRefused
from rollstream.learner.advantages import _MODES, compute_advantages, register_advantage
from rollstream.learner.masks import as_mask, response_mask
from rollstream.learner.returns import gae, kl_reward, whiten


def advantages(mode, rewards, groups, **given):
    config = Advantage(mode=mode, **{key: given.pop(key) for key in list(given) if key in Advantage.model_fields})
    found, flagged = compute_advantages(np.array(rewards, float), np.array(groups), config, **given)
    return found.tolist(), flagged.tolist()


@pytest.mark.parametrize("mode", ["mean", "grpo", "rloo", "opo", "batch_std", "none"])
def test_a_constant_group_and_a_singleton_teach_exactly_nothing(mode):
    found, flagged = advantages(mode, [0.1, 0.1, 0.1, 3.0], [4, 4, 4, 2], lengths=np.array([1, 5, 2, 9]), eps=0.0)
    assert found == [0.0] * 4
    assert flagged == [True] * 4


def test_an_excluded_reward_is_never_read():
    found, flagged = advantages("mean", [1.0, np.nan, 0.0], [0, 0, 0], included=np.array([True, False, True]))
    assert found == [0.5, 0.0, -0.5]
    assert flagged == [False, True, False]


def test_a_reward_that_is_not_finite_is_refused_by_name():
    with pytest.raises(DataRefused, match="reward of trajectory group 1 member 1 is nan"):
        advantages("mean", [1.0, np.nan], [0, 0], names=("group 1 member 0", "group 1 member 1"))


def test_groups_of_any_size_and_order_mix():
    found, _ = advantages("rloo", [1, 5, 0, 5, 8], [9, 2, 9, 2, 2])
    assert found == [1.0, -1.5, -1.0, -1.5, 3.0]


def test_opo_weighs_by_length_and_needs_it():
    found, _ = advantages("opo", [1.0, 0.0], [0, 0], lengths=np.array([3, 1]))
    assert found == [0.25, -0.75]
    assert advantages("opo", [1.0, 0.0], [0, 0], lengths=np.array([0, 0]))[0] == [0.5, -0.5]
    with pytest.raises(DataRefused, match="lengths"):
        advantages("opo", [1.0, 0.0], [0, 0])


def test_an_unknown_mode_is_refused_with_those_known():
    with pytest.raises(ConfigError, match="known are batch_std, grpo"):
        advantages("nope", [1.0], [0])


def test_shapes_that_disagree_are_refused():
    with pytest.raises(DataRefused):
        advantages("mean", [1.0, 2.0], [0])


def test_a_user_registers_a_mode():
    register_advantage("sign")(lambda scores: np.sign(scores.centred()))
    try:
        assert advantages("sign", [3.0, 1.0, 1.0], [0, 0, 0])[0] == [1.0, -1.0, -1.0]
    finally:
        del _MODES["sign"]


def test_an_advantage_that_is_not_finite_is_refused():
    register_advantage("broken")(lambda scores: scores.rewards / 0.0)
    try:
        with pytest.raises(DataRefused, match="advantage of trajectory 0"):
            advantages("broken", [3.0, 1.0], [0, 0])
    finally:
        del _MODES["broken"]


def test_masked_positions_are_skipped_and_never_read():
    mask = np.array([[True, False, True]])
    rewards, values = np.array([[0.0, np.nan, 1.0]]), np.array([[0.5, np.nan, 0.25]])
    found = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert found.advantages.tolist() == [[0.5, 0.0, 0.75]]
    assert found.returns.tolist() == [[1.0, 0.0, 1.0]]


def test_fewer_than_two_active_tokens_whiten_to_zero():
    assert whiten(np.array([[3.0, 4.0]]), np.array([[True, False]])).tolist() == [[0.0, 0.0]]


def test_token_level_inputs_that_are_not_finite_are_refused():
    mask, fine = np.ones((1, 2), bool), np.zeros((1, 2))
    with pytest.raises(DataRefused, match="value of row 0 token 1"):
        gae(fine, np.array([[0.0, np.nan]]), mask, gamma=1.0, lam=1.0)
    with pytest.raises(DataRefused, match="reward of row 0"):
        kl_reward(np.array([np.inf]), fine, fine, mask, coef=0.1)
    with pytest.raises(DataRefused, match="bootstrap"):
        gae(fine, fine, mask, np.zeros(3), gamma=1.0, lam=1.0)


def test_a_mask_holds_zeros_and_ones_only():
    assert as_mask([0, 1.0, True]).tolist() == [False, True, True]
    for wrong in ([2], [0.5], [np.nan], [-1]):
        with pytest.raises(DataRefused, match="0 and 1 only"):
            as_mask(wrong)


def test_a_response_ends_with_its_first_end_token_whatever_the_pad_id():
    assert response_mask([7, 2, 3, 2, 2, 2], 2, {2, 9}).tolist() == [False, False, True, True, False, False]
    assert response_mask([7, 2], 2, {2}).tolist() == [False, False]
