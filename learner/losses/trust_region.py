"""Policy gradient with a frozen capped weight, on the tokens inside a trust region: ell = -M sg(min(exp d(x, u), C)) A x, slope -M min(., C) A.

M differs by loss; C is ``is_cap`` (none: no cap). Weight and region are frozen, so a dropped token has gradient exactly 0 however large its ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...configs.learner_schema import Loss
from ...errors import ConfigError
from .ppo import clip_conditions
from .registry import PerToken, Terms, register_loss

PROBABILITY_FLOOR = 1e-300


def _masked_gradient(t: Terms, trust: Tensor) -> Tensor:
    weight = torch.exp(t.d_mu.detach())
    if t.config.is_cap is not None:
        weight = weight.clamp(max=t.config.is_cap)
    return torch.where(trust, -weight * t.adv * t.x, torch.zeros_like(t.x))


@register_loss("minirl")
def minirl(t: Terms) -> PerToken:
    """M = 0 where PPO would clip r high or low (MiniRL, Qwen, arXiv 2512.01374)."""
    high, low = clip_conditions(t.ratio().detach(), t.adv, t.config)
    trust = ~(high | low)
    return PerToken(_masked_gradient(t, trust), high, low, trust=trust)


@register_loss("dppo_tv")
def dppo_tv(t: Terms) -> PerToken:
    """M = 0 iff A (pi - mu) > 0 and |pi - mu| > delta, probabilities of the sampled token (DPPO, arXiv 2602.04879, total variation)."""
    gap = torch.exp(t.x.detach()) - torch.exp(t.log_mu)
    trust = ~((t.adv * gap > 0) & (gap.abs() > t.config.delta))
    return PerToken(_masked_gradient(t, trust), trust=trust)


@register_loss("dppo_kl")
def dppo_kl(t: Terms) -> PerToken:
    """M = 0 iff A (pi - mu) > 0 and the Bernoulli KL(mu, pi) > delta (DPPO, arXiv 2602.04879).

    KL = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), each probability floored at 1e-300.
    """
    pi, mu = torch.exp(t.x.detach()), torch.exp(t.log_mu)
    floored = [probability.clamp(min=PROBABILITY_FLOOR) for probability in (mu, pi, 1.0 - mu, 1.0 - pi)]
    kl = floored[0] * torch.log(floored[0] / floored[1]) + floored[2] * torch.log(floored[2] / floored[3])
    trust = ~((t.adv * (pi - mu) > 0) & (kl > t.config.delta))
    return PerToken(_masked_gradient(t, trust), trust=trust)


def second_moment_trust(d_mu: Tensor, adv: Tensor, mask: Tensor, config: Loss) -> Tensor:
    """M of m2po over the whole global batch: the largest d(x, u)^2 leave until the mean over the candidates left is <= ``m2_threshold``, ``[P] bool``.

    Candidates are active tokens with A d(x, u) > 0, or all active ones (``m2_directional: false``); everything else keeps M = 1. Candidates
    of equal d^2 leave together, so that the result does not depend on their order.
    """
    candidate = mask & (adv * d_mu > 0) if config.m2_directional else mask
    squares = torch.where(candidate, d_mu**2, torch.zeros_like(d_mu))
    ordered, _ = torch.sort(squares[candidate])
    if not len(ordered):
        return torch.ones_like(mask)
    means = torch.cumsum(ordered, 0) / torch.arange(1, len(ordered) + 1, dtype=ordered.dtype, device=ordered.device)
    last_of_ties = torch.cat([ordered[1:] > ordered[:-1], torch.ones(1, dtype=torch.bool, device=ordered.device)])
    fits = torch.nonzero(last_of_ties & (means <= config.m2_threshold)).flatten()
    if not len(fits):
        return ~candidate
    return ~(candidate & (squares > ordered[fits[-1]]))


@register_loss("m2po", batch_trust=second_moment_trust)
def m2po(t: Terms) -> PerToken:
    """M from :func:`second_moment_trust`, once per global batch (M2PO, arXiv 2510.01161, algorithm 1)."""
    if t.trust is None:
        raise ConfigError("loss m2po needs its mask over the whole batch: compute Objective.batch_terms before the first micro-batch")
    return PerToken(_masked_gradient(t, t.trust), trust=t.trust)
