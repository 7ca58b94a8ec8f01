"""The value head (``learner.value``): what the policy's body says a state is worth, and the loss it learns by.

V of the state a token was drawn in is read from the hidden state that scores that token, so packing, filters and the shift by one are those of the
log-probabilities. The head starts at zero: values are 0 and returns are Monte Carlo until it has learnt something. It is no part of the model, so neither
what is published nor the Hugging Face folder of a checkpoint holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .tokens import Tokens


class ValueHead(torch.nn.Module):
    """One linear map from hidden states ``[…, H]`` to values ``[…]``, in the head's own dtype (float32) whatever the body computed in."""

    def __init__(self, hidden_size: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """V, differentiable in ``hidden`` too."""
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)[..., 0]


@dataclass(frozen=True, slots=True)
class ValueStats:
    """Sums over the tokens of micro-batches: the loss, tokens whose gradient was cut, tokens. They add up."""

    loss: Tensor
    clipped: Tensor
    tokens: int

    def __add__(self, other: ValueStats) -> ValueStats:
        return ValueStats(self.loss + other.loss, self.clipped + other.clipped, self.tokens + other.tokens)


def value_loss(values: Tensor, tokens: Tokens, clip: float | None) -> tuple[Tensor, ValueStats]:
    """``sum a ell`` over the tokens of a micro-batch, a float64 scalar, from live ``values [P]`` with gradient.

        ell = max((V - G)^2, (clip(V, V_0 - c, V_0 + c) - G)^2) / 2

    G are ``tokens.targets``, V_0 ``tokens.values`` and c is ``clip`` (none: the first term alone). This is PPO's clip turned on the values (arXiv 2006.05990,
    appendix B.1): a value that moved by more than c towards its target gets no further gradient in this batch; one that moved away from it keeps one.
    """
    assert tokens.targets is not None
    assert tokens.values is not None
    live = torch.where(tokens.mask, values.to(torch.float64), 0.0)
    target, before = (torch.where(tokens.mask, given.to(torch.float64), 0.0) for given in (tokens.targets, tokens.values))
    ell = 0.5 * (live - target) ** 2
    cut = torch.zeros_like(tokens.mask)
    if clip is not None:
        bounded = 0.5 * (torch.minimum(torch.maximum(live.detach(), before - clip), before + clip) - target) ** 2
        cut = tokens.mask & (bounded > ell.detach())
        ell = torch.where(cut, bounded, ell)
    loss = (torch.where(tokens.mask, tokens.agg.to(torch.float64), 0.0) * ell).sum()
    return loss, ValueStats(loss.detach(), cut.sum(), int(tokens.mask.sum()))
