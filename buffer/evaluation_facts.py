"""What the books of evaluations need to know of rows: purpose, what the environment called a success, and the versions of every token."""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ..errors import DataRefused
from .columns import SCHEMA
from .facts import Fact, Lists
from .types import Purpose


class Played(NamedTuple):
    """A trajectory of an evaluation. ``versions`` are the oldest and the newest over all its tokens, sampled or not; ``success`` None where unreported."""

    fact: Fact
    success: float | None
    versions: tuple[int, int]


def purpose_of(batch: pa.RecordBatch) -> Purpose:
    """The purpose of all rows of an append.

    Raises:
        DataRefused: they have more than one.

    """
    found = batch.column(SCHEMA.get_field_index("purpose")).unique().to_pylist()
    if len(found) != 1:
        raise DataRefused(f"an append with rows of the purposes {' and '.join(sorted(found))}; send them apart")
    return found[0]


def played_of(batch: pa.RecordBatch, found: Sequence[Fact]) -> list[Played]:
    """The trajectories of an append of evaluations, whose facts were ``found``."""
    column = dict(zip(SCHEMA.names, batch.columns, strict=True))
    metrics = column["env_metrics"].to_pylist()
    versions = Lists.of(column["version_values"])
    oldest = np.minimum.reduceat(versions.values, versions.bounds[:-1])
    newest = np.maximum.reduceat(versions.values, versions.bounds[:-1])
    played: list[Played] = []
    for fact in found:
        rows = slice(fact.first_row, fact.first_row + fact.num_rows)
        played.append(Played(fact, dict(metrics[fact.first_row]).get("success"), (int(oldest[rows].min()), int(newest[rows].max()))))
    return played
