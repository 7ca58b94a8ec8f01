"""Per-token losses ell, registered by name; L = sum a w ell (algorithms, section 4).

    policy_gradient  pg                              off_policy    is, topr, dro
    ppo              ppo                             sequence      gspo, gspo_token, gmpo, dro_seq
    cispo            cispo                           trust_region  minirl, dppo_tv, dppo_kl, m2po
    soft             sapo, spo

Frozen-weight losses (pg, cispo, topr, the trust-region family) have meaningless values: only their gradients compare.
"""

from __future__ import annotations

from . import cispo, off_policy, policy_gradient, ppo, sequence, soft, trust_region
from .registry import LossEntry, PerToken, Terms, loss_named, loss_names, register_loss

__all__ = [
    "LossEntry",
    "PerToken",
    "Terms",
    "cispo",
    "loss_named",
    "loss_names",
    "off_policy",
    "policy_gradient",
    "ppo",
    "register_loss",
    "sequence",
    "soft",
    "trust_region",
]
