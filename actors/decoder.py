"""A short forward for the Llama family: the same weights and the same numbers as the Hugging Face modules, in a third of the operations.

At a few million parameters a step is mostly the cost of launching small operations. So the projections that read the same input are one product (their
weights are laid side by side once, and the model's own parameters become views of that), rotary tables are looked up, residuals are added inside the
product, and one new token per row attends by two batched products over the cache in place. ``B`` rows, ``N`` new tokens each, ``T = B·N``, ``D`` head size,
``W`` visible columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from .kv_cache import RowCache

FAMILY = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
"""Decoders with pre-norm, rotary positions, gated feed-forward and nothing else."""

FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary kinds whose angles depend on the position alone."""


@dataclass(slots=True)
class _Layer:
    """Weights of one layer, most of them shared with the model's modules."""

    attention_norm: Any
    feed_norm: Any
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    heads: tuple[Any, Any] | None
    output: Any
    gate_up: torch.Tensor
    act: Any
    down: Any
    head_scale: torch.Tensor | None = None


class Decoder:
    """The forward of one model. Build it with :meth:`of`; call :meth:`refresh` after the weights changed."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._model = model
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._layers = [self._layer(layer) for layer in model.model.layers]
        first = model.model.layers[0].self_attn
        self._size: int = first.head_dim
        self._scaling: float = first.scaling
        self._table = torch.empty(0)
        self.refresh()

    @classmethod
    def of(cls, model: Any) -> Decoder | None:
        """The short forward of ``model``, or None where it has parts that this forward does not know."""
        config = model.config
        rotary: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        plain = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        if type(model).__name__ not in FAMILY or not plain or rotary.get("rope_type", "default") not in FIXED_ROTARY:
            return None
        return cls(model)

    def refresh(self) -> None:
        """Takes up what is derived from the weights and not shared with them."""
        for layer in self._layers:
            if layer.heads is not None:
                query, key = (module.weight for module in layer.heads)
                layer.head_scale = torch.cat([query.expand(self._num_heads, -1), key.expand(self._num_kv_heads, -1)]).contiguous()

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: RowCache) -> torch.Tensor:
        """Logits ``[B, V]`` of the last token of each row. ``token_ids`` and ``positions`` ``[B, N] int64``, ``mask`` ``[B, 1, N, W]`` additive."""
        num_rows, num_new = token_ids.shape
        core = self._model.model
        hidden = F.embedding(token_ids.view(-1), core.embed_tokens.weight)
        cos, sin = self._rotary(positions.view(-1), cache.capacity)
        narrow: torch.Tensor | None = None
        if hidden.device.type == "cpu" and hidden.dtype == torch.float32:
            last = mask[:, :, -1:]
            narrow = last.expand(num_rows, self._num_kv_heads, 1, last.shape[3]).reshape(-1, 1, last.shape[3])
        for index, layer in enumerate(self._layers):
            query, keys, values = self._project(layer, hidden, cos, sin, num_rows, cache, index)
            if num_new > 1 and index == len(self._layers) - 1:
                # Only the last token's logits are asked for: nothing reads what the others would compute from here on.
                query, mask, num_new = query[:, -1:], mask[:, :, -1:], 1
                hidden = hidden.view(num_rows, -1, hidden.shape[1])[:, -1]
            attended = self._attend(query, keys, values, mask, narrow if num_new == 1 else None)
            hidden = _add_linear(hidden, attended.reshape(num_rows * num_new, -1), layer.output)
            gate, up = F.linear(_norm(hidden, layer.feed_norm), layer.gate_up).chunk(2, dim=1)
            hidden = _add_linear(hidden, layer.act(gate).mul_(up), layer.down)
        return F.linear(_norm(hidden, core.norm), self._model.lm_head.weight)

    def _project(
        self, layer: _Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_rows: int, cache: RowCache, index: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[B, N, heads, D]`` of the new tokens; keys and values ``[B, kv heads, W, D]`` of everything visible."""
        heads, size = self._num_heads + self._num_kv_heads, self._size
        qkv = F.linear(_norm(hidden, layer.attention_norm), layer.qkv, layer.qkv_bias).view(hidden.shape[0], -1, size)
        turned = qkv[:, :heads]
        if layer.heads is not None and layer.head_scale is not None:
            turned = F.rms_norm(turned, (size,), None, layer.heads[0].variance_epsilon).mul_(layer.head_scale)
        halves = turned.unflatten(2, (2, size // 2)).flip(2).flatten(2)
        turned = torch.addcmul(turned * cos, halves, sin)
        new_keys = turned[:, self._num_heads :].view(num_rows, -1, self._num_kv_heads, size).transpose(1, 2)
        new_values = qkv[:, heads:].view(num_rows, -1, self._num_kv_heads, size).transpose(1, 2)
        keys, values = cache.update(new_keys, new_values, index)
        return turned[:, : self._num_heads].view(num_rows, -1, self._num_heads, size), keys, values

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, narrow: torch.Tensor | None) -> torch.Tensor:
        """Attention of the new tokens, ``[B, N, heads, D]``; the heads that share a key-value head are further queries of it."""
        num_rows, num_new, num_heads, size = query.shape
        groups = num_heads // self._num_kv_heads
        if narrow is not None:
            folded = query.reshape(-1, groups, size)
            weights = torch.baddbmm(narrow, folded, keys.flatten(0, 1).transpose(1, 2), alpha=self._scaling).softmax(dim=-1)
            return torch.bmm(weights, values.flatten(0, 1))
        folded = query.view(num_rows, num_new, self._num_kv_heads, groups, size).permute(0, 2, 3, 1, 4).reshape(num_rows, self._num_kv_heads, -1, size)
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask.repeat(1, 1, groups, 1), scale=self._scaling)
        return output.view(num_rows, num_heads, num_new, size).transpose(1, 2)

    def _rotary(self, positions: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of the new tokens, both ``[T, 1, D]``; the sign makes a rotation of swapped halves."""
        if self._table.shape[0] < capacity:
            weight = self._model.model.embed_tokens.weight
            rotary: Any = self._model.model.rotary_emb
            cos, sin = rotary(weight, torch.arange(capacity, device=weight.device)[None])
            sin = torch.cat([-sin[0, :, : self._size // 2], sin[0, :, self._size // 2 :]], dim=-1)
            self._table = torch.stack([cos[0], sin], dim=1)
        found = self._table.index_select(0, positions)
        return found[:, :1], found[:, 1:]

    def _layer(self, layer: Any) -> _Layer:
        attention, feed = layer.self_attn, layer.mlp
        qkv, bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up, gate_up_bias = _fuse(feed.gate_proj, feed.up_proj)
        if gate_up_bias is not None:
            raise ValueError("a gated feed-forward with biases is not known here")
        norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        return _Layer(layer.input_layernorm, layer.post_attention_layernorm, qkv, bias, norms, attention.o_proj, gate_up, feed.act_fn, feed.down_proj)


def _fuse(*parts: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Lays weights (and biases) of projections of one input side by side; the modules' parameters become views of the result."""
    fused: list[torch.Tensor | None] = []
    for kind in ("weight", "bias"):
        parameters = [getattr(part, kind) for part in parts]
        if any(parameter is None for parameter in parameters):
            fused.append(None)
            continue
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, view in zip(parameters, whole.split([parameter.shape[0] for parameter in parameters]), strict=True):
            parameter.data = view
        fused.append(whole)
    weight, bias = fused
    assert weight is not None
    return weight, bias


def _norm(hidden: torch.Tensor, norm: Any) -> torch.Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), norm.weight, norm.variance_epsilon)


def _add_linear(residual: torch.Tensor, hidden: torch.Tensor, linear: Any) -> torch.Tensor:
    added = torch.addmm(residual, hidden, linear.weight.t())
    return added if linear.bias is None else added.add_(linear.bias)
