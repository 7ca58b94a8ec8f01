"""Sums over the tokens of a row or a trajectory, for tokens that lie flat and in any order."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Segments:
    """``P`` tokens in ``num`` units; ``ids [P] int64`` names each token's unit, ``mask [P] bool`` which tokens count.

    Values at masked positions are never read. A padded ``[B, T]`` batch is ``ids = arange(B).repeat_interleave(T)``; a packed one has no padding.
    """

    def __init__(self, ids: Tensor, num: int, mask: Tensor) -> None:
        self.ids = ids
        self.num = num
        self.mask = mask

    @cached_property
    def counts(self) -> Tensor:
        """Active tokens per unit, ``[num] float64``."""
        return self.sum(torch.ones(self.ids.shape, dtype=torch.float64, device=self.ids.device))

    @property
    def non_empty(self) -> Tensor:
        """Units with at least one active token, ``[num] bool``."""
        return self.counts > 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum per unit, ``[num]``; differentiable."""
        zero = torch.zeros(self.num, dtype=values.dtype, device=values.device)
        return zero.index_add(0, self.ids, torch.where(self.mask, values, torch.zeros_like(values)))

    def mean(self, values: Tensor) -> Tensor:
        """Mean over active tokens per unit, ``[num]``; 0 for an empty one; differentiable."""
        return self.sum(values) / self.counts.clamp(min=1.0)

    def extreme(self, values: Tensor, which: str) -> Tensor:
        """Smallest (``amin``) or largest (``amax``) active value per unit, ``[num]``; 0 for an empty one. Not differentiable."""
        fill = float("inf") if which == "amin" else float("-inf")
        start = torch.full((self.num,), fill, dtype=values.dtype, device=values.device)
        found = start.scatter_reduce(0, self.ids, torch.where(self.mask, values, torch.full_like(values, fill)), which)
        return torch.where(self.non_empty, found, torch.zeros_like(found))

    def spread(self, per_unit: Tensor) -> Tensor:
        """Gives every token its unit's value, ``[P]``."""
        return per_unit[self.ids]
