"""AdamW with the schedule of the run, and the norm that decides whether a step is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..configs.learner_schema import Learner
from ..configs.learner_schema import Optimizer as OptimizerConfig

if TYPE_CHECKING:
    from .policy import Policy


def learning_rate(config: OptimizerConfig, version: int, versions: int) -> float:
    """Rate of the step that makes ``version`` (1 … ``versions``): linear warm-up to the full one, then constant, or falling to 0 after the last version."""
    if version <= config.warmup_versions:
        return config.learning_rate * version / config.warmup_versions
    share = (version - 1 - config.warmup_versions) / max(versions - config.warmup_versions, 1)
    share = min(max(share, 0.0), 1.0)
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - share)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))
    return config.learning_rate


def adamw(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    embeddings: Sequence[torch.nn.Parameter],
    *,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) in one fused kernel per group. Matrices decay; norms, biases and ``embeddings`` do not."""
    kept = {id(parameter) for parameter in embeddings}
    decaying: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for _, parameter in named_parameters:
        if parameter.requires_grad:
            (decaying if parameter.ndim >= 2 and id(parameter) not in kept else others).append(parameter)
    groups = [{"params": group, "weight_decay": decay} for group, decay in ((decaying, weight_decay), (others, 0.0)) if group]
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)


def optimizer_of(policy: Policy, learner: Learner) -> torch.optim.AdamW:
    """The optimiser of ``policy`` under ``learner.optimizer``, and of its value head under ``learner.value``."""
    settings = learner.optimizer
    layers: list[Any] = [policy.model.get_input_embeddings(), policy.model.get_output_embeddings()]
    embeddings = [layer.weight for layer in layers if layer is not None]
    named: Iterable[tuple[str, torch.nn.Parameter]] = policy.model.named_parameters()
    optimizer = adamw(named, embeddings, rate=settings.learning_rate, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
    if policy.value_head is not None and learner.value is not None:
        add_value_head(optimizer, policy.value_head, learner.value.learning_rate / settings.learning_rate)
    return optimizer


def add_value_head(optimizer: torch.optim.Optimizer, head: torch.nn.Module, share: float) -> None:
    """Adds the parameters of a value head as a group of their own, without decay, whose rate is always ``share`` times that of the policy."""
    optimizer.add_param_group({"params": list(head.parameters()), "weight_decay": 0.0, "share": share})


def parameters_of(optimizer: torch.optim.Optimizer) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The policy's parameters, and those of a value head."""
    policy: list[torch.nn.Parameter] = []
    value: list[torch.nn.Parameter] = []
    for group in optimizer.param_groups:
        (value if "share" in group else policy).extend(group["params"])
    return policy, value


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of the policy, and that of a value head with it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("share", 1.0)


def clip(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
    """Global gradient norm (L2) before clipping to ``max_norm``; where it is not finite the gradients are as they were and the step must not be taken."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # shares of gradients have a norm over all ranks
    if math.isfinite(value):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return value
