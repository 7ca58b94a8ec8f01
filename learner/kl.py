"""Estimators of the KL divergence to a frozen reference from samples of the policy (Schulman 2020, "Approximating KL divergence").

With d = x - q (bounded): k1 = d (slope 1), k2 = d^2 / 2 (slope d), k3 = exp(-d) - 1 + d (slope 1 - exp(-d)), abs = |d| (slope sign d).

* k1 in the loss has zero expected gradient on-policy: it regularises nothing; k1 inside the reward does (:func:`.returns.kl_reward`).
* k2 in the loss has the on-policy gradient of KL(pi, ref); k3 in the loss follows KL(ref, pi), and explodes where pi << ref.
* k3 times the differentiated ratio to the behaviour policy has slope ratio * d: unbiased off-policy (``kl_is``).

Only the log ratio is bounded. Clamping the value of k3 would remove the gradient exactly where the policies disagree most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError


def kl_estimate(kind: str, log_ratio: Tensor) -> Tensor:
    """The estimate per token, ``[P]``, from ``log_ratio`` = d(x, ref).

    Raises :class:`ConfigError`: an unknown kind.
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio**2
    if kind == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    if kind == "abs":
        return log_ratio.abs()
    raise ConfigError(f"learner.loss.kl is {kind!r}, known are k1, k2, k3, abs")
