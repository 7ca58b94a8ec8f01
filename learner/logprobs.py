"""Log-probabilities and entropy of given tokens, without ever holding the logits of a whole batch.

Which distribution: the sampler's and the learner's must be the same function of the logits. Sampling at temperature tau divides logits by tau before the
softmax everywhere. Sampling with top-k or top-p renormalises over the kept set, so either sample without truncation or renormalise here as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = {"cpu": 64 * 2**20}
"""The most that the logits of one chunk may take, by type of device: few enough for a core's caches and for memory, many enough for a good matrix product."""
_ELSEWHERE_BYTES = 512 * 2**20
"""The same on accelerators, which need larger products."""
_MAX_CHUNK = 1024
_IMPOSSIBLE = -1e30
"""Stands in for a logit of -inf wherever it meets its probability, which is 0: 0 times -inf is NaN."""


class TokenLogprobs(NamedTuple):
    """``logprobs [P]``; ``entropy [P]`` in nats, or None where it was not asked for. float32, or float64 for float64 inputs."""

    logprobs: Tensor
    entropy: Tensor | None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    want_entropy: bool = False,
    bias: Tensor | None = None,
) -> TokenLogprobs:
    """Log softmax(hidden weight^T / temperature) at ``targets``, differentiable in ``hidden [P, H]``, ``weight [V, H]`` and ``bias [V]``.

    Works in chunks of ``chunk_tokens``, by default :func:`chunk_of`: logits ``[chunk, V]`` exist for one chunk at a time, forward and backward, and only
    the log-sum-exp ``[P]`` in two parts (and the entropy) is saved. 16-bit inputs are multiplied in float32: logits rounded to 16 bits are no basis for
    importance ratios.
    ``targets [P] int64``.
    With z = logits / temperature and p = softmax z: d logp / dz = onehot - p and dH / dz = -p (log p + H).

    Raises :class:`ValueError`: shapes that disagree, or a temperature or chunk that is not positive.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}: expected [P, H], [V, H], [P]")
    chunk_tokens = chunk_of(weight) if chunk_tokens is None else chunk_tokens
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"temperature {temperature} and chunk_tokens {chunk_tokens} must be positive")
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, chunk_tokens, want_entropy)
    return TokenLogprobs(logprobs, entropy)


def chunk_of(weight: Tensor) -> int:
    """Tokens per chunk for the output matrix ``weight [V, H]``: up to 1024, fewer where their float32 logits would take more than :data:`CHUNK_BYTES`."""
    limit = CHUNK_BYTES.get(weight.device.type, _ELSEWHERE_BYTES)
    return max(1, min(_MAX_CHUNK, limit // (4 * weight.shape[0])))


class _Saved(Protocol):
    """What autograd hands to both directions."""

    saved_tensors: tuple[Any, ...]
    settings: tuple[float, int, torch.dtype]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Saved, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int, want_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        top = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        log_norm, logprobs = torch.empty_like(top), torch.empty_like(top)
        entropy = torch.empty_like(top) if want_entropy else None
        head, offset = weight.to(dtype).t(), None if bias is None else bias.to(dtype)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part].to(dtype), head, offset, temperature)
            top[part] = logits.amax(-1)
            logits.sub_(top[part, None])  # before anything is summed: a log-probability near 0 would drown in the logits' own rounding
            scored = logits.gather(1, targets[part, None]).squeeze(1)
            exponentials = torch.exp(logits)
            total = exponentials.sum(-1)
            log_norm[part] = total.log()
            logprobs[part] = scored - log_norm[part]
            if entropy is not None:  # H = log sum e^z - sum p z with z <= 0: only positive terms
                entropy[part] = log_norm[part] - exponentials.mul_(logits.clamp_(min=_IMPOSSIBLE)).sum(-1) / total
        ctx.save_for_backward(hidden, weight, bias, targets, top, log_norm, entropy)
        ctx.settings = (temperature, chunk, dtype)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: _Saved, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, top, log_norm, entropy = ctx.saved_tensors
        temperature, chunk, dtype = ctx.settings
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        nothing = (None, None, None, None)
        if grad_logprobs is None and grad_entropy is None:
            return (None, None, None, *nothing)
        head, offset = weight.to(dtype).t(), None if bias is None else bias.to(dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if wants_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=dtype, device=weight.device) if wants_bias else None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            rows = hidden[part].to(dtype)
            logp = _logits(rows, head, offset, temperature).sub_(top[part, None]).sub_(log_norm[part, None])
            grad = _grad_logits(logp, targets[part], _part(grad_logprobs, part), _part(grad_entropy, part), _part(entropy, part)).div_(temperature)
            rows = _without_spoilt(rows, grad, log_norm[part], _part(grad_logprobs, part), _part(grad_entropy, part))
            if grad_hidden is not None:
                grad_hidden[part] = (grad @ head.t()).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), rows)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        cast_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        cast_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return (grad_hidden, cast_weight, cast_bias, *nothing)


def _without_spoilt(rows: Tensor, grad: Tensor, log_norm: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """``rows [chunk, H]`` with zeros, and ``grad [chunk, V]`` too, where logits were not finite and nothing asks for a gradient: 0 times NaN is NaN."""
    spoilt = ~torch.isfinite(log_norm)
    if not spoilt.any():
        return rows
    for asked in (grad_logprobs, grad_entropy):
        if asked is not None:
            spoilt = spoilt & (asked == 0)
    grad.masked_fill_(spoilt[:, None], 0.0)
    return rows.masked_fill(spoilt[:, None], 0.0)


def _part(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _logits(rows: Tensor, head: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Tempered logits of one chunk, ``[chunk, V]``, a tensor of their own."""
    logits = rows @ head if bias is None else torch.addmm(bias, rows, head)
    return logits.div_(temperature) if temperature != 1.0 else logits


def _grad_logits(logp: Tensor, targets: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor | None) -> Tensor:
    """Gradient with respect to tempered logits; overwrites ``logp``."""
    if grad_entropy is None or entropy is None:
        assert grad_logprobs is not None
        grad = logp.exp_().mul_(-grad_logprobs[:, None])
    else:
        probabilities = torch.exp(logp.clamp_(min=_IMPOSSIBLE))
        pull = (logp + entropy[:, None]).mul_(grad_entropy[:, None])
        if grad_logprobs is not None:
            pull += grad_logprobs[:, None]
        grad = probabilities.mul_(pull).neg_()
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None].to(grad.dtype))
    return grad


def distribution_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropy by the token scored, ``logits [T, V]`` and ``tokens [T]`` of one sequence; both ``[T]``, 0 at position 0.

    Logits at t - 1 score token t. ``top_k`` and ``top_p`` renormalise over the kept set (a token outside it gets -inf): top-k first, then top-p on what it
    left, which drops tokens whose preceding cumulative mass is >= ``top_p``; tokens tied with the k-th stay. The entropy is that of the whole tempered
    distribution. For references and tests: it holds all logits.
    """
    tempered = logits[:-1] / temperature
    full = torch.log_softmax(tempered, dim=-1)
    entropy = -torch.where(torch.isneginf(full), 0.0, full.exp() * full).sum(-1)
    kept = torch.log_softmax(truncate_logits(tempered, top_k, top_p), dim=-1)
    logprobs = kept.gather(1, tokens[1:, None]).squeeze(1)
    first = logits.new_zeros(min(1, len(tokens)))
    return torch.cat([first, logprobs]), torch.cat([first, entropy])


def truncate_logits(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """The logits ``[N, V]`` with everything outside the kept set -inf; ``top_k`` None or 0 and ``top_p`` None or 1 keep all."""
    if top_k:
        kth = torch.topk(logits, min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None and top_p < 1.0:
        ordered, index = torch.sort(logits, dim=-1, descending=True, stable=True)
        probabilities = torch.softmax(ordered, dim=-1)
        preceding = torch.cumsum(probabilities, dim=-1).roll(1, dims=-1)
        preceding[:, 0] = 0.0
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, preceding >= top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits
