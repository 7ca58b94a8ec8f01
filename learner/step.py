"""One optimiser step, in three parts that the loop puts its fence between: prepare (no tensor touched), differentiate (no parameter changed), update.

Where several ranks hold the policy, each of these is done by all of them together. Each computes its own rows; whatever is of the whole batch (the sums that
metrics and alarms come from, terms that need every token, the gradient) is the same on all afterwards. A rank with fewer micro-batches than another computes
empty ones, and one whose data are refused goes on without them: the others wait for it in every forward and backward pass, and hear of it at the end.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from dataclasses import dataclass, replace

import msgspec
import torch

from ..buffer.types import Batch
from ..configs.schema import Config
from ..errors import ConfigError, DataRefused, describe
from .collate import Flat, MicroBatch, flatten, idle, pack
from .flops import cost_of
from .lora import AdaptersOff
from .objective import Objective, Stats, Tokens
from .optimizer import clip, learning_rate, parameters_of, set_rate
from .plan import Plan, plan
from .policy import Policy
from .ranks import failed
from .token_advantages import check_mode
from .value import ValueStats, value_loss
from .whole import joined, of_all_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A batch ready to train: everything decided that data decide. With ``values_alone`` only the value head learns from it."""

    flat: Flat
    plan: Plan
    micro_batches: list[MicroBatch]
    values_alone: bool = False


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the backward passes left behind, over all ranks.

    ``metrics`` are the objective's, with ``total`` (the loss), ``stats`` the sums they come from, ``value`` those of a value head; ``num_tokens`` is what
    the model computed, ``num_cells`` how many cells attention computed for it.
    """

    metrics: dict[str, float]
    num_tokens: int
    num_cells: int
    seconds: float
    skip: bool
    stats: Stats
    value: ValueStats | None = None


class _Found(msgspec.Struct, frozen=True):
    """A rank's part of :class:`Gradients`: ``value`` are the sums of a value head, ``error`` is empty where nothing was refused."""

    stats: bytes
    has: list[str]
    total: float
    num_tokens: int
    num_cells: int
    value: tuple[float, float, int] | None
    error: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Update:
    """What the optimiser did. ``stepped`` is False where nothing trained or the gradient was not finite. ``value_grad_norm`` is that of a value head alone."""

    stepped: bool
    grad_norm: float
    learning_rate: float
    seconds: float
    value_grad_norm: float = 0.0


class Stepper:
    """Turns batches into steps of ``optimizer`` on ``policy``; ``reference`` is the frozen policy of the KL term, where the loss has one."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, config: Config, reference: Policy | AdaptersOff | None = None) -> None:
        self.policy, self.config, self.reference = policy, config, reference
        self.optimizer = optimizer
        self._objective = Objective(config.learner.loss)
        self._cost = cost_of(policy.model)
        self.num_steps = 0
        """How often the optimiser has changed the weights."""
        self._parameters, self._value_parameters = parameters_of(optimizer)
        check_mode(config.learner)
        if config.learner.value is not None and policy.value_head is None:
            raise ConfigError("learner.value is set and this policy was built without a value head: start a new run with it")

    def prepare(self, batch: Batch) -> Work:
        """Advantages, filters, weights, micro-batches; as many of them on every rank.

        Raises :class:`DataRefused` for what must not train.
        """
        work = self.plan(batch)
        return self.even_out(work, self.policy.ranks.largest([len(work.micro_batches)])[0])

    def plan(self, batch: Batch) -> Work:
        """As :meth:`prepare`, without a word to the other ranks."""
        learner = self.config.learner
        flat = flatten(batch, self.config.buffer.max_lag, vocabulary=self.policy.vocabulary, drop=learner.loss.nonfinite == "drop")
        decided = plan(flat.rows, learner.loss, learner.advantage, self.config.buffer.degenerate)
        if decided.staleness is not None and decided.staleness.dropped_tokens:
            logger.warning("version=%d dropped_stale_tokens=%d bound=%d", batch.version, decided.staleness.dropped_tokens, self.config.buffer.max_lag)
        warming_up = learner.value is not None and batch.version <= learner.value.warmup_versions
        return replace(self.pack(flat, decided, bootstraps=self.policy.value_head is not None and learner.advantage.bootstrap), values_alone=warming_up)

    def pack(self, flat: Flat, decided: Plan, *, bootstraps: bool = False) -> Work:
        """The micro-batches of what ``decided`` trains of this rank's rows; with ``bootstraps`` also fed what a value after a cut takes."""
        return Work(flat, decided, pack(flat, decided, self.config.learner.tokens_per_micro_batch, self.policy.device, bootstraps=bootstraps))

    def even_out(self, work: Work, num: int) -> Work:
        """``work`` with ``num`` micro-batches, the most that any rank has; those beyond its own are empty."""
        missing = num - len(work.micro_batches)
        return work if missing == 0 else replace(work, micro_batches=[*work.micro_batches, *[idle(self.policy.device) for _ in range(missing)]])

    def flops(self, work: Work) -> float:
        """Model FLOPs of :meth:`differentiate`: a forward and a backward pass, the latter twice the former, and one forward for each pass beside them."""
        passes = 1 if work.values_alone else 3
        passes += self._objective.needs_proximal_pass
        passes += self.reference is not None and any(batch.tokens.ref is None for batch in work.micro_batches)
        return passes * sum(self._cost.forward(batch.lengths, len(batch.scored)) for batch in work.micro_batches)

    def differentiate(self, work: Work) -> Gradients:
        """Forward and backward over all micro-batches; gradients add up in the parameters. The sum does not depend on the split: every weight is global.

        Raises on every rank where the data of any must not train; no parameter has changed then.
        """
        began = time.perf_counter()
        stats = Stats()
        total = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        refusal: DataRefused | None = None
        every_tokens = [self._with_reference(batch, work.flat.temperature) for batch in work.micro_batches]
        if self._objective.needs_proximal_pass:
            every_tokens = self._with_batch_terms(work, every_tokens)
        value: ValueStats | None = None
        for place, (batch, tokens) in enumerate(zip(work.micro_batches, every_tokens, strict=True), 1):
            scores = self.policy.score(batch, work.flat.temperature, values_alone=work.values_alone)
            loss = (0.0 * scores.logprobs).sum()
            try:
                loss, measured = self._objective(scores.logprobs, tokens, scores.entropy)
                stats = stats.merge(measured)
            except DataRefused as error:
                refusal = refusal or error
            if scores.values is not None and tokens.targets is not None:
                assert self.config.learner.value is not None
                regression, part = value_loss(scores.values, tokens, self.config.learner.value.value_clip)
                loss = loss + self.config.learner.value.coef * regression
                value = part if value is None else value + part
            self.policy.backward(loss, last=place == len(work.micro_batches))
            total += loss.detach()
        if work.values_alone:
            for parameter in self._parameters:  # a shard may have got zeros with the head's gradient
                parameter.grad = None
        return self._merged(work, began, stats, float(total), value, refusal)

    def _merged(self, work: Work, began: float, stats: Stats, total: float, value: ValueStats | None, refusal: DataRefused | None) -> Gradients:
        """What all ranks found. Raises where any refused its data."""
        real = [batch for batch in work.micro_batches if len(batch.source)]
        num_tokens, num_cells = sum(batch.num_tokens for batch in real), sum(len(batch.layout.gather) for batch in real)
        sums = None if value is None else (float(value.loss), float(value.clipped), value.tokens)
        error, code = ("", 1) if refusal is None else (describe(refusal), refusal.exit_code)
        mine = _Found(stats.pack().cpu().numpy().tobytes(), sorted(stats.has), total, num_tokens, num_cells, sums, error, code)
        found = [msgspec.msgpack.decode(data, type=_Found) for data in self.policy.ranks.exchange(msgspec.msgpack.encode(mine))]
        if any(part.error for part in found):
            self.optimizer.zero_grad(set_to_none=True)
            if refusal is not None:
                raise refusal
            rank = next(rank for rank, part in enumerate(found) if part.error)
            raise failed(rank, found[rank].error, found[rank].exit_code)
        vectors = [torch.frombuffer(bytearray(part.stats), dtype=torch.float64) for part in found]
        whole = Stats.merge_packed(vectors, frozenset(name for part in found for name in part.has))
        metrics = {name: float(number) for name, number in whole.result().items()}
        skip = bool(metrics["skip_step"])  # also where nonfinite: drop left no token
        if not skip:
            metrics["total"] = sum(part.total for part in found)
        values = [ValueStats(torch.tensor(part.value[0]), torch.tensor(part.value[1]), part.value[2]) for part in found if part.value is not None]
        num_tokens, num_cells = sum(part.num_tokens for part in found), sum(part.num_cells for part in found)
        return Gradients(metrics, num_tokens, num_cells, time.perf_counter() - began, skip, whole, sum(values[1:], values[0]) if values else None)

    def update(self, version: int, gradients: Gradients) -> Update:
        """Clips and steps; a gradient that is not finite changes nothing, and nothing is left of it."""
        began = time.perf_counter()
        learner = self.config.learner
        rate = learning_rate(learner.optimizer, version, learner.versions)
        norm, value_norm = (0.0 if gradients.skip else clip(part, learner.optimizer.max_grad_norm) for part in (self._parameters, self._value_parameters))
        finite = math.isfinite(norm) and math.isfinite(value_norm)
        stepped = not gradients.skip and not any(self.policy.ranks.largest([not finite]))
        if stepped:
            self.policy.settle()
            set_rate(self.optimizer, rate)
            self.optimizer.step()
            self.num_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return Update(stepped, norm, rate, time.perf_counter() - began, value_norm)

    @torch.no_grad()
    def _with_reference(self, batch: MicroBatch, temperature: float) -> Tokens:
        if self.reference is None or batch.tokens.ref is not None:
            return batch.tokens
        return replace(batch.tokens, ref=self.reference.logprobs(batch, temperature)[0])

    @torch.no_grad()
    def _with_batch_terms(self, work: Work, every_tokens: list[Tokens]) -> list[Tokens]:
        """The proximal pass: log-probabilities of the whole batch first, from the weights the step starts with, then what depends on all of them.

        Where several updates share a batch the proximal log-probabilities are frozen already, from the weights the first of them started with.
        """
        scored = [self.policy.logprobs(batch, work.flat.temperature)[0] for batch in work.micro_batches]
        if not scored:
            return []
        every_tokens = [replace(tokens, prox=x) if tokens.prox is None else tokens for tokens, x in zip(every_tokens, scored, strict=True)]
        x, tokens, begin = of_all_ranks(torch.cat(scored), joined(every_tokens), work.flat.rows.names, self.policy.ranks)
        terms = self._objective.batch_terms(x, tokens)
        ends = list(itertools.accumulate((len(x) for x in scored), initial=begin))
        return [terms.put(tokens, slice(*span)) for tokens, span in zip(every_tokens, itertools.pairwise(ends), strict=True)]
