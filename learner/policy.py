"""The policy that learns: token log-probabilities of packed micro-batches from a Hugging Face causal language model.

The model's body gives hidden states ``[Q, H]``; only those that score an active token meet the output matrix, in chunks and in float32, so that nothing
of size ``Q × V`` exists. Before it is used, each model shows on two short segments that packing keeps them apart and that its logits are what hidden
states and output matrix give; models that do more to their logits (soft-capping, scaling) are scored through their own forward instead, which does hold
``Q × V``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..configs.learner_schema import Learner, PolicySettings
from ..errors import ConfigError
from .attention import install, layout_of
from .collate import MicroBatch
from .compute import ComputeDtype, autocast, checkpoint_activations, keep_float32, warn_of_slow_bfloat16
from .logprobs import token_logprobs
from .ranks import Ranks
from .value import ValueHead

if TYPE_CHECKING:
    from ..models import PreTrainedModel

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-3
"""Of the start-up probe, relative to the largest value: far above float32 noise, far below what another token's influence leaves."""
_REDUCED_TOLERANCE = 0.05
"""The same where layers compute in bfloat16."""


class Scores(NamedTuple):
    """Of one micro-batch: log-probability of each target and entropy of what it was drawn from, ``[N] float32``.

    From a policy with a value head also ``values [N]`` of the states the targets were drawn in, and ``after [K]`` of those behind ``MicroBatch.after``.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor | None = None
    after: torch.Tensor | None = None


class Policy:
    """A causal language model that scores packed micro-batches, computing as ``settings`` say (:mod:`rollstream.learner.compute`).

    With ``value_head`` it says what states are worth, too. Raises :class:`ConfigError` where the model cannot be packed, or its activations cannot be
    checkpointed.
    """

    sharded = False

    def __init__(
        self,
        model: PreTrainedModel,
        settings: PolicySettings = PolicySettings(),  # noqa: B008 - frozen
        value_head: ValueHead | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model: Any = model
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        """How many token ids it knows."""
        self.value_head = value_head
        self.ranks = ranks or Ranks()
        """Those that hold it together."""
        model.eval()  # no dropout: the ratio on fresh data has to be 1
        model.config.use_cache = False
        install(model)
        reduced = settings.compute_dtype == "bfloat16"
        if reduced and (head := self.model.get_output_embeddings()) is not None:
            keep_float32(head)
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        self.scorer = Scorer(model, value_head, settings.compute_dtype).eval()
        self.device = self._settle_in()
        warn_of_slow_bfloat16(self.device, settings.compute_dtype)
        with torch.no_grad():
            self.full_logits = not self.scorer.probe(self.device, reduced=reduced and self.sharded)
        self.settle()
        self.scorer.full_logits = self.full_logits
        if self.full_logits:
            logger.warning(
                "full_logits=true model=%s reason=%s",
                type(model).__name__,
                "its logits are not hidden states times output matrix; memory grows with the vocabulary",
            )

    def _settle_in(self) -> torch.device:
        """Brings the scorer to where it computes, and says where that is."""
        return next(self.model.parameters()).device

    def score(self, batch: MicroBatch, temperature: float, *, values_alone: bool = False) -> Scores:
        """Everything there is to say about ``batch`` at ``temperature``, with gradients; with ``values_alone`` nothing but the value head has any."""
        return self.scorer(batch, temperature, values_alone=values_alone)

    def logprobs(self, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``(x, entropy)``, each ``[N] float32`` with gradient: log-probability of each target at ``temperature``, and entropy of what it was drawn from."""
        return self.score(batch, temperature)[:2]

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Adds the gradient of ``loss`` to the parameters. ``last``: the next thing that happens to them is the optimiser's step."""
        loss.backward()

    def settle(self) -> None:
        """The parameters are about to change, or to leave: whatever was computed from them for a forward pass is forgotten."""


class Scorer(torch.nn.Module):
    """Model, output matrix and value head as one module: whoever shards it gathers all of them for the same forward pass."""

    def __init__(self, model: PreTrainedModel, value_head: ValueHead | None, dtype: ComputeDtype) -> None:
        super().__init__()
        self.model: Any = model
        self.value_head = value_head
        self.full_logits = False
        """Whether log-probabilities come from the model's own logits."""
        self._dtype: ComputeDtype = dtype

    def forward(self, batch: MicroBatch, temperature: float, *, values_alone: bool = False) -> Scores:
        """As :meth:`Policy.score`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not values_alone):
            x, entropy, hidden = self._score(batch, temperature)
        if self.value_head is None:
            return Scores(x, entropy)
        values, after = (self.value_head(hidden.index_select(0, place)).clone() for place in (batch.source, batch.after))  # no view leaves: see below
        return Scores(x, entropy, values, after)

    def _score(self, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x [N]``, ``entropy [N]`` and the body's hidden states ``[Q, H]``."""
        inputs = _inputs(batch)
        device = batch.source.device
        if self.full_logits:
            with autocast(device, self._dtype):
                hidden, logits = self._both(inputs)
            logits = logits.index_select(0, batch.source).float() / temperature
            every = torch.log_softmax(logits, dim=-1)
            x = every.gather(1, batch.targets[:, None])[:, 0].clone()  # who shards this module hooks what leaves it, and a view may lose the hook
            return x, -(every.exp() * every).sum(-1), hidden
        with autocast(device, self._dtype):
            hidden = self.model.base_model(**inputs).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        scored = hidden.index_select(0, batch.source)
        x, entropy = token_logprobs(scored, head.weight, batch.targets, temperature, want_entropy=True, bias=getattr(head, "bias", None))
        assert entropy is not None
        return x, entropy, hidden

    def _both(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The body's hidden states ``[Q, H]`` and the model's own logits ``[Q, V]``, of one forward."""
        seen: list[torch.Tensor] = []

        def see(_module: Any, _arguments: Any, output: Any) -> None:
            seen.append(output.last_hidden_state[0])

        hook = self.model.base_model.register_forward_hook(see)
        try:
            logits = self.model(**inputs).logits[0]
        finally:
            hook.remove()
        return seen[0], logits

    def probe(self, device: torch.device, *, reduced: bool) -> bool:
        """Whether logits are hidden states times output matrix. ``reduced``: the weights of the layers are at hand in bfloat16 alone.

        Raises :class:`ConfigError` where a segment changes with what is packed before it.
        """
        vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        first, second = 7, 5
        ids = torch.arange(first + second, device=device) * 7919 % vocabulary
        other = torch.cat([(ids[:first] + 1) % vocabulary, ids[first:]])

        def inputs(ids: torch.Tensor, lengths: list[int]) -> dict[str, Any]:
            positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
            return {"input_ids": ids[None], "position_ids": positions, "packed_layout": layout_of(np.array(lengths, np.int64), device), "use_cache": False}

        name = type(self.model).__name__
        try:
            with autocast(device, "bfloat16" if reduced else "float32"):
                hidden, logits = self._both(inputs(ids, [first, second]))
                others = [self.model.base_model(**inputs(other, [first, second])).last_hidden_state[0, first:]]
                if not reduced:  # rows of another shape round in another way
                    others.append(self.model.base_model(**inputs(ids[first:], [second])).last_hidden_state[0])
        except TypeError as error:
            raise ConfigError(f"{name} cannot be packed ({error}): use a decoder whose attention takes keyword arguments") from error
        apart, bound = max(_relative(hidden[first:].float(), one.float()) for one in others), _REDUCED_TOLERANCE if reduced else _TOLERANCE
        if not apart < bound:
            raise ConfigError(f"{name} mixes packed segments (hidden states off by {apart:.2g}, bound {bound:g}): it cannot be trained packed")
        head = self.model.get_output_embeddings()
        if head is None or head.weight.shape[1] != hidden.shape[1]:
            return False
        direct = torch.nn.functional.linear(hidden.float(), head.weight.float(), getattr(head, "bias", None))
        return _relative(direct, logits.float()) < _TOLERANCE


def head_of(model: PreTrainedModel, learner: Learner, device: torch.device | str | None = None) -> ValueHead | None:
    """The value head that ``learner`` asks for, beside ``model``, or on ``device``."""
    place = next(model.parameters()).device if device is None else device
    return None if learner.value is None else ValueHead(model.config.get_text_config().hidden_size, place)


def _inputs(batch: MicroBatch) -> dict[str, Any]:
    """One calling convention: our attention reads the layout, variable-length kernels read the cumulative lengths."""
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "packed_layout": batch.layout,
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_length,
        "max_length_k": batch.max_length,
        "use_cache": False,
    }


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-9))
