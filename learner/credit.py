"""Credit: which advantage each token gets, and which return its value learns, from rewards per turn and per token.

Runs once per batch, before a parameter changes, in NumPy float64 over this rank's trajectories; the modes themselves are pure functions registered by name
(:mod:`.token_advantages`). A trajectory is one row here, the tokens that train of all its segments end to end: what the environment said between
two turns is skipped, and the value of the next turn's first token is what the last token of a turn looks ahead to. What is of the whole batch (the mean and
deviation of whitening, the metrics) is added up over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..configs.learner_schema import Advantage, Loss
from ..errors import DataRefused
from .collate import Flat
from .plan import Plan
from .registered import array_like, calling, of_kind
from .returns import returns_to_go
from .token_advantages import TokenAdvantages, TokenMode, TokenScores, token_mode

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Add = Callable[[Float64], Float64]
"""Adds numbers up over ranks."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What was computed under the weights the batch starts with, by place among this rank's tokens ``[p]``, read where they train.

    ``after [N]`` is the value after the last token of each trajectory that was cut, 0 for the others. None: not computed, and nothing needs it.
    """

    prox: Float64 | None = None
    ref: Float64 | None = None
    values: Float64 | None = None
    after: Float64 | None = None


@dataclass(frozen=True, slots=True)
class Credit:
    """``advantages [p]``, ``targets [p]`` (None where no value learns) over the tokens that train, 0 elsewhere; ``metrics`` by their full names."""

    advantages: Float64
    targets: Float64 | None
    metrics: dict[str, float]


def needs_credit(loss: Loss, advantage: Advantage) -> bool:
    """Whether tokens of one trajectory may get different advantages; else the plan's own are all there is."""
    return token_mode(advantage.mode) is not None or advantage.whiten or kl_in_reward(loss)


def kl_in_reward(loss: Loss) -> bool:
    """Whether rewards carry a KL term."""
    return loss.kl is not None and loss.kl_in == "reward"


def _alone(sums: Float64) -> Float64:
    return sums


def assign(flat: Flat, plan: Plan, loss: Loss, advantage: Advantage, scored: Scored, add: Add = _alone) -> Credit:
    """The advantage of every token of this rank that trains, and the target of its value; ``add`` is called the same number of times on every rank.

    Modes per trajectory: their advantage, plus the discounted sum of the KL terms that follow, which no baseline touches. Modes per token: theirs, on the
    rewards of turns, trajectory and KL together.

    Raises :class:`DataRefused`: a value or log-probability that is not finite.
    """
    walk = _Walk.over(flat, plan)
    penalty = np.zeros(walk.mask.shape)
    if kl_in_reward(loss):
        assert loss.kl is not None
        penalty = np.where(walk.mask, -loss.kl_coef * kl_of(loss.kl, walk.pad(scored.prox), walk.pad(scored.ref)), 0.0)
    entry = token_mode(advantage.mode)
    values = walk.pad(scored.values)
    if entry is None:
        own = walk.pad(plan.row_advantage[walk.token_row])
        found = TokenAdvantages(np.where(walk.mask, own + returns_to_go(penalty, walk.mask, gamma=advantage.gamma), 0.0))
    else:
        after = scored.after[walk.trajectories] if advantage.bootstrap and scored.after is not None else np.zeros(len(walk.trajectories))
        rewards = _placed(flat, plan, walk) + penalty
        prox = walk.pad(scored.prox)
        found = _of_mode(entry.function, TokenScores(rewards, walk.mask, walk.pad(flat.behaviour_logprobs), prox, values, after, advantage))
    advantages = found.advantages
    num, mean, spread = _moments(advantages[walk.mask], add)
    if advantage.whiten or advantage.mode == "whiten":  # as returns.whiten, over all ranks
        advantages = np.where(walk.mask, (advantages - mean) / (spread**0.5 + 1e-8) if num >= 2 else 0.0, 0.0)
        spread = _moments(advantages[walk.mask], add)[2]
    metrics = {"train/advantage_std": spread**0.5}
    if found.targets is not None:
        metrics |= _fit(found.targets[walk.mask], values[walk.mask], add)
    return Credit(walk.spread(advantages), None if found.targets is None else walk.spread(found.targets), metrics)


def _of_mode(mode: TokenMode, scores: TokenScores) -> TokenAdvantages:
    """What the mode gave, one finite number for every token that trains."""
    key, name = "learner.advantage.mode", scores.config.mode
    with calling(key, name):
        found = of_kind(mode(scores), TokenAdvantages, key, name)
    for what, values in (("advantages", found.advantages), ("targets", found.targets)):
        if values is not None and not np.isfinite(array_like(values, scores.mask.shape, what, key, name)[scores.mask]).all():
            raise DataRefused(f"{key} {name} gave {what} that are not finite: only finite numbers train")
    return found


def kl_of(kind: str, prox: Float64, ref: Float64) -> Float64:
    """An estimate of KL(p, q) per token from frozen log-probabilities; k1 is p - q itself, the others are of the log ratio bounded to 20."""
    if kind == "k1":
        return prox - ref
    bounded = np.clip(prox - ref, -20.0, 20.0)
    return {"k2": 0.5 * bounded**2, "k3": np.expm1(-bounded) + bounded, "abs": np.abs(bounded)}[kind]


def _moments(values: Float64, add: Add) -> tuple[float, float, float]:
    """Number, mean and variance over all ranks."""
    num, total = add(np.array([float(values.size), float(values.sum())]))
    mean = float(total / max(num, 1.0))
    return float(num), mean, float(add(np.array([((values - mean) ** 2).sum()]))[0] / max(num, 1.0))


def _fit(targets: Float64, values: Float64, add: Add) -> dict[str, float]:
    """How well the values foretold what they are now taught: 1 - Var(target - V) / Var(target), 0 where targets do not vary."""
    _, mean, spread = _moments(targets, add)
    _, error, unexplained = _moments(targets - values, add)
    return {"value/return_mean": mean, "value/mean": mean - error, "value/explained_variance": 1.0 - unexplained / spread if spread > 0 else 0.0}


@dataclass(frozen=True, slots=True)
class _Walk:
    """The tokens that train as one row per trajectory: ``place`` among this rank's tokens, ``row`` and ``column`` of each in ``mask [M, L]``.

    ``trajectories [M]`` names each row's, ``token_row [p]`` the batch's row of each token.
    """

    place: Int64
    row: Int64
    column: Int64
    mask: Bool
    trajectories: Int64
    token_row: Int64

    @classmethod
    def over(cls, flat: Flat, plan: Plan) -> _Walk:
        token_row = np.repeat(flat.mine, np.diff(flat.offsets))
        place = np.flatnonzero(flat.trained(plan))
        trajectory = flat.rows.row_trajectory[token_row[place]]
        order = np.argsort(trajectory, kind="stable")
        place, trajectory = place[order], trajectory[order]
        trajectories, starts, row, counts = np.unique(trajectory, return_index=True, return_inverse=True, return_counts=True)
        column = np.arange(len(place)) - starts[row] if len(place) else np.zeros(0, np.int64)
        mask = np.arange(counts.max(initial=0))[None, :] < counts[:, None]
        return cls(place, row.astype(np.int64), column.astype(np.int64), mask, trajectories.astype(np.int64), token_row)

    def pad(self, values: npt.NDArray[np.floating] | None) -> Float64:
        """``[p]`` as ``[M, L]``; zeros where there is nothing."""
        out = np.zeros(self.mask.shape)
        if values is not None:
            out[self.row, self.column] = values[self.place]
        return out

    def spread(self, padded: Float64) -> Float64:
        """``[M, L]`` as ``[p]``, 0 at tokens that do not train."""
        out = np.zeros(len(self.token_row))
        out[self.place] = padded[self.row, self.column]
        return out


def _placed(flat: Flat, plan: Plan, walk: _Walk) -> Float64:
    """The reward of each token, ``[M, L]``, summing to the trajectory's shaped reward.

    A turn's reward lies on the last token up to its end that trains (on the first one where none does), the rest on the trajectory's last: a final score,
    shaping, whatever turns do not say.
    """
    rewards = np.zeros(walk.mask.shape)
    if not walk.mask.size:
        return rewards
    counts = walk.mask.sum(axis=1)
    rewards[np.arange(len(counts)), counts - 1] = plan.shaped_rewards[walk.trajectories]
    row_of = np.full(len(flat.rows.rewards), -1)
    row_of[walk.trajectories] = np.arange(len(walk.trajectories))
    turns = flat.turns
    for end, reward, trajectory in zip(turns.ends.tolist(), turns.rewards.tolist(), turns.trajectory.tolist(), strict=True):
        row = int(row_of[trajectory])
        if row >= 0:
            first = int(np.searchsorted(walk.row, row))
            tokens = walk.place[first : first + int(counts[row])]
            at = max(int(np.searchsorted(tokens, end, side="right")) - 1, 0)
            rewards[row, at] += reward
            rewards[row, counts[row] - 1] -= reward
    return rewards
