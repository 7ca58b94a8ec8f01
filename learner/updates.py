"""Several optimiser updates per batch (``learner.updates``): mini-batches, epochs, and what stays fixed between them.

One batch is one version, however many updates it takes: every token's lag is what it was when the batch was pulled. What has to be frozen is taken once,
before a parameter changes: advantages and filters of the whole batch, proximal and reference log-probabilities. What belongs to one optimiser step is
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
import torch

from ..configs.learner_schema import Alarms, Updates
from .alarms import check_alarms
from .objective import Stats
from .plan import Plan, Rows, restrict
from .step import Gradients, Stepper, Update, Work


@dataclass(frozen=True, slots=True)
class Trained:
    """What the updates of a batch did together.

    ``gradients`` merges their measurements, each token once per epoch; its loss is their mean. ``update.grad_norm`` is the mean of the norms.
    ``num_updates`` counts those that changed the weights, ``proximal_s`` is what dealing and freezing log-probabilities took, ``fence_s`` the wait
    for ``before_change``, ``num_cells`` how many cells attention computed for the tokens (the difference is padding).
    """

    gradients: Gradients
    update: Update
    num_updates: int
    proximal_s: float
    fence_s: float
    num_cells: int


def train_batch(stepper: Stepper, work: Work, version: int, alarms: Alarms, before_change: Callable[[], None]) -> Trained:
    """Takes every update of ``work``, calling ``before_change`` each time before the optimiser writes.

    Raises :class:`RoleFailed` where an alarm stops the run, :class:`DataRefused` for data that must not train.
    """
    settings = stepper.config.learner.updates
    began = time.perf_counter()
    shares = [work] if settings.mini_batches * settings.epochs == 1 else split(stepper, work, (stepper.config.seed, version))
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
    num_cells = sum(len(batch.layout.gather) for share in shares for batch in share.micro_batches)
    whole, update = _together(gradients, updates)
    return Trained(whole, update, sum(update.stepped for update in updates), proximal_s, fence_s, num_cells)


def split(stepper: Stepper, work: Work, seed: tuple[int, int]) -> list[Work]:
    """``work`` as one work per update: each has its own denominators, all have the log-probabilities of the weights the batch starts with."""
    learner = stepper.config.learner
    frozen = _frozen(stepper, work)
    shares: list[Work] = []
    for members in deal(work.flat.rows, work.plan, learner.updates, seed):
        part = stepper.pack(work.flat, restrict(work.plan, work.flat.rows, members, learner.loss))
        batches = [
            replace(batch, tokens=replace(batch.tokens, **{name: values[batch.scored] for name, values in frozen.items()})) for batch in part.micro_batches
        ]
        shares.append(replace(part, micro_batches=batches))
    return shares


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


@torch.no_grad()
def _frozen(stepper: Stepper, work: Work) -> dict[str, torch.Tensor]:
    """Proximal and reference log-probabilities by place in the flat batch, ``[P]``: those the loss reads, of the tokens that train."""
    wanted = {"prox": stepper.policy} if stepper.config.learner.loss.old != "mu" else {}
    if stepper.reference is not None:
        wanted["ref"] = stepper.reference
    frozen = {name: torch.zeros(len(work.flat.token_ids), device=stepper.policy.device) for name in wanted}
    for batch in work.micro_batches:
        for name, policy in wanted.items():
            frozen[name][batch.scored] = policy.logprobs(batch, work.flat.temperature)[0].to(torch.float32)
    return frozen


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
    whole = Gradients(
        metrics, sum(found.num_tokens for found in gradients), sum(found.seconds for found in gradients), all(found.skip for found in gradients), stats
    )
    norm = sum(update.grad_norm for update in updates) / len(updates)
    update = Update(any(update.stepped for update in updates), norm, updates[0].learning_rate, sum(update.seconds for update in updates))
    return whole, update
