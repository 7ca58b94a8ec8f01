"""Smooth alternatives to a clip."""

from __future__ import annotations

import torch

from ...configs.learner_schema import Loss
from ...errors import ConfigError
from .registry import PerToken, Terms, register_loss


@register_loss("sapo")
def sapo(t: Terms) -> PerToken:
    """Ell = -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A (SAPO, arXiv 2511.20347); slope -A 4 z (1 - z) r."""
    tau = torch.where(t.adv > 0, torch.full_like(t.adv, t.config.tau_pos), torch.full_like(t.adv, t.config.tau_neg))
    return PerToken(-t.adv * (4.0 / tau) * torch.sigmoid(tau * (t.ratio() - 1.0)))


def _needs_eps_high(config: Loss) -> None:
    if config.eps_high <= 0:
        raise ConfigError(f"learner.loss.eps_high is {config.eps_high} and kind spo divides by it: give a width > 0")


@register_loss("spo", check=_needs_eps_high)
def spo(t: Terms) -> PerToken:
    """Ell = -(A r - |A| / (2 eh) (r - 1)^2), slope -(A - |A| / eh (r - 1)) r (Simple Policy Optimization, arXiv 2401.16025)."""
    excess = t.ratio() - 1.0
    return PerToken(-(t.adv * (excess + 1.0) - t.adv.abs() / (2.0 * t.config.eps_high) * excess**2))
