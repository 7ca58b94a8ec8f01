"""The bounded log ratio everything is built from."""

from __future__ import annotations

import torch
from torch import Tensor

BOUND = 20.0
"""Log ratios, and sequence sums of them, are clipped to plus or minus this before any exponential."""


def log_ratio(a: Tensor, b: Tensor) -> Tensor:
    """d(a, b) = clip(a - b, -20, 20), with gradient 0 outside (algorithms, section 2)."""
    return torch.clamp(a - b, -BOUND, BOUND)


def bounded_exp(log_sum: Tensor) -> Tensor:
    """The exponential of a sum of log ratios, clipped to plus or minus 20 again."""
    return torch.exp(torch.clamp(log_sum, -BOUND, BOUND))
