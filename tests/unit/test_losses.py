"""What losses owe beyond their numbers: gradients where nothing may look, boundaries, registration, and how a batch is cut."""

import math

import pytest
import torch

from rollstream.configs.learner_schema import Correction, Loss
from rollstream.errors import ConfigError, DataRefused
from rollstream.learner.losses import PerToken, loss_names, register_loss
from rollstream.learner.losses.ppo import clipped_surrogate
from rollstream.learner.losses.registry import _LOSSES
from rollstream.learner.objective import Objective, Stats, Tokens


def tokens_of(rows, adv, **given):
    """Tokens of rows given as lengths; every token active unless told otherwise; token mean."""
    row = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows, dtype=torch.int64))
    mask = given.pop("mask", torch.ones(len(row), dtype=torch.bool))
    agg = torch.full((len(row),), 1.0 / max(int(mask.sum()), 1), dtype=torch.float64)
    return Tokens(row=row, num_rows=len(rows), mask=mask, adv=torch.as_tensor(adv, dtype=torch.float64), agg=agg, **given)


def logprobs(*values):
    return torch.tensor(values, dtype=torch.float64)


def run(loss, x, tokens, entropy=None):
    """Loss, gradient, metrics; through the whole-batch terms where they are needed."""
    objective = Objective(loss)
    live = x.clone().requires_grad_()
    if objective.needs_proximal_pass:
        tokens = objective.batch_terms(x, tokens).put(tokens, slice(None))
    value, stats = objective(live, tokens, entropy)
    value.backward()
    return float(value.detach()), live.grad, stats.result()


@pytest.mark.parametrize("kind", loss_names())
def test_masked_junk_reaches_neither_loss_nor_gradient(kind):
    mask = torch.tensor([True, False, True, False])
    junk = logprobs(-1.0, math.nan, -2.0, math.inf)
    clean = logprobs(-1.0, -1.0, -2.0, -1.0)
    loss = Loss(kind=kind, dro_beta=0.5, mu_sq_coef=0.1, kl="k3", kl_coef=0.1, kl_is=True)

    def outcome(x):
        tokens = tokens_of([2, 2], [1.0, math.nan, -1.0, math.inf], mask=mask, mu=x - 0.3, prox=x - 0.1, ref=x - 0.2)
        return run(loss, x, tokens)

    value, grad, metrics = outcome(junk)
    expected_value, expected_grad, expected_metrics = outcome(clean)
    assert value == expected_value
    assert torch.equal(grad, expected_grad)
    assert metrics == expected_metrics
    assert grad[~mask].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", loss_names())
def test_a_batch_without_active_tokens_has_loss_and_gradient_zero(kind):
    x = logprobs(math.nan, -1.0)
    value, grad, metrics = run(Loss(kind=kind, mu_sq_coef=0.1), x, tokens_of([2], [1.0, 1.0], mask=torch.zeros(2, dtype=torch.bool)))
    assert (value, grad.tolist()) == (0.0, [0.0, 0.0])
    assert metrics == {"active_tokens": 0, "skip_step": True}
    value, grad, _ = run(Loss(kind=kind), logprobs(), tokens_of([], []))
    assert (value, len(grad)) == (0.0, 0)


@pytest.mark.parametrize("kind", ["is", "ppo", "gspo", "gmpo", "sapo", "spo", "dro"])
def test_a_log_ratio_beyond_the_bound_has_no_gradient_and_a_finite_value(kind):
    x = logprobs(-0.1, -800.0)
    value, grad, _ = run(Loss(kind=kind, dual_clip=None), x, tokens_of([1, 1], [-1.0, 1.0], prox=logprobs(-800.0, -0.1)))
    assert math.isfinite(value)
    expected = [0.5, -0.5] if kind == "dro" else [0.0, 0.0]
    assert grad.tolist() == expected


def test_on_the_clip_boundary_the_unclipped_slope_applies():
    ratio = logprobs(2.0, 0.5, 3.0).requires_grad_()
    found = clipped_surrogate(ratio, logprobs(1.0, -1.0, -1.0), Loss(eps_low=0.5, eps_high=1.0, dual_clip=3.0))
    found.ell.sum().backward()
    assert ratio.grad.tolist() == [-1.0, 1.0, 1.0]
    assert not any(flags.any() for flags in (found.clipped_high, found.clipped_low, found.clipped_dual))


def test_zero_advantage_is_never_clipped():
    _, _, metrics = run(Loss(dual_clip=1.5), logprobs(-0.1, -3.0), tokens_of([2], [0.0, 0.0], prox=logprobs(-3.0, -0.1)))
    assert metrics["clip_frac"] == 0


def test_cispo_keeps_the_gradient_of_truncated_tokens():
    _, grad, metrics = run(Loss(kind="cispo", eps_low=1.0, eps_high=0.28), logprobs(-0.1), tokens_of([1], [1.0], prox=logprobs(-3.0)))
    assert grad.tolist() == pytest.approx([-1.28])
    assert metrics["clip_frac_high"] == 1


def test_gspo_and_gspo_token_agree_where_the_advantage_is_constant_in_a_row():
    x, prox = logprobs(-1.0, -0.5, -2.0, -1.0, -1.1), logprobs(-1.05, -0.45, -2.2, -1.3, -1.0)
    tokens = tokens_of([3, 2], [0.7, 0.7, 0.7, -1.0, -1.0], prox=prox)
    one, other = (run(Loss(kind=kind, eps_low=0.3, eps_high=0.4), x, tokens) for kind in ("gspo", "gspo_token"))
    assert one[0] == pytest.approx(other[0], rel=1e-14)
    assert one[1].tolist() == pytest.approx(other[1].tolist(), rel=1e-14)


def test_the_trust_region_of_m2po_ignores_the_order_of_tied_tokens():
    x, mu = logprobs(-1.0, -1.0, -1.0, -1.0), logprobs(-1.5, -1.5, -1.1, -1.0)
    tokens = tokens_of([4], [1.0, 1.0, 1.0, 1.0], mu=mu)
    _, grad, metrics = run(Loss(kind="m2po", m2_threshold=0.2), x, tokens)
    assert metrics["trust_masked_frac"] == 0  # mean of .25, .25, .01 is .17
    _, grad, metrics = run(Loss(kind="m2po", m2_threshold=0.14), x, tokens)
    assert metrics["trust_masked_frac"] == 0.5
    assert grad[:2].tolist() == [0.0, 0.0]


def test_the_ratio_on_fresh_data_is_exactly_one():
    x = logprobs(-0.3, -1.2, -4.0)
    _, grad, metrics = run(Loss(), x, tokens_of([3], [1.0, 1.0, 1.0], mu=x))
    assert metrics["ratio_mean"] == metrics["is_mean"] == metrics["ratio_ess"] == metrics["drift_mu_ess"] == 1
    assert metrics["drift_mu_k3"] == 0
    assert grad.tolist() == pytest.approx([-1 / 3] * 3)


def test_any_split_into_micro_batches_gives_the_same_gradient_and_metrics():
    generator = torch.Generator().manual_seed(0)
    lengths = [4, 1, 3, 2, 5, 1]
    x = -torch.rand(sum(lengths), generator=generator, dtype=torch.float64) * 3
    whole = tokens_of(lengths, torch.randn(len(x), generator=generator), mu=(x - 0.2).float(), prox=x - torch.rand(len(x), generator=generator))
    loss = Loss(correction=(Correction(level="sequence", mode="clip", low=0.5, high=1.5),))
    expected_value, expected_grad, expected_metrics = run(loss, x, whole)
    objective = Objective(loss)
    live, total, stats = x.clone().requires_grad_(), 0.0, Stats()
    for rows in ([5, 0], [2], [3, 1, 4]):
        index = torch.cat([torch.nonzero(whole.row == row).flatten() for row in rows])
        local = torch.cat([torch.full((lengths[row],), place) for place, row in enumerate(rows)])
        part = Tokens(local, len(rows), whole.mask[index], whole.adv[index], whole.agg[index], whole.mu[index], whole.prox[index])
        value, measured = objective(live[index], part)
        value.backward()
        total += float(value.detach())
        stats = stats.merge(measured)
    assert total == pytest.approx(expected_value, rel=1e-12)
    assert live.grad.tolist() == pytest.approx(expected_grad.tolist(), rel=1e-12)
    assert stats.result() == pytest.approx(expected_metrics, rel=1e-12)
    ranks = Stats.merge_packed([stats.pack(), Stats().pack()], stats.has)
    assert ranks.result() == stats.result()


def test_a_constant_ratio_has_deviation_zero_however_the_batch_is_cut():
    x = torch.full((1500,), -1.0, dtype=torch.float64)
    _, half = Objective(Loss())(x, tokens_of([1500], torch.ones(1500), mu=x - 3.0, prox=x))
    assert half.result()["is_std"] < 1e-12
    assert half.merge(half).result()["is_std"] < 1e-12


def test_float32_log_probabilities_get_a_float32_gradient():
    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    value, _ = Objective(Loss())(x, tokens_of([2], [1.0, -1.0]))
    value.backward()
    assert value.dtype == torch.float64
    assert x.grad.dtype == torch.float32


def test_a_refusal_names_the_row_the_token_and_the_value():
    x = logprobs(-1.0, -1.0, -1.0)
    bad = tokens_of([1, 2], [1.0, 1.0, 1.0], mu=logprobs(-1.0, -1.0, -math.inf), names=["group 3 member 0", "group 3 member 1"])
    with pytest.raises(DataRefused, match=r"mu is -inf at token 1 of row group 3 member 1.*nonfinite: drop"):
        Objective(Loss())(x, bad)
    with pytest.raises(DataRefused, match=r"mu is 0\.5 at token 0 of row 1: .*negated"):
        Objective(Loss())(x, tokens_of([1, 2], [1.0, 1.0, 1.0], mu=logprobs(-1.0, 0.5, -1.0)))
    with pytest.raises(DataRefused, match="mu has shape"):
        Objective(Loss())(x, tokens_of([3], [1.0, 1.0, 1.0], mu=logprobs(-1.0)))
    with pytest.raises(DataRefused, match="dtype"):
        Objective(Loss())(x, tokens_of([3], [1.0, 1.0, 1.0], mask=torch.ones(3)))


def test_float_noise_above_zero_is_no_refusal():
    assert run(Loss(), logprobs(5e-5), tokens_of([1], [1.0], mu=logprobs(1e-4)))[2]["active_tokens"] == 1


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Loss(kind="nope"), "known are cispo"),
        (Loss(agg="nope"), "known are fixed"),
        (Loss(kind="spo", eps_high=0.0), "eps_high"),
        (Loss(kl_coef=0.1), "without learner.loss.kl"),
        (Loss(old="mu", correction=(Correction(level="token", mode="truncate", high=2.0),)), "count twice"),
    ],
)
def test_a_loss_that_cannot_mean_anything_is_refused_at_construction(loss, message):
    with pytest.raises(ConfigError, match=message):
        Objective(loss)


def test_inputs_an_objective_needs_are_asked_for_by_name():
    x, tokens = logprobs(-1.0), tokens_of([1], [1.0])
    assert Objective(Loss(kl="k3")).needs_reference
    assert Objective(Loss(entropy_coef=0.1)).needs_entropy
    for loss, message in ((Loss(kl="k3"), "reference"), (Loss(old="mu"), "behaviour"), (Loss(entropy_coef=0.1), "entropy"), (Loss(kind="m2po"), "batch_terms")):
        with pytest.raises(ConfigError, match=message):
            Objective(loss)(x, tokens)


def test_only_what_needs_the_whole_batch_asks_for_a_proximal_pass():
    rule = Correction(level="sequence", mode="truncate", high=2.0)
    assert not Objective(Loss(correction=(rule,))).needs_proximal_pass
    assert not Objective(Loss(self_normalise=True)).needs_proximal_pass
    assert Objective(Loss(correction=(rule,), self_normalise=True)).needs_proximal_pass
    assert Objective(Loss(correction=(rule,), correction_unit="trajectory")).needs_proximal_pass
    assert Objective(Loss(kind="m2po")).needs_proximal_pass


def test_the_entropy_bonus_reaches_the_entropy_and_is_reported():
    entropy = logprobs(0.5, 1.5).requires_grad_()
    value, _, metrics = run(Loss(entropy_coef=0.1), logprobs(-1.0, -1.0), tokens_of([2], [0.0, 0.0]), entropy)
    assert value == pytest.approx(-0.1)
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])
    assert metrics["entropy"] == 1.0
    _, _, unused = run(Loss(), logprobs(-1.0), tokens_of([1], [0.0]), logprobs(math.nan))
    assert math.isnan(unused["entropy"])


def test_a_user_registers_a_loss_in_three_lines():
    @register_loss("tempered")
    def tempered(t):
        return PerToken(-t.adv * t.ratio() ** 0.5)

    try:
        _, grad, _ = run(Loss(kind="tempered"), logprobs(-1.0), tokens_of([1], [2.0]))
        assert grad.tolist() == [-1.0]
    finally:
        del _LOSSES["tempered"]
