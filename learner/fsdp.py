"""The policy sharded over ranks with PyTorch's FSDP2 (``fully_shard``).

Every decoder layer is a unit of its own: its weights are gathered when it computes and its gradients are summed over ranks and cut again. What is left
(embedding, last norm, output matrix) is the unit of the whole :class:`.policy.Scorer`, gathered once per forward, so that tied matrices stay one.
Gradients are summed and not averaged: each token's weight comes from counts over the whole batch, so the ranks' shares of the loss add up to it.
A rank never holds more: the model is built without memory, cut, and then each rank reads its share of every tensor from the files (:mod:`rollstream.models`).
Under bfloat16 the layers are gathered in bfloat16 and their gradients summed in float32; what a rank keeps is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from .. import models
from ..configs.learner_schema import FsdpPolicy
from .policy import Policy
from .ranks import Ranks
from .value import ValueHead

if TYPE_CHECKING:
    from ..models import PreTrainedModel


class ShardedPolicy(Policy):
    """``model`` sharded over ``ranks`` on their ``device``. From then on each holds its share of every parameter.

    Either ``model`` is whole and alike on every rank, or its parameters lie on the meta device and ``fill`` gives each rank its share of them, once it is cut.

    Raises :class:`ConfigError` where the model cannot be packed, or its activations cannot be checkpointed, and what ``fill`` raises.
    """

    sharded = True

    def __init__(
        self,
        model: PreTrainedModel,
        settings: FsdpPolicy,
        ranks: Ranks,
        device: str = "cpu",
        value_head: ValueHead | None = None,
        fill: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._place, self._fill = settings, torch.device(device), fill
        super().__init__(model, settings, value_head, ranks)

    def _settle_in(self) -> torch.device:
        mesh = init_device_mesh(self._place.type, (self.ranks.num,))
        reduced = self._settings.compute_dtype == "bfloat16"
        layers = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if reduced else MixedPrecisionPolicy(cast_forward_inputs=False)
        for layer in models.checkpointable_layers(self.model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=self._settings.reshard_after_forward, mp_policy=layers)
        fully_shard(self.scorer, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        register_fsdp_forward_method(self.scorer, "probe")
        self._units = [module for module in self.scorer.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self._root = self._units[0]
        self._root.set_reduce_scatter_unused_params(True)  # an expert that no token of a rank chose
        with self.ranks.together():
            self._fill()
        return self._place

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:  # noqa: D102 - as Policy
        self._root.set_requires_gradient_sync(last or self._settings.reduce == "micro_batch")
        self._root.set_is_last_backward(last)
        if not self._settings.reshard_after_forward:
            self._root.set_reshard_after_backward(last)
        loss.backward()

    def settle(self) -> None:  # noqa: D102 - as Policy
        for unit in self._units:
            unit.reshard()
