"""Losses on a ratio or a log ratio of the whole row."""

from __future__ import annotations

import torch

from .ppo import clipped_surrogate
from .registry import PerToken, Terms, register_loss


@register_loss("gspo")
def gspo(t: Terms) -> PerToken:
    """Clipped surrogate in s = exp(mean_t d(x, old)), shared by the row (GSPO, arXiv 2507.18071, eq. 5-7); slope of a token (sum_u a_u slope_u) / n."""
    return clipped_surrogate(t.rows.spread(torch.exp(t.rows.mean(t.d_old))), t.adv, t.config)


@register_loss("gspo_token")
def gspo_token(t: Terms) -> PerToken:
    """Clipped surrogate in s_t = sg(s) exp(x - sg x) (GSPO, arXiv 2507.18071, eq. 13-14); slope -A s unless clipped.

    Equal to gspo in value and gradient where A and ``a`` are constant in the row.
    """
    shared = t.rows.spread(torch.exp(t.rows.mean(t.d_old))).detach()
    return clipped_surrogate(shared * torch.exp(t.x - t.x.detach()), t.adv, t.config)


@register_loss("gmpo")
def gmpo(t: Terms) -> PerToken:
    """Ell = -A exp(mean_t c_t), c_t = min(d, eh) if A > 0 else max(d, -el) (GMPO, arXiv 2507.20673, eq. 4); slope -A G / n where unclipped.

    ``eps_*`` are offsets of the log ratio here. On a boundary the unclipped slope applies.
    """
    d, config = t.d_old, t.config
    positive = t.adv > 0
    over, under = positive & (d > config.eps_high), ~positive & (d < -config.eps_low)
    bound = torch.where(over, torch.full_like(d, config.eps_high), torch.full_like(d, -config.eps_low))
    geometric = t.rows.spread(torch.exp(t.rows.mean(torch.where(over | under, bound, d))))
    return PerToken(-t.adv * geometric, over, under & (t.adv < 0))


@register_loss("dro_seq")
def dro_seq(t: Terms) -> PerToken:
    """Ell = -A x + beta / 2 (sum_t d(x, old))^2 / n: the squared sequence log ratio, shared by the row's n tokens (Kimi k1.5, arXiv 2501.12599, eq. 3)."""
    share = t.rows.spread(t.rows.sum(t.d_old) ** 2 / t.rows.counts.clamp(min=1.0))
    return PerToken(-t.adv * t.x + 0.5 * t.config.dro_beta * share)
