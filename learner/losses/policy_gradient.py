"""REINFORCE."""

from __future__ import annotations

from .registry import PerToken, Terms, register_loss


@register_loss("pg")
def policy_gradient(t: Terms) -> PerToken:
    """Ell = -A x, slope -A (Williams 1992)."""
    return PerToken(-t.adv * t.x)
