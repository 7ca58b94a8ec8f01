"""Correction weights: rules that cannot mean anything, units, and registration from outside."""

import math

import pytest
import torch

from rollstream.configs.learner_schema import Correction
from rollstream.errors import ConfigError
from rollstream.learner.corrections import _LEVELS, _MODES, check_rule, correction_weight, register_level, register_mode, self_normalised
from rollstream.learner.segments import Segments

LOG_RHO = torch.tensor([0.1, 0.3, -0.2, math.nan, 0.4], dtype=torch.float64)
MASK = torch.tensor([True, True, True, False, True])


def units(*ids):
    return Segments(torch.tensor(ids), max(ids) + 1, MASK)


def weight(rule, segments):
    clean = torch.where(MASK, LOG_RHO, 0.0)
    found = correction_weight(clean, segments, [Correction(**rule)])
    return found.weight.tolist(), found.hit.tolist()


def test_a_trajectory_is_one_unit_however_many_rows_it_has():
    rule = {"level": "sequence", "mode": "truncate", "high": 10.0}
    per_row, _ = weight(rule, units(0, 0, 1, 1, 2))
    assert per_row == pytest.approx([math.exp(0.4), math.exp(0.4), math.exp(-0.2), 0.0, math.exp(0.4)])
    per_trajectory, _ = weight(rule, units(0, 0, 0, 0, 1))
    assert per_trajectory == pytest.approx([math.exp(0.2)] * 3 + [0.0, math.exp(0.4)])


def test_one_bad_token_vetoes_its_unit():
    found, hit = weight({"level": "min", "mode": "reject", "low": 0.9}, units(0, 0, 0, 0, 1))
    assert found == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert hit == [True, True, True, False, False]


def test_on_its_bounds_a_ratio_is_inside():
    for mode, expected in (("mask", 1.0), ("reject", 1.0), ("clip", 1.0), ("truncate", 1.0)):
        low = None if mode == "truncate" else 1.0
        segments = Segments(torch.tensor([0]), 1, torch.tensor([True]))
        found = correction_weight(torch.zeros(1, dtype=torch.float64), segments, [Correction(level="token", mode=mode, low=low, high=1.0)])
        assert (found.weight.tolist(), found.hit.tolist()) == ([expected], [False])


def test_without_rules_every_active_token_weighs_one():
    found = correction_weight(torch.where(MASK, LOG_RHO, 0.0), units(0, 0, 0, 0, 0), [])
    assert found.weight.tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_normalising_all_zero_weights_leaves_them_zero():
    assert self_normalised(torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.bool)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "rule",
    [
        {"level": "token", "mode": "truncate"},
        {"level": "token", "mode": "truncate", "low": 0.5, "high": 2.0},
        {"level": "token", "mode": "mask"},
        {"level": "token", "mode": "clip", "low": 2.0, "high": 0.5},
        {"level": "word", "mode": "clip", "high": 2.0},
        {"level": "token", "mode": "squash", "high": 2.0},
    ],
)
def test_a_rule_that_cannot_mean_anything_is_refused(rule):
    with pytest.raises(ConfigError):
        check_rule(Correction(**rule))


def test_a_user_registers_a_level_and_a_mode():
    register_level("first")(lambda log_rho, units: torch.exp(log_rho[:1]).expand(len(log_rho)))
    register_mode("square")(lambda statistic, low, high: (statistic**2, statistic > high))
    try:
        rule = {"level": "first", "mode": "square", "high": 9.0}
        check_rule(Correction(**rule))
        assert weight(rule, units(0, 0, 0, 0, 0))[0] == pytest.approx([math.exp(0.2)] * 3 + [0.0, math.exp(0.2)])
    finally:
        del _LEVELS["first"], _MODES["square"]
