"""Reward shaping and the test for groups that teach nothing."""

from __future__ import annotations

import numpy as np
import pytest

from rollstream.buffer.shaping import is_degenerate, overlong_penalty, shape_rewards
from rollstream.configs.learner_schema import Overlong


def test_the_overlong_penalty_is_flat_then_linear_then_flat() -> None:
    penalty = overlong_penalty([0, 60, 80, 90, 100, 140], Overlong(max_len=100, buffer=40, factor=2.0))
    np.testing.assert_allclose(penalty, [0, 0, -1.0, -1.5, -2.0, -2.0], rtol=0, atol=0)


def test_rewards_without_shaping_stay_and_unscored_ones_stay_unscored() -> None:
    np.testing.assert_array_equal(shape_rewards([1.0, np.nan, 0.5], [9, 9, 9], None), [1.0, np.nan, 0.5])
    np.testing.assert_array_equal(shape_rewards([1.0, np.nan], [100, 100], Overlong(max_len=100, buffer=10)), [0.0, np.nan])


def test_shaping_does_not_change_the_rewards_it_was_given() -> None:
    rewards = np.array([1.0, 1.0])
    shape_rewards(rewards, [0, 100], Overlong(max_len=100, buffer=10))
    np.testing.assert_array_equal(rewards, [1.0, 1.0])


@pytest.mark.parametrize(
    ("rewards", "included", "degenerate"),
    [
        ([1.0, 1.0, 1.0], [1, 1, 1], True),
        ([1.0, 1.0, 0.0], [1, 1, 1], False),
        ([1.0, 1.0, 0.0], [1, 1, 0], True),
        ([1.0, 0.0, 0.0], [1, 0, 0], True),
        ([1.0, np.nan, 0.0], [1, 0, 1], False),
        ([], [], True),
        ([1e6, 1e6 + 1e-4], [1, 1], True),  # within 1e-9 of their size
        ([1e6, 1e6 + 1e-2], [1, 1], False),
        ([0.0, 5e-10], [1, 1], True),
    ],
)
def test_a_group_is_degenerate_when_its_included_rewards_are_equal(rewards: list[float], included: list[int], degenerate: bool) -> None:
    assert is_degenerate(rewards, included) is degenerate


def test_equal_rewards_of_different_length_teach_something_once_shaped() -> None:
    shaped = shape_rewards([1.0, 1.0], [50, 100], Overlong(max_len=100, buffer=50))
    assert not is_degenerate(shaped, [1, 1])
