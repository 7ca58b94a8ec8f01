"""Aggregation: the weight ``a`` each token's loss gets, L = sum a w ell.

Every mode here is constant within a row, so ``a`` is one number per row: ``a[b] = mode(...)``. Counts are over the whole global batch of one optimiser step,
after the filters on data and before any mask that depends on the policy; a unit with no active token is not counted. ``n`` counts active tokens.
Since nothing here depends on a forward pass, ``a`` is known before the first one, and any split into micro-batches and ranks gives the same sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, DataRefused
from .registered import array_like, calling

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Counts:
    """Active tokens of the batch: of each row, and for each row those of the trajectory and of the group it belongs to; all ``[B] int64``.

    ``num_rows``, ``num_trajectories`` and ``num_groups`` count units with at least one active token. ``length`` and ``const`` are the configured
    ``agg_length`` and ``agg_const``.
    """

    row: Int64
    trajectory: Int64
    group: Int64
    num_rows: int
    num_trajectories: int
    num_groups: int
    length: float | None
    const: float | None


AggregationMode = Callable[[Counts], Float64]
_MODES: dict[str, AggregationMode] = {}
_KEY = "learner.loss.agg"


def register_aggregation(name: str) -> Callable[[AggregationMode], AggregationMode]:
    """Registers ``mode(counts) -> a``, ``[B] float64``, under ``name`` for ``learner.loss.agg``. It is called only when something is active."""

    def keep(mode: AggregationMode) -> AggregationMode:
        _MODES[name] = mode
        return mode

    return keep


def aggregation_named(name: str) -> AggregationMode:
    """The mode registered under ``name``.

    Raises :class:`ConfigError`: there is none.
    """
    if name not in _MODES:
        raise ConfigError(f"learner.loss.agg is {name!r}, known are {', '.join(sorted(_MODES))}: choose one or register yours with register_aggregation")
    return _MODES[name]


def row_weights(
    row_counts: npt.NDArray[np.integer],
    row_trajectory: npt.NDArray[np.integer],
    row_group: npt.NDArray[np.integer],
    mode: str,
    *,
    length: float | None = None,
    const: float | None = None,
) -> Float64:
    """The weight ``a`` of every active token of each row, ``[B] float64``; 0 for rows without any.

    ``row_counts`` are active tokens per row; ``row_trajectory`` and ``row_group`` are ids per row (any non-negative integers, all ``[B]``).

    Raises :class:`ConfigError`: an unknown mode, one that needs ``length`` or ``const`` without it, or one that gave what does not fit.
    """
    function = aggregation_named(mode)
    if not len(row_counts) == len(row_trajectory) == len(row_group):
        raise DataRefused(f"{len(row_counts)} rows, {len(row_trajectory)} trajectory ids, {len(row_group)} group ids: one of each per row is needed")
    row = row_counts.astype(np.int64)
    trajectory, num_trajectories = _unit_counts(row, row_trajectory)
    group, num_groups = _unit_counts(row, row_group)
    counts = Counts(row, trajectory, group, int(np.count_nonzero(row)), num_trajectories, num_groups, length, const)
    if counts.num_rows == 0:
        return np.zeros(len(row), np.float64)
    with np.errstate(divide="ignore", invalid="ignore"), calling(_KEY, mode):
        given = function(counts)
    weights = np.where(row > 0, array_like(given, row.shape, "weights", _KEY, mode), 0.0)
    if not np.isfinite(weights).all():
        raise ConfigError(f"{_KEY} {mode} gave the weight {weights[~np.isfinite(weights)][0]}: only finite numbers train")
    return weights


def _unit_counts(row_counts: Int64, ids: npt.NDArray[np.integer]) -> tuple[Int64, int]:
    """Active tokens of the unit each row belongs to, and how many units have any."""
    _, dense = np.unique(ids, return_inverse=True)
    totals = np.bincount(dense, weights=row_counts, minlength=1).astype(np.int64)
    return totals[dense], int(np.count_nonzero(totals))


@register_aggregation("token_mean")
def token_mean(counts: Counts) -> Float64:
    """1 / sum n (DAPO, arXiv 2503.14476, eq. 8): long rows weigh more."""
    return np.full(len(counts.row), 1.0 / counts.row.sum())


@register_aggregation("seq_mean_token_sum")
def seq_mean_token_sum(counts: Counts) -> Float64:
    """1 / N_rows."""
    return np.full(len(counts.row), 1.0 / counts.num_rows)


@register_aggregation("seq_mean_token_mean")
def seq_mean_token_mean(counts: Counts) -> Float64:
    """1 / (N_rows n_b), the original GRPO (arXiv 2402.03300, eq. 3): the weight of a token falls with its row's length."""
    return 1.0 / (counts.num_rows * counts.row)


@register_aggregation("seq_mean_fixed")
def seq_mean_fixed(counts: Counts) -> Float64:
    """1 / (N_rows L), L constant for the whole run and never the padded width (Dr. GRPO, arXiv 2503.20783)."""
    if counts.length is None:
        raise ConfigError("learner.loss.agg seq_mean_fixed needs learner.loss.agg_length: the constant row length to divide by")
    return np.full(len(counts.row), 1.0 / (counts.num_rows * counts.length))


@register_aggregation("traj_mean_token_mean")
def traj_mean_token_mean(counts: Counts) -> Float64:
    """1 / (N_traj n_traj): a trajectory counts once, however many rows it has."""
    return 1.0 / (counts.num_trajectories * counts.trajectory)


@register_aggregation("group_mean_token_mean")
def group_mean_token_mean(counts: Counts) -> Float64:
    """1 / (N_group n_group), the prompt average (ScaleRL, arXiv 2510.13786)."""
    return 1.0 / (counts.num_groups * counts.group)


@register_aggregation("fixed")
def fixed(counts: Counts) -> Float64:
    """1 / C."""
    if counts.const is None:
        raise ConfigError("learner.loss.agg fixed needs learner.loss.agg_const: the constant to divide by")
    return np.full(len(counts.row), 1.0 / counts.const)
