"""How the policy computes (``learner.policy``): activations kept or computed again, float32 or bfloat16 arithmetic. What it learns stays float32.

Parameters, gradients, optimiser and log-probabilities are float32 in both dtypes. With bfloat16 the matrix products of the model's body run in bfloat16
through autocast, and the output matrix meets hidden states in float32, since log-probabilities rounded to 8 bits are no basis for importance ratios. What
is published is the float32 weights: a sampler that holds fewer bits rounds them itself.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from .. import models
from ..errors import ConfigError

logger = logging.getLogger(__name__)

ComputeDtype = Literal["float32", "bfloat16"]


def checkpoint_activations(model: Any) -> int:
    """Makes every decoder layer keep its input alone and compute the rest again in the backward pass. Returns how many layers there are.

    The layers' own switch needs training mode, which would bring dropout back; so their forward is wrapped instead.
    Raises :class:`ConfigError` where the model names no such layers.
    """
    layers = models.checkpointable_layers(model)
    if not layers:
        raise ConfigError(f"learner.policy.activation_checkpointing is set and {type(model).__name__} has no layers that can be checkpointed; switch it off")
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer.forward)
    return len(layers)


def _checkpointed(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(functools.partial(forward, **named), *arguments, use_reentrant=False, preserve_rng_state=False)


def autocast(device: torch.device, dtype: ComputeDtype) -> torch.autocast:
    """The context the model's body runs in; without effect for float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def warn_of_slow_bfloat16(device: torch.device, dtype: ComputeDtype) -> None:
    """Says so where bfloat16 costs time instead of saving it: on a CPU without AVX-512, PyTorch multiplies bfloat16 matrices in plain loops."""
    if dtype == "bfloat16" and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in {"AVX2", "DEFAULT"}:
        logger.warning("compute_dtype=bfloat16 cpu=without_avx512 remedy=%s", json.dumps("learner.policy.compute_dtype=float32 is many times faster here"))


def keep_float32(head: Any) -> None:
    """Makes an output layer that is called inside :func:`autocast` compute in float32 all the same."""
    head.forward = functools.partial(_in_float32, head.forward)


def _in_float32(forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return forward(hidden.float())
