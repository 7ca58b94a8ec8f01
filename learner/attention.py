"""Attention over packed rows: every segment sees itself only, at the cost of its own length squared.

A micro-batch is one row ``[1, P]`` of segments laid end to end. Masking them apart inside one ``P × P`` attention costs ``P²``; so queries, keys and
values are laid out, for the attention alone, as rectangles of segments of similar length, padded at the end. Causality then hides the padding: no token
of a segment can see what comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..models import PreTrainedModel

NAME = "rollstream_packed"
_SHRINK = 0.8
"""A rectangle ends where the next segment is shorter than this share of its width: at most a fifth of its area is padding."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How ``P`` packed tokens lie in rectangles of ``S`` cells.

    ``gather`` ``[S] int64`` names the packed token of each cell (padding repeats its segment's first), ``inverse`` ``[P] int64`` the cell of each packed token,
    ``rectangles`` their (rows, width), one after the other.
    """

    gather: torch.Tensor
    inverse: torch.Tensor
    rectangles: tuple[tuple[int, int], ...]


def layout_of(lengths: npt.NDArray[np.int64], device: torch.device | str = "cpu") -> Layout:
    """The rectangles for segments of ``lengths`` ``[num_rows]``, which lie end to end in that order."""
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    gathers: list[npt.NDArray[np.int64]] = []
    inverse = np.empty(int(lengths.sum()), dtype=np.int64)
    rectangles: list[tuple[int, int]] = []
    first, cells = 0, 0
    while first < len(order):
        width = int(lengths[order[first]])
        last = first + int(np.searchsorted(-lengths[order[first:]], -_SHRINK * width, side="right"))
        rows = order[first:last]
        column = np.arange(width)[None, :]
        real = column < lengths[rows, None]
        gather = (starts[rows, None] + np.where(real, column, 0)).ravel()
        inverse[gather[real.ravel()]] = cells + np.flatnonzero(real)
        gathers.append(gather)
        rectangles.append((len(rows), width))
        cells += gather.size
        first = last
    return Layout(torch.from_numpy(np.concatenate(gathers)).to(device), torch.from_numpy(inverse).to(device), tuple(rectangles))


class _Spread(torch.autograd.Function):
    """Packed ``[P, …]`` to cells ``[S, …]``. Backward reads the real cells only: padding gets no gradient, since nothing reads its output."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, gather: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return packed.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


class _Collect(torch.autograd.Function):
    """Cells ``[S, …]`` back to packed ``[P, …]``."""

    @staticmethod
    def forward(ctx: Any, cells: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_cells = cells.shape[0]
        return cells.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (inverse,) = ctx.saved_tensors
        spread = gradients[0].new_zeros((ctx.num_cells, *gradients[0].shape[1:]))
        return spread.index_copy_(0, inverse, gradients[0]), None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: Layout | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each segment; the signature transformers calls. ``query`` ``[1, heads, P, D]`` → ``[1, P, heads, D]``.

    Without a layout the row is one segment. ``sliding_window`` limits how far back a token sees, itself included.

    Raises :class:`ConfigError` for attention that is more than this (soft-capped, with sinks, with a position bias).
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if extras.get(name) is not None:
            raise ConfigError(f"attention with {name} is not supported by the packed learner: use a model without it")
    num_tokens = query.shape[2]
    rectangles = packed_layout.rectangles if packed_layout is not None else ((1, num_tokens),)
    trivial = packed_layout is None or len(rectangles) == rectangles[0][0] == 1
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if not trivial and packed_layout is not None:
        flat = [_Spread.apply(tensor, packed_layout.gather, packed_layout.inverse) for tensor in flat]
    parts: list[torch.Tensor] = []
    begin = 0
    for num_rows, width in rectangles:
        q, k, v = (tensor[begin : begin + num_rows * width].unflatten(0, (num_rows, width)).transpose(1, 2) for tensor in flat)
        mask = None
        if sliding_window is not None and width > sliding_window:
            distance = torch.arange(width, device=q.device)[:, None] - torch.arange(width, device=q.device)[None, :]
            mask = (distance >= 0) & (distance < sliding_window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        parts.append(out.transpose(1, 2).flatten(0, 1))
        begin += num_rows * width
    cells = torch.cat(parts) if len(parts) > 1 else parts[0]
    if not trivial and packed_layout is not None:
        cells = _Collect.apply(cells, packed_layout.inverse)
    return cells[None], None


def install(model: PreTrainedModel) -> None:
    """Makes ``model`` (a Hugging Face causal language model) attend with :func:`packed_attention`, and build no mask for it.

    Raises :class:`ConfigError` where its attention cannot be replaced.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, NotImplementedError, ImportError) as error:
        raise ConfigError(f"{type(model).__name__} does not let its attention be replaced ({error}): the learner packs segments and needs to") from error


def _no_mask(*arguments: Any, **extras: Any) -> None:
    return None
