"""The policy sharded over ranks with PyTorch's FSDP2 (``fully_shard``).

Every decoder layer is a unit of its own: its weights are gathered when it computes and its gradients are summed over ranks and cut again. What is left
(embedding, last norm, output matrix) is the unit of the whole :class:`.policy.Scorer`, gathered once per forward, so that tied matrices stay one.
Gradients are summed and not averaged: each token's weight comes from counts over the whole batch, so the ranks' shares of the loss add up to it.
Under bfloat16 the layers are gathered in bfloat16 and their gradients summed in float32; what a rank keeps is float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .. import models
from ..configs.learner_schema import FsdpPolicy
from .policy import Policy
from .ranks import Ranks
from .value import ValueHead

if TYPE_CHECKING:
    from ..models import PreTrainedModel


class ShardedPolicy(Policy):
    """``model``, whole and alike on every rank, sharded over ``ranks`` on their ``device``. From then on each holds its share of every parameter.

    Raises :class:`ConfigError` where the model cannot be packed, or its activations cannot be checkpointed.
    """

    def __init__(self, model: PreTrainedModel, settings: FsdpPolicy, ranks: Ranks, device: str = "cpu", value_head: ValueHead | None = None) -> None:
        super().__init__(model, settings, value_head)
        self.ranks, self.sharded, self._settings = ranks, True, settings
        self.device = torch.device(device)
        mesh = init_device_mesh(self.device.type, (ranks.num,))
        reduced = settings.compute_dtype == "bfloat16"
        layers = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if reduced else MixedPrecisionPolicy(cast_forward_inputs=False)
        for layer in models.checkpointable_layers(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, mp_policy=layers)
        fully_shard(self.scorer, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        self._units = [module for module in self.scorer.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self._root = self._units[0]
        self._root.set_reduce_scatter_unused_params(True)  # an expert that no token of a rank chose

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:  # noqa: D102 - as Policy
        self._root.set_requires_gradient_sync(last or self._settings.reduce == "micro_batch")
        self._root.set_is_last_backward(last)
        if not self._settings.reshard_after_forward:
            self._root.set_reshard_after_backward(last)
        loss.backward()

    def settle(self) -> None:  # noqa: D102 - as Policy
        for unit in self._units:
            unit.reshard()
