"""Losses made for data of another policy."""

from __future__ import annotations

import torch

from ..ratios import bounded_exp
from .registry import PerToken, Terms, register_loss


@register_loss("is")
def importance_sampling(t: Terms) -> PerToken:
    """Ell = -A r, slope -A r: importance sampling without a bound other than that of the log ratio."""
    return PerToken(-t.adv * t.ratio())


@register_loss("topr")
def topr(t: Terms) -> PerToken:
    """Ell = -A x where A >= 0, else -sg(min(1, exp sum_t d(x, u))) A x: tapered off-policy REINFORCE (TOPR, arXiv 2503.14286, eq. 8). Always against mu."""
    sequence = t.rows.spread(bounded_exp(t.rows.sum(t.d_mu))).detach().clamp(max=1.0)
    return PerToken(-torch.where(t.adv >= 0, torch.ones_like(sequence), sequence) * t.adv * t.x)


@register_loss("dro")
def dro(t: Terms) -> PerToken:
    """Ell = -A x + beta / 2 d(x, old)^2, slope -A + beta d (DRO, arXiv 2405.19107, per token)."""
    return PerToken(-t.adv * t.x + 0.5 * t.config.dro_beta * t.d_old**2)
