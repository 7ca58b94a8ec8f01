"""What an audit found, as plain numbers; ``audit`` fills it, the command line prints it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .bias import Fate, Tally
from .lineages import Fork

_MAX_NAMED = 5
"""Problems of one kind that are spelled out."""


@dataclass(frozen=True, slots=True)
class EnvBias:
    """Trained against everything that was played, for one environment: means over trajectories (NaN where there are none).

    A trained mean away from the leased one says that what could be trained depended on it (long episodes came too late, say).
    """

    num_leased: int
    num_trained: int
    leased_tokens_mean: float
    trained_tokens_mean: float
    leased_reward_mean: float
    trained_reward_mean: float
    leased_success_mean: float
    trained_success_mean: float


@dataclass(frozen=True, slots=True)
class EnvCursor:
    """How far one environment is: groups leased for it, the share its weight gives it, how many tasks it has (None where there is no end to them)."""

    num_groups: int
    share: float
    num_tasks: int | None


@dataclass(slots=True)
class AuditReport:
    """What the audit found. ``counts`` are groups per state; ``num_trained`` and ``num_age_drops`` count trajectories (trained; withheld or dropped for age).

    Batches, versions and what was trained are those of the history of ``lineage``, the current one. ``forks`` are where lineages began, ``abandoned``
    counts the batches of each that were left behind.

    ``failures`` counts failed trajectories per reason: they carry no training signal, so none counts as trained. ``endings`` counts the others by how they
    ended. ``repeated`` counts per reason the failed attempts that were played again; ``num_unplayed`` are members that groups were closed without.

    ``num_blobs`` images lie beside the log, ``blob_bytes`` in all. ``refused`` counts what the buffer turned away, by code.

    ``problems`` is empty in a sound run. ``unrecorded_bytes`` lie behind what the ledger recorded: appends a live buffer is just making, or was making when it
    was killed; nobody was told they were stored. ``num_sealed`` segments are Parquet; ``num_removed`` trajectories lay in segments that retention removed, so
    only the ledger still speaks of them. Evaluations have books of their own: ``evaluations`` and ``evaluation_groups`` per state, ``num_evaluated``
    trajectories; no other number counts any of them but those of rows, appends and bytes.
    """

    folder: Path
    lineage: int = 0
    forks: list[Fork] = field(default_factory=list[Fork])
    abandoned: dict[int, int] = field(default_factory=dict[int, int])
    version: int = 0
    num_leased: int = 0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    drop_reasons: dict[str, int] = field(default_factory=dict[str, int])
    closes: bool = False
    problems: list[str] = field(default_factory=list[str])
    num_batches: int = 0
    num_appends: int = 0
    num_rows: int = 0
    num_trajectories: int = 0
    size_bytes: int = 0
    unrecorded_bytes: int = 0
    num_sealed: int = 0
    num_removed: int = 0
    num_trained: int = 0
    max_lag_trained: int = 0
    lag_bound: int = 0
    num_age_drops: int = 0
    repeated: dict[str, int] = field(default_factory=dict[str, int])
    num_unplayed: int = 0
    num_amendments: int = 0
    failures: dict[str, int] = field(default_factory=dict[str, int])
    endings: dict[str, int] = field(default_factory=dict[str, int])
    duplicates: int = 0
    num_blobs: int = 0
    blob_bytes: int = 0
    refused: dict[str, int] = field(default_factory=dict[str, int])
    evaluations: dict[str, int] = field(default_factory=dict[str, int])
    evaluation_groups: dict[str, int] = field(default_factory=dict[str, int])
    evaluation_reasons: list[str] = field(default_factory=list[str])
    num_evaluated: int = 0
    bias: dict[str, EnvBias] = field(default_factory=dict[str, EnvBias])
    fates: dict[str, dict[Fate, Tally]] = field(default_factory=dict[str, dict[Fate, Tally]])
    cursors: dict[str, EnvCursor] = field(default_factory=dict[str, EnvCursor])


def note(report: AuditReport, problems: list[str]) -> None:
    """Adds problems of one kind, the first few of them in words."""
    report.problems.extend(problems[:_MAX_NAMED])
    if len(problems) > _MAX_NAMED:
        report.problems.append(f"… and {len(problems) - _MAX_NAMED} more of that kind")
