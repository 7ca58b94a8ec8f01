"""One optimiser step, in three parts that the loop puts its fence between: prepare (no tensor touched), differentiate (no parameter changed), update."""

from __future__ import annotations

import itertools
import logging
import math
import time
from dataclasses import dataclass, replace

import torch

from ..buffer.types import Batch
from ..configs.schema import Config
from ..errors import ConfigError
from .collate import Flat, MicroBatch, flatten, pack
from .lora import AdaptersOff
from .objective import Objective, Stats, Tokens
from .optimizer import clip, learning_rate, parameters_of, set_rate
from .plan import Plan, plan
from .policy import Policy
from .token_advantages import check_mode
from .value import ValueStats, value_loss

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
    """What the backward passes left behind.

    ``metrics`` are the objective's, with ``total`` (the loss), ``stats`` the sums they come from, ``value`` those of a value head; ``num_tokens`` is what
    the model computed.
    """

    metrics: dict[str, float]
    num_tokens: int
    seconds: float
    skip: bool
    stats: Stats
    value: ValueStats | None = None


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
        self.num_steps = 0
        """How often the optimiser has changed the weights."""
        self._parameters, self._value_parameters = parameters_of(optimizer)
        check_mode(config.learner)
        if config.learner.value is not None and policy.value_head is None:
            raise ConfigError("learner.value is set and this policy was built without a value head: start a new run with it")

    def prepare(self, batch: Batch) -> Work:
        """Advantages, filters, weights, micro-batches.

        Raises :class:`DataRefused` for what must not train.
        """
        learner = self.config.learner
        flat = flatten(batch, self.config.buffer.max_lag)
        decided = plan(flat.rows, learner.loss, learner.advantage, self.config.buffer.degenerate)
        if decided.staleness is not None and decided.staleness.dropped_tokens:
            logger.warning("version=%d dropped_stale_tokens=%d bound=%d", batch.version, decided.staleness.dropped_tokens, self.config.buffer.max_lag)
        warming_up = learner.value is not None and batch.version <= learner.value.warmup_versions
        return replace(self.pack(flat, decided, bootstraps=self.policy.value_head is not None and learner.advantage.bootstrap), values_alone=warming_up)

    def pack(self, flat: Flat, decided: Plan, *, bootstraps: bool = False) -> Work:
        """The micro-batches of what ``decided`` trains of ``flat``; with ``bootstraps`` also fed what a value after a cut takes."""
        return Work(flat, decided, pack(flat, decided, self.config.learner.tokens_per_micro_batch, self.policy.device, bootstraps=bootstraps))

    def differentiate(self, work: Work) -> Gradients:
        """Forward and backward over all micro-batches; gradients add up in the parameters. The sum does not depend on the split: every weight is global."""
        began = time.perf_counter()
        stats = Stats()
        total = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        every_tokens = [self._with_reference(batch, work.flat.temperature) for batch in work.micro_batches]
        if self._objective.needs_proximal_pass:
            every_tokens = self._with_batch_terms(work, every_tokens)
        value: ValueStats | None = None
        for batch, tokens in zip(work.micro_batches, every_tokens, strict=True):
            scores = self.policy.score(batch, work.flat.temperature, values_alone=work.values_alone)
            loss, measured = self._objective(scores.logprobs, tokens, scores.entropy)
            stats = stats.merge(measured)
            if scores.values is not None and tokens.targets is not None:
                assert self.config.learner.value is not None
                regression, part = value_loss(scores.values, tokens, self.config.learner.value.value_clip)
                loss = loss + self.config.learner.value.coef * regression
                value = part if value is None else value + part
            loss.backward()
            total += loss.detach()
        metrics = {name: float(value) for name, value in stats.result().items()}
        if not work.plan.skip:
            metrics["total"] = float(total)
        num_tokens = sum(batch.num_tokens for batch in work.micro_batches)
        return Gradients(metrics, num_tokens, time.perf_counter() - began, work.plan.skip, stats, value)

    def update(self, version: int, gradients: Gradients) -> Update:
        """Clips and steps; a gradient that is not finite changes nothing, and nothing is left of it."""
        began = time.perf_counter()
        learner = self.config.learner
        rate = learning_rate(learner.optimizer, version, learner.versions)
        norm, value_norm = (0.0 if gradients.skip else clip(part, learner.optimizer.max_grad_norm) for part in (self._parameters, self._value_parameters))
        stepped = not gradients.skip and math.isfinite(norm) and math.isfinite(value_norm)
        if stepped:
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
        terms = self._objective.batch_terms(torch.cat(scored), _joined(every_tokens))
        ends = list(itertools.accumulate(len(x) for x in scored))
        return [terms.put(tokens, slice(end - len(x), end)) for tokens, x, end in zip(every_tokens, scored, ends, strict=True)]


def _joined(parts: list[Tokens]) -> Tokens:
    """All micro-batches as one; rows are numbered on."""
    starts = [0, *itertools.accumulate(part.num_rows for part in parts)]

    def join(name: str) -> torch.Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)

    rest = {name: join(name) for name in ("mu", "prox", "ref", "row_trajectory")}
    return Tokens(
        row=torch.cat([part.row + start for part, start in zip(parts, starts, strict=False)]),
        num_rows=starts[-1],
        mask=torch.cat([part.mask for part in parts]),
        adv=torch.cat([part.adv for part in parts]),
        agg=torch.cat([part.agg for part in parts]),
        names=[name for part in parts for name in part.names or [""] * part.num_rows],
        **rest,
    )
