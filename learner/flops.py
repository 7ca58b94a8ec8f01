"""Model FLOPs of a step, and what the device could do: the two sides of model FLOP utilisation (MFU).

After PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), which counts 6 N + 12 L H Q T per token for forward and backward: a forward pass costs

    2 · matrices · tokens  +  2 · output matrix · scored tokens  +  Σ layers, segments 2 · heads · (key width + value width) · tokens · context

and a backward pass twice that. What differs from the paper: N counts the matrix elements that a token really meets (of experts the ``top_k`` chosen ones, no
embedding lookup), the output matrix only meets the tokens that are scored, each packed segment attends within its own length (or window), and keys and
values may differ in width (latent attention). As there, causality is not discounted. Nothing is counted for work done twice: activations that are
computed again, logits that are computed again in the backward pass, padding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from ..models import PreTrainedModel

PEAKS: dict[str, tuple[float, float]] = {
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "H800": (989.0, 67.0),
    "GH200": (989.0, 67.0),
    "H200": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "B200": (2250.0, 75.0),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "A10": (125.0, 31.2),
    "V100": (15.7, 15.7),
    "RTX 4090": (165.2, 82.6),
}
"""Dense peaks in TFLOP/s, for bfloat16 and for float32 arithmetic, by a part of the device's name, the most specific first; from NVIDIA's data sheets."""
_SIDE, _REPEATS = 512, 8


@dataclass(frozen=True, slots=True)
class Cost:
    """What one forward pass costs. ``matrices`` are elements that each token meets, ``output`` those each scored token meets in addition.

    ``attention`` has one pair per layer: FLOPs per token and token of context, and the window (None: everything before).
    """

    matrices: float
    output: int
    attention: tuple[tuple[float, int | None], ...]

    def forward(self, lengths: npt.NDArray[np.int64], num_scored: int) -> float:
        """FLOPs of a forward pass over segments of ``lengths`` ``[R]``, ``num_scored`` of whose tokens are scored."""
        tokens = lengths.astype(np.float64)
        total = 2.0 * self.matrices * float(tokens.sum()) + 2.0 * self.output * num_scored
        for cost, window in self.attention:
            context = tokens if window is None else np.minimum(tokens, window)
            total += cost * float((tokens * context).sum())
        return total


def cost_of(model: PreTrainedModel) -> Cost:
    """The cost of a Hugging Face causal language model, from its parameters and its configuration."""
    whole: Any = model
    config = whole.config.get_text_config()
    head = whole.get_output_embeddings()
    skipped = {id(module.weight) for module in whole.modules() if isinstance(module, torch.nn.Embedding)}
    skipped |= {id(head.weight)} if head is not None else set()
    num_experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts")
    share = _first(config, "num_experts_per_tok", "num_experts_per_token", default=num_experts) / num_experts if num_experts else 1.0
    matrices = 0.0
    for parameter in whole.parameters():
        if id(parameter) not in skipped and parameter.ndim in (2, 3):
            matrices += parameter.numel() * (share if parameter.ndim == 3 else 1.0)
    return Cost(matrices, 0 if head is None else head.weight.numel(), _attention(config))


def peak_flops(device: torch.device, dtype: torch.dtype, configured_tflops: float | None = None) -> float:
    """FLOP/s that count as all of ``device``: what the configuration says, else the table's, else those of a short matrix product measured here."""
    if configured_tflops is not None:
        return configured_tflops * 1e12
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, (bfloat16, float32) in PEAKS.items():
            if part in name:
                return (bfloat16 if dtype == torch.bfloat16 else float32) * 1e12
    return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    """The best of a few products of square matrices, with the threads PyTorch has now."""
    a = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
    seconds: list[float] = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        product = a @ a
        product[0, 0].item()  # waits for an accelerator
        seconds.append(time.perf_counter() - began)
    return 2.0 * _SIDE**3 / min(seconds)


def _attention(config: Any) -> tuple[tuple[float, int | None], ...]:
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    key = int(_first(config, "qk_nope_head_dim") + _first(config, "qk_rope_head_dim")) or width
    value = int(_first(config, "v_head_dim")) or width
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * int(config.num_hidden_layers)
    return tuple((2.0 * heads * (key + value), int(window) if kind == "sliding_attention" and window else None) for kind in kinds)


def _first(config: Any, *names: str, default: float = 0) -> float:
    """The first of ``names`` that the configuration has."""
    return next((float(value) for name in names if (value := getattr(config, name, None))), default)
