"""Functions that users register: what they give is used as it is, or refused with their name; nothing broadcasts into another loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.configs.learner_schema import Advantage, Correction, Loss
from rollstream.errors import ConfigError
from rollstream.learner import advantages, aggregation, corrections
from rollstream.learner.advantages import compute_advantages, register_advantage
from rollstream.learner.aggregation import register_aggregation, row_weights
from rollstream.learner.corrections import register_level, register_mode
from rollstream.learner.losses import PerToken, Terms, register_loss, registry
from rollstream.learner.objective import Objective
from rollstream.learner.tokens import Tokens

NUM = 6


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((registry, "_LOSSES"), (aggregation, "_MODES"), (advantages, "_MODES"), (corrections, "_LEVELS"), (corrections, "_MODES")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))


def tokens() -> Tokens:
    row = torch.tensor([0, 0, 0, 1, 1, 1])
    return Tokens(row, 2, torch.ones(NUM, dtype=torch.bool), torch.full((NUM,), 0.5), torch.full((NUM,), 1 / NUM), mu=torch.full((NUM,), -1.0))


def run(loss: Loss) -> float:
    x = torch.linspace(-2.0, -0.5, NUM, dtype=torch.float64).requires_grad_()
    value, _ = Objective(loss)(x, tokens())
    value.backward()
    return float(value.detach())


LOSSES: dict[str, tuple[Callable[[Terms], Any], str]] = {
    "an axis too many": (lambda t: PerToken((-t.adv * t.x)[:, None]), r"gave ell of shape \(6, 1\) for 6 tokens"),
    "one number": (lambda t: PerToken((-t.adv * t.x)[:1]), r"gave ell of shape \(1,\) for 6 tokens"),
    "the mean": (lambda t: PerToken((-t.adv * t.x).mean()), r"gave ell of shape \(\) for 6 tokens"),
    "too few flags": (lambda t: PerToken(-t.adv * t.x, clipped_high=t.mask[:3]), r"gave clipped_high of shape \(3,\) for 6 tokens"),
    "nothing to differentiate": (lambda t: PerToken((-t.adv * t.x).detach()), "does not depend on the live log-probabilities"),
    "no PerToken": (lambda t: -t.adv * t.x, "gave a Tensor: it has to give a PerToken"),
    "an error": (lambda t: {}["boom"], "failed: KeyError: 'boom'"),
    "shapes of its own": (lambda t: PerToken(t.x + t.x[:4]), "failed: RuntimeError: The size of tensor"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_does_not_fit_is_refused_by_name(case: str) -> None:
    function, message = LOSSES[case]
    register_loss("mine")(function)
    with pytest.raises(ConfigError, match=rf"learner\.loss\.kind mine .*{message}"):
        run(Loss(kind="mine"))


def test_a_trust_mask_of_the_wrong_length_is_refused_by_name() -> None:
    register_loss("mine", batch_trust=lambda d_mu, adv, mask, config: mask[:2])(lambda t: PerToken(-t.adv * t.x))
    with pytest.raises(ConfigError, match=r"learner\.loss\.kind mine gave batch_trust of shape \(2,\)"):
        Objective(Loss(kind="mine")).batch_terms(torch.full((NUM,), -1.0), tokens())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda counts: 1.0, "gave a float: it has to give a ndarray"),
        (lambda counts: np.ones(1 + len(counts.row)), "gave weights of shape"),
        (lambda counts: np.full(len(counts.row), np.nan), "gave the weight nan"),
        (lambda counts: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_an_aggregation_that_does_not_fit_is_refused_when_the_objective_is_made(given: Callable[..., Any], message: str) -> None:
    register_aggregation("mine")(given)
    with pytest.raises(ConfigError, match=rf"learner\.loss\.agg mine {message}"):
        Objective(Loss(agg="mine"))


def test_an_aggregation_without_its_constant_is_refused_when_the_objective_is_made() -> None:
    for agg, key in (("fixed", "agg_const"), ("seq_mean_fixed", "agg_length")):
        with pytest.raises(ConfigError, match=f"needs learner.loss.{key}"):
            Objective(Loss(agg=agg))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda scores: 1.0, "gave a float"),
        (lambda scores: scores.centred()[:, None], r"gave advantages of shape \(4, 1\): it has to be \(4,\)"),
        (lambda scores: scores.centred()[:2], r"gave advantages of shape \(2,\)"),
        (lambda scores: None, "gave a NoneType"),
        (lambda scores: scores.nowhere, "failed: AttributeError"),
    ],
)
def test_an_advantage_that_does_not_fit_is_refused_by_name(given: Callable[..., Any], message: str) -> None:
    register_advantage("mine")(given)
    with pytest.raises(ConfigError, match=rf"learner\.advantage\.mode mine {message}"):
        compute_advantages(np.array([0.0, 1.0, 0.0, 1.0]), np.array([0, 0, 1, 1]), Advantage(mode="mine"))


def test_a_correction_that_does_not_fit_is_refused_by_name() -> None:
    register_level("mine")(lambda log_rho, units: torch.exp(units.mean(log_rho)))
    with pytest.raises(ConfigError, match=r"correction level mine gave a statistic of shape \(2,\) for 6 tokens"):
        run(Loss(kind="pg", old="prox", correction=(Correction(level="mine", mode="truncate", high=2.0),)))
    register_mode("mine")(lambda statistic, low, high: (statistic[:1], statistic > high))
    with pytest.raises(ConfigError, match=r"correction mode mine gave a factor of shape \(1,\) for 6 tokens"):
        run(Loss(kind="pg", old="prox", correction=(Correction(level="token", mode="mine", high=2.0),)))


def test_what_fits_is_used_as_it_is() -> None:
    register_loss("mine")(lambda t: PerToken(-t.adv * t.x, clipped_high=t.x > 0))
    assert run(Loss(kind="mine")) == pytest.approx(0.5 * 1.25)
    register_aggregation("mine")(lambda counts: np.full(len(counts.row), 0.25))
    assert row_weights(np.array([2, 0]), np.array([0, 1]), np.array([0, 0]), "mine").tolist() == [0.25, 0.0]
