"""Truncated importance weights that keep the gradient of truncated tokens."""

from __future__ import annotations

from .registry import PerToken, Terms, register_loss


@register_loss("cispo")
def cispo(t: Terms) -> PerToken:
    """Ell = -sg(clip(r, 1 - el, 1 + eh)) A x (MiniMax-M1, arXiv 2506.13585, eq. 4); canonical el is 1: no lower bound. Anchored at mu it is AIPO.

    The weight is truncated whatever the sign of A, and so it is counted.
    """
    ratio = t.ratio().detach()
    weight = ratio.clamp(1.0 - t.config.eps_low, 1.0 + t.config.eps_high)
    return PerToken(-weight * t.adv * t.x, ratio > 1.0 + t.config.eps_high, ratio < 1.0 - t.config.eps_low)
