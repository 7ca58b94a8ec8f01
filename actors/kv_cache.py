"""Keys and values of many sessions, one row each, behind the cache interface of Hugging Face models.

Layout per layer: ``[R, H, C, D]`` for ``R`` rows, ``H`` key-value heads, ``C`` columns, ``D`` head size. The token at position ``p`` of a row lies in column
``p + 1``; column 0 takes the writes of padding and is never attended to by a real token. Rows and columns grow as they are needed. The model calls
:meth:`RowCache.update` once per layer; :class:`Forward`, set before each forward, says which rows take part and where the new tokens go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

COLUMN_STEP = 64
"""Columns grow in multiples of this."""


@dataclass(slots=True)
class Forward:
    """One forward of ``B`` rows with ``N`` new tokens each.

    ``rows`` and ``columns`` ``[B, N] int64`` say where each new token is written. ``select`` ``[B] int64`` names the rows that attend; None means rows
    ``0 .. B-1``, which are then read in place instead of copied. The first ``width`` columns are visible (further limited by the attention mask).
    """

    rows: torch.Tensor
    columns: torch.Tensor
    width: int
    select: torch.Tensor | None = None
    places: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    def flat(self, num_heads: int, capacity: int) -> torch.Tensor:
        """Where the new vectors go in a layer seen as ``[R * H * C, D]``: ``[B * H * N] int64``, in the order of a ``[B, H, N, D]`` tensor."""
        found = self.places.get(num_heads)
        if found is None:
            heads = torch.arange(num_heads, device=self.rows.device)[None, :, None]
            found = (((self.rows[:, None, :] * num_heads + heads) * capacity) + self.columns[:, None, :]).reshape(-1)
            self.places[num_heads] = found
        return found


class RowCache:
    """Keys and values of up to ``num_rows`` sessions. Created empty; layers are allocated when the model first writes to them.

    It offers what Hugging Face models ask of ``past_key_values`` when they are given positions and a four-dimensional mask.
    """

    is_compileable = False
    is_sliding = (False,)

    def __init__(self) -> None:
        self.num_rows = 0
        self.capacity = 0
        self.forward: Forward | None = None
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, num_rows: int, num_columns: int) -> None:
        """Makes room for ``num_rows`` rows of ``num_columns`` columns, keeping what is stored."""
        if num_rows <= self.num_rows and num_columns <= self.capacity:
            return
        if num_columns > self.capacity:
            wanted = max(num_columns, self.capacity + self.capacity // 2)
            self.capacity = -(-wanted // COLUMN_STEP) * COLUMN_STEP
        self.num_rows = max(self.num_rows, num_rows)
        for index, (keys, values) in self._layers.items():
            self._layers[index] = (self._grown(keys), self._grown(values))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new keys and values ``[B, H, N, D]`` and returns all visible ones ``[B, H, width, D]`` of the rows that take part."""
        forward = self.forward
        if forward is None:
            raise RuntimeError("a forward of this cache needs RowCache.forward to be set")
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._allocated(key_states), self._allocated(value_states))
        keys, values = self._layers[layer_idx]
        places = forward.flat(key_states.shape[1], self.capacity)
        for stored, new in ((keys, key_states), (values, value_states)):
            stored.view(-1, stored.shape[3]).index_copy_(0, places, new.reshape(-1, stored.shape[3]))
        if forward.select is None:
            num_rows = forward.rows.shape[0]
            return keys[:num_rows, :, : forward.width], values[:num_rows, :, : forward.width]
        return keys[:, :, : forward.width].index_select(0, forward.select), values[:, :, : forward.width].index_select(0, forward.select)

    def move(self, source: torch.Tensor, destination: torch.Tensor, width: int) -> None:
        """Copies rows ``source`` onto rows ``destination`` (both ``[M] int64``, read before written), the first ``width`` columns."""
        for layer in self._layers.values():
            for stored in layer:
                visible = stored[:, :, :width]
                visible.index_copy_(0, destination, visible.index_select(0, source))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows differ in length, so there is no single answer; positions are always given to the model, which then does not use this."""
        del layer_idx
        return 0

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return sum(stored.numel() * stored.element_size() for layer in self._layers.values() for stored in layer)

    def _allocated(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((self.num_rows, like.shape[1], self.capacity, like.shape[3]))

    def _grown(self, stored: torch.Tensor) -> torch.Tensor:
        grown = self._allocated(stored)
        grown[: stored.shape[0], :, : stored.shape[2]] = stored
        return grown


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention that reads shared key-value heads in place.

    The heads that share one key-value head become further queries of it: ``[B, G * H, N, D]`` is seen as ``[B, H, G * N, D]``. Repeating the keys and values
    for them instead, as is usual, copies the whole cache in every layer of every step. ``attention_mask`` ``[B, 1, N, C]`` is additive or boolean.
    """
    del module, dropout
    num_rows, num_heads, num_new, size = query.shape
    groups = num_heads // key.shape[1]
    folded = query.reshape(num_rows, key.shape[1], groups * num_new, size)
    if attention_mask is not None and num_new > 1 and groups > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    output = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return output.view(num_rows, num_heads, num_new, value.shape[3]).transpose(1, 2).contiguous(), None


def register_grouped_attention() -> str:
    """Makes :func:`grouped_attention` known to Hugging Face models and returns the name to select it by."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = "rollstream_grouped"
    AttentionInterface.register(name, grouped_attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
