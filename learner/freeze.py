"""What a batch fixes once, before a parameter changes: scores under the weights it starts with, and the credit that follows from them.

Proximal log-probabilities for several updates and for V-trace, reference log-probabilities for those and for a KL term in the reward, values for GAE and
V-trace. Everything lies by place among this rank's tokens, so that each update, however it cuts the batch, reads the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..errors import DataRefused
from .credit import Scored, assign, kl_in_reward, needs_credit
from .lora import AdaptersOff
from .policy import Policy
from .step import Stepper, Work
from .token_advantages import token_mode


@dataclass(frozen=True, slots=True)
class Frozen:
    """``tokens`` are fields of :class:`.tokens.Tokens` for all tokens ``[p]`` of this rank; ``metrics`` by their full names."""

    tokens: dict[str, torch.Tensor]
    metrics: dict[str, float]

    def put(self, work: Work) -> Work:
        """``work``, each micro-batch with its share filled in."""
        if not self.tokens:
            return work
        batches = [
            replace(batch, tokens=replace(batch.tokens, **{name: values[batch.scored] for name, values in self.tokens.items()})) for batch in work.micro_batches
        ]
        return replace(work, micro_batches=batches)


@torch.no_grad()
def freeze(stepper: Stepper, work: Work, *, several: bool) -> Frozen:
    """Scores ``work`` as far as the configuration asks for it; ``several``: more than one update reads the batch.

    Raises :class:`DataRefused`: a score that is not finite.
    """
    learner = stepper.config.learner
    entry = token_mode(learner.advantage.mode)
    in_reward = kl_in_reward(learner.loss)
    keeps_prox = several and learner.loss.old != "mu"
    needs_values = stepper.policy.value_head is not None
    needs_prox = keeps_prox or in_reward or (entry is not None and entry.needs_prox)
    found: dict[str, torch.Tensor] = {}
    if needs_prox or needs_values:
        found |= _score(stepper.policy, work, "prox")
    if stepper.reference is not None and (several or in_reward):
        found |= _score(stepper.reference, work, "ref")
    tokens = {name: values for name, values in found.items() if name == "ref" or (name == "prox" and keeps_prox)}
    if not needs_credit(learner.loss, learner.advantage):
        return Frozen(tokens, {})
    scored = Scored(**{name: values.cpu().double().numpy() for name, values in found.items()})
    with stepper.policy.ranks.together():
        _refuse_non_finite(work, scored)
    credit = assign(work.flat, work.plan, learner.loss, learner.advantage, scored, stepper.policy.ranks.add)
    tokens["adv"] = torch.from_numpy(credit.advantages).to(stepper.policy.device)
    if credit.targets is not None and "values" in found:
        tokens |= {"targets": torch.from_numpy(credit.targets).to(stepper.policy.device), "values": found["values"]}
    return Frozen(tokens, credit.metrics)


def _refuse_non_finite(work: Work, scored: Scored) -> None:
    """Raises :class:`DataRefused` naming the trajectory of the first score that is not finite: credit would spread it over all ranks."""
    place = np.flatnonzero(work.flat.trained(work.plan))
    for name, values in (("prox", scored.prox), ("ref", scored.ref), ("values", scored.values)):
        wrong = place[~np.isfinite(values[place])] if values is not None else place[:0]
        if len(wrong):
            row = int(np.searchsorted(work.flat.offsets, wrong[0], side="right")) - 1
            trajectory = work.flat.rows.names[work.flat.rows.row_trajectory[work.flat.mine[row]]]
            raise DataRefused(f"{name} is {float(values[wrong[0]]) if values is not None else 0.0} in {trajectory}: an active token needs a finite number")


def _score(policy: Policy | AdaptersOff, work: Work, name: str) -> dict[str, torch.Tensor]:
    """Log-probabilities of the tokens that train as ``name [p]``; from a policy with a value head also ``values [p]`` and the bootstraps ``after [N]``."""
    num, num_trajectories = len(work.flat.token_ids), len(work.flat.rows.rewards)
    found: dict[str, torch.Tensor] = {}

    def keep(kind: str, size: int, at: torch.Tensor, values: torch.Tensor) -> None:
        whole = found.setdefault(kind, torch.zeros(size, dtype=values.dtype, device=values.device))
        whole[at] = values

    for batch in work.micro_batches:
        scores = policy.score(batch, work.flat.temperature)
        keep(name, num, batch.scored, scores.logprobs)
        if scores.values is not None and scores.after is not None:
            keep("values", num, batch.scored, scores.values)
            keep("after", num_trajectories, batch.after_trajectory, scores.after)
    return found
