"""Drawing tokens from logits: temperature, top-k, top-p, inverse CDF.

``B`` rows, ``V`` vocabulary. Everything is exact about one thing: the log-probability returned is that of the distribution the token was drawn from, after
temperature and after renormalising over the kept set.
"""

from __future__ import annotations

import torch


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row.

    ``logits`` ``[B, V]``, ``temperature`` ``[B] float32`` (0: the most likely token, scored at temperature 1), ``top_k`` ``[B] int64`` (0: off) and ``top_p``
    ``[B] float64`` or None where no row filters, ``uniforms`` ``[B] float64`` in [0, 1). Returns token ids ``[B] int64`` and log-probabilities ``[B] float32``.
    A token of probability 0 is never drawn. Logits that are not finite give a log-probability that is not finite: the caller must look.
    """
    logits = logits.float()
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    if top_k is not None and top_p is not None:
        logprobs = torch.log_softmax(logprobs.masked_fill(~kept(logprobs, top_k, top_p), -torch.inf), dim=-1)
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    total = cumulative[:, -1]
    # The first index whose cumulative mass lies strictly above the target has positive probability; staying below the total keeps it inside the vocabulary.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def kept(logprobs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Which tokens survive: the ``top_k`` most likely, then of those, renormalised, the fewest whose mass reaches ``top_p``. ``[B, V] bool``, one at least.

    Ties go to the lower id, so that exactly ``top_k`` tokens stay.
    """
    ordered, order = logprobs.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[1], device=logprobs.device)[None, :]
    among_k = (top_k[:, None] == 0) | (rank < top_k[:, None])
    mass = ordered.exp().masked_fill(~among_k, 0.0)
    before = mass.cumsum(dim=-1) - mass
    inside = among_k & ((top_p[:, None] >= 1) | (before < top_p[:, None] * mass.sum(dim=-1, keepdim=True)) | (rank == 0))
    return torch.zeros_like(inside).scatter_(1, order, inside)
