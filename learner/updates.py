"""Several optimiser updates per batch (``learner.updates``): mini-batches, epochs, and what stays fixed between them.

One batch is one version, however many updates it takes: every token's lag is what it was when the batch was pulled. What has to be frozen is taken once,
before a parameter changes (:mod:`.freeze`): advantages and filters of the whole batch, proximal and reference log-probabilities. What belongs to one step is
counted per mini-batch: the denominators of its weights, and the terms that need all its tokens. Mini-batches are made of whole groups, dealt anew in each
epoch by the run's seed, the version and the epoch, so that a resume deals the same. With one mini-batch and one epoch the batch is one step, and nothing
is scored beforehand that the loss does not ask for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..configs.learner_schema import Alarms, Updates
from .alarms import check_alarms
from .freeze import freeze
from .objective import Stats
from .plan import Plan, Rows, restrict
from .step import Gradients, Stepper, Update, Work


@dataclass(frozen=True, slots=True)
class Trained:
    """What the updates of a batch did together.

    ``gradients`` merges their measurements, each token once per epoch; its loss is their mean. ``update.grad_norm`` is the mean of the norms.
    ``num_updates`` counts those that changed the weights, ``proximal_s`` is what dealing and freezing log-probabilities took, ``fence_s`` the wait
    for ``before_change``, ``num_cells`` how many cells attention computed for the tokens (the difference is padding), ``flops`` the
    model FLOPs of forward and backward. ``metrics`` are those of the batch's
    credit, by their full names.
    """

    gradients: Gradients
    update: Update
    num_updates: int
    proximal_s: float
    fence_s: float
    num_cells: int
    flops: float
    metrics: dict[str, float]


def train_batch(stepper: Stepper, work: Work, version: int, alarms: Alarms, before_change: Callable[[], None]) -> Trained:
    """Takes every update of ``work``, calling ``before_change`` each time before the optimiser writes.

    Raises :class:`RoleFailed` where an alarm stops the run, :class:`DataRefused` for data that must not train.
    """
    settings = stepper.config.learner.updates
    began = time.perf_counter()
    several = settings.mini_batches * settings.epochs > 1
    frozen = freeze(stepper, work, several=several)
    shares = [frozen.put(share) for share in (split(stepper, work, (stepper.config.seed, version)) if several else [work])]
    proximal_s = time.perf_counter() - began
    gradients: list[Gradients] = []
    updates: list[Update] = []
    fence_s = 0.0
    for share in shares:
        found = stepper.differentiate(share)
        check_alarms({f"loss/{name}": value for name, value in found.metrics.items()}, alarms, version)
        fenced = time.perf_counter()
        before_change()
        fence_s += time.perf_counter() - fenced
        gradients.append(found)
        updates.append(stepper.update(version, found))
    num_cells = sum(found.num_cells for found in gradients)
    flops = sum(stepper.flops(share) for share in shares)
    whole, update = _together(gradients, updates)
    return Trained(whole, update, sum(update.stepped for update in updates), proximal_s, fence_s, num_cells, flops, frozen.metrics)


def split(stepper: Stepper, work: Work, seed: tuple[int, int]) -> list[Work]:
    """``work`` as one work per update, each with its own denominators."""
    learner = stepper.config.learner
    parts = [restrict(work.plan, work.flat.rows, members, learner.loss) for members in deal(work.flat.rows, work.plan, learner.updates, seed)]
    packed = [replace(stepper.pack(work.flat, part), values_alone=work.values_alone) for part in parts]
    most = stepper.policy.ranks.largest([len(part.micro_batches) for part in packed])
    return [stepper.even_out(part, num) for part, num in zip(packed, most, strict=True)]


def deal(rows: Rows, plan: Plan, updates: Updates, seed: tuple[int, int]) -> list[npt.NDArray[np.bool_]]:
    """Which rows train in each update, ``[B] bool`` each: every live group once an epoch, dealt into ``mini_batches`` shares.

    Fewer live groups than mini-batches make fewer shares; no live group makes one that is empty, and skipped.
    """
    row_group = rows.groups[rows.row_trajectory]
    live = np.unique(row_group[plan.row_counts > 0])
    if not len(live):
        return [np.zeros(len(row_group), np.bool_)]
    shares: list[npt.NDArray[np.bool_]] = []
    for epoch in range(updates.epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(live)
        shares += [np.isin(row_group, part) for part in np.array_split(order, min(updates.mini_batches, len(live)))]
    return shares


def _together(gradients: list[Gradients], updates: list[Update]) -> tuple[Gradients, Update]:
    """Sums, counts and means over the updates; one update is itself."""
    if len(updates) == 1:
        return gradients[0], updates[0]
    stats = Stats()
    for found in gradients:
        stats = stats.merge(found.stats)
    metrics = {name: float(value) for name, value in stats.result().items()}
    totals = [found.metrics["total"] for found in gradients if "total" in found.metrics]
    if totals:
        metrics["total"] = sum(totals) / len(totals)
    values = [found.value for found in gradients if found.value is not None]
    value = None if not values else replace(sum(values[1:], values[0]), loss=sum(one.loss for one in values) / len(values))
    whole = Gradients(
        metrics,
        sum(found.num_tokens for found in gradients),
        sum(found.num_cells for found in gradients),
        sum(found.seconds for found in gradients),
        all(found.skip for found in gradients),
        stats,
        value,
    )
    norm, value_norm = (sum(norms) / len(updates) for norms in zip(*((update.grad_norm, update.value_grad_norm) for update in updates), strict=True))
    seconds = sum(update.seconds for update in updates)
    return whole, Update(any(update.stepped for update in updates), norm, updates[0].learning_rate, seconds, value_norm)
