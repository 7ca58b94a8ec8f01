"""The clipped surrogate, on token ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from ...configs.learner_schema import Loss
from .registry import PerToken, Terms, register_loss


def clip_conditions(ratio: Tensor, adv: Tensor, config: Loss) -> tuple[Tensor, Tensor]:
    """Which tokens PPO clips: high iff A > 0 and ratio > 1 + eh, low iff A < 0 and ratio < 1 - el; A = 0 never. Both ``[P] bool``."""
    return (adv > 0) & (ratio > 1.0 + config.eps_high), (adv < 0) & (ratio < 1.0 - config.eps_low)


def clipped_surrogate(ratio: Tensor, adv: Tensor, config: Loss) -> PerToken:
    """max(-A s, -A clip(s, 1 - el, 1 + eh)); if A < 0 and a dual cap c is set, min(that, -c A).

    The dual cap binds iff A < 0 and s > c. On a boundary the unclipped slope applies, so the branches are chosen by these conditions and not by
    ``maximum``, which would split the gradient there.
    """
    high, low = clip_conditions(ratio, adv, config)
    frozen = torch.where(high, -adv * (1.0 + config.eps_high), -adv * (1.0 - config.eps_low))
    clipped = high | low
    dual = torch.zeros_like(clipped)
    if config.dual_clip is not None:
        dual = (adv < 0) & (ratio > config.dual_clip)
        frozen = torch.where(dual, -config.dual_clip * adv, frozen)
        clipped = clipped | dual
    return PerToken(torch.where(clipped, frozen, -adv * ratio), high, low, dual)


@register_loss("ppo")
def ppo(t: Terms) -> PerToken:
    """PPO's clipped surrogate on r (arXiv 1707.06347, eq. 7), asymmetric bounds (DAPO, 2503.14476, eq. 8), dual clip (1912.09729, eq. 5); slope -A r or 0."""
    return clipped_surrogate(t.ratio(), t.adv, t.config)
