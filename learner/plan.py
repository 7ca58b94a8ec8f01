"""The plan of one optimiser step: from rewards to who trains, with which advantage and which weight. NumPy only, whole global batch, before any forward.

Every rank can compute it from the header of the batch, and all get the same. Order (algorithms, section 13): overlong shaping · advantages over all
trajectories · mask 0 for truncated, unscored and withheld trajectories and for degenerate groups that leave · staleness on what is left · weights ``a``.
Filters run after the baseline, so a member that leaves the loss does not shift the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..buffer.shaping import shape_rewards
from ..configs.learner_schema import Advantage, Loss
from ..errors import DataRefused
from .advantages import compute_advantages, refuse_non_finite
from .aggregation import row_weights
from .masks import as_mask
from .staleness import Level, Staleness, drop_stale
from .token_advantages import token_mode

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StaleLimit:
    """The staleness filter: the learner's version ``current``, the largest lag that trains ``limit``, and the unit that is judged by its oldest token."""

    current: int
    limit: int
    level: Level = "trajectory"


@dataclass(frozen=True, slots=True)
class Rows:
    """The whole global batch of one step, ``B`` rows of ``N`` trajectories, tokens laid end to end (``P`` in all).

    * ``offsets [B + 1]``: row b owns tokens ``offsets[b] .. offsets[b + 1]``.
    * ``mask [P]``: 0 or 1, tokens the policy sampled. ``versions [P]``: policy version of each token, needed when ``stale`` is set.
    * ``row_trajectory [B]``: index of each row's trajectory, ``0 .. N - 1``.
    * ``rewards [N]`` (NaN where ``scored`` is False), ``groups [N]`` (any ids), ``truncated [N]``, ``scored [N]`` (default all: an unscored trajectory
      is in no baseline and does not train), ``withheld [N]`` (default none: stays in the baseline, does not train).
    * ``lengths [N]``: what overlong shaping and the ``opo`` baseline call the length of a trajectory; default its active tokens in ``mask``.
    * ``names [N]``: how errors call a trajectory; default its index.
    """

    offsets: npt.NDArray[np.integer]
    mask: npt.NDArray[np.generic]
    row_trajectory: npt.NDArray[np.integer]
    rewards: npt.NDArray[np.floating]
    groups: npt.NDArray[np.integer]
    truncated: npt.NDArray[np.generic] | None = None
    scored: npt.NDArray[np.generic] | None = None
    withheld: npt.NDArray[np.generic] | None = None
    lengths: npt.NDArray[np.integer] | None = None
    versions: npt.NDArray[np.integer] | None = None
    stale: StaleLimit | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step trains on.

    * ``advantages [N]``, ``degenerate [N]``: per trajectory, before filters; 0 where a mode per token decides later (:mod:`.credit`).
      ``shaped_rewards [N]``: after overlong shaping.
    * ``mask [P]``: tokens that train, after all filters. ``row_counts [B]``: how many of them each row has; rows with 0 need no forward pass.
    * ``row_advantage [B]``, ``row_weight [B]``: what every active token of a row gets as ``adv`` and as ``agg`` (``a``).
    * ``staleness``: of the tokens left before the staleness filter; None without versions.
    * ``skip``: nothing is active; every rank skips the optimiser step.
    """

    advantages: Float64
    degenerate: Bool
    shaped_rewards: Float64
    mask: Bool
    row_counts: Int64
    row_advantage: Float64
    row_weight: Float64
    staleness: Staleness | None
    skip: bool

    @property
    def active_tokens(self) -> int:
        """N, the tokens that train."""
        return int(self.row_counts.sum())


def plan(rows: Rows, loss: Loss, advantage: Advantage, degenerate: Literal["keep", "mask", "refill"]) -> Plan:
    """Decides the step's advantages, masks and weights.

    ``degenerate`` is ``buffer.degenerate``: with keep a group without signal stays in the denominators with advantage 0; with mask and refill its tokens leave.

    Raises :class:`DataRefused`: non-binary mask, shapes that disagree, a non-finite reward of a scored trajectory, a token newer than the learner.
    Raises :class:`ConfigError`: an unknown advantage or aggregation mode, or one that lacks its constant.
    """
    mask = as_mask(rows.mask)
    _check_shapes(rows, mask)
    num = len(rows.rewards)
    token_row = np.repeat(np.arange(len(rows.row_trajectory)), np.diff(rows.offsets))
    truncated, withheld = _flags(rows.truncated, num, False), _flags(rows.withheld, num, False)
    included = _flags(rows.scored, num, True)
    if advantage.truncated == "exclude":
        included = included & ~truncated
    lengths = _active_tokens(mask, rows.row_trajectory[token_row], num) if rows.lengths is None else rows.lengths.astype(np.int64)
    shaped = rows.rewards.astype(np.float64)
    if advantage.overlong is not None:
        shaped = shape_rewards(shaped, lengths, advantage.overlong)
    if token_mode(advantage.mode) is None:
        advantages, flagged = compute_advantages(shaped, rows.groups, advantage, included=included, lengths=lengths, names=rows.names)
    else:  # values are the baseline, not the group: no group is degenerate
        refuse_non_finite("reward", shaped, included, rows.names)
        advantages, flagged = np.zeros(num), ~included

    leaves = withheld | ~included
    if advantage.truncated != "keep":
        leaves = leaves | truncated
    if degenerate != "keep":
        leaves = leaves | flagged
    mask = mask & ~leaves[rows.row_trajectory][token_row]
    staleness = None
    if rows.stale is not None and rows.versions is not None:
        staleness = drop_stale(
            rows.versions, mask, _units(rows, token_row), current=rows.stale.current, limit=rows.stale.limit, name_of=lambda at: _where(rows, token_row, at)
        )
        mask = staleness.keep

    row_counts = _active_tokens(mask, token_row, len(rows.row_trajectory))
    weights = row_weights(row_counts, rows.row_trajectory, rows.groups[rows.row_trajectory], loss.agg, length=loss.agg_length, const=loss.agg_const)
    return Plan(
        advantages=advantages,
        degenerate=flagged,
        shaped_rewards=shaped,
        mask=mask,
        row_counts=row_counts,
        row_advantage=advantages[rows.row_trajectory],
        row_weight=weights,
        staleness=staleness,
        skip=not row_counts.any(),
    )


def restrict(decided: Plan, rows: Rows, members: Bool, loss: Loss) -> Plan:
    """The part of a plan that one of several optimiser steps takes: the rows in ``members`` ``[B]``, weighed by counts over themselves alone.

    Advantages, filters and staleness stay what they are: they were decided over the whole batch.
    """
    counts = np.where(members, decided.row_counts, 0)
    weights = row_weights(counts, rows.row_trajectory, rows.groups[rows.row_trajectory], loss.agg, length=loss.agg_length, const=loss.agg_const)
    token_members = np.repeat(members, np.diff(rows.offsets))
    return replace(decided, mask=decided.mask & token_members, row_counts=counts, row_weight=weights, skip=not counts.any())


def _where(rows: Rows, token_row: Int64, at: int) -> str:
    """Sampled token number ``at`` as an error calls it."""
    row = int(token_row[at])
    trajectory = int(rows.row_trajectory[row])
    return f"{rows.names[trajectory] if rows.names else f'trajectory {trajectory}'}: sampled token {at - int(rows.offsets[row])} of row {row}"


def _active_tokens(mask: Bool, units: npt.NDArray[np.integer], num: int) -> Int64:
    return np.bincount(units[mask], minlength=num).astype(np.int64)


def _flags(values: npt.NDArray[np.generic] | None, num: int, default: bool) -> Bool:
    return np.full(num, default) if values is None else as_mask(values, "a per-trajectory flag")


def _units(rows: Rows, token_row: npt.NDArray[np.integer]) -> npt.NDArray[np.integer] | None:
    """Unit of each token at the level of the staleness filter."""
    level = rows.stale.level if rows.stale is not None else "token"
    if level == "token":
        return None
    if level == "row":
        return token_row
    of_trajectory = rows.row_trajectory[token_row]
    if level == "trajectory":
        return of_trajectory
    return np.unique(rows.groups, return_inverse=True)[1][of_trajectory]


def _check_shapes(rows: Rows, mask: Bool) -> None:
    num_rows, num = len(rows.row_trajectory), len(rows.rewards)
    if mask.ndim != 1 or len(rows.offsets) != num_rows + 1 or rows.offsets[0] != 0 or rows.offsets[-1] != len(mask) or (np.diff(rows.offsets) < 0).any():
        raise DataRefused(f"offsets do not cut {mask.size} tokens into {num_rows} rows: they must ascend from 0 to the number of tokens")
    if num_rows and not (rows.row_trajectory.min() >= 0 and rows.row_trajectory.max() < num):
        raise DataRefused(f"row_trajectory runs from {rows.row_trajectory.min()} to {rows.row_trajectory.max()}, there are {num} trajectories")
    if rows.stale is not None and rows.versions is None:
        raise DataRefused("a staleness limit is set and the batch carries no versions: every token needs the version that sampled it")
    per_trajectory = {"groups": rows.groups, "truncated": rows.truncated, "scored": rows.scored, "withheld": rows.withheld, "lengths": rows.lengths}
    for name, values in per_trajectory.items():
        if values is not None and values.shape != (num,):
            raise DataRefused(f"{name} has shape {values.shape}, there are {num} rewards: one of each per trajectory is needed")
    if rows.versions is not None and rows.versions.shape != mask.shape:
        raise DataRefused(f"versions have shape {rows.versions.shape}, the mask {mask.shape}: every token needs its version")
