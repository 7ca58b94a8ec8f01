"""What the books of evaluations need to know of rows: purpose, what the environment called a success, and the versions of every token."""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from ..errors import DataRefused
from .facts import Fact
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
    found = sorted(set(batch.column("purpose").to_pylist()))
    if len(found) != 1:
        raise DataRefused(f"an append with rows of the purposes {' and '.join(found)}; send them apart")
    return found[0]


def played_of(batch: pa.RecordBatch, found: Sequence[Fact]) -> list[Played]:
    """The trajectories of an append of evaluations, whose facts were ``found``."""
    metrics, versions = (batch.column(name).to_pylist() for name in ("env_metrics", "version_values"))
    played: list[Played] = []
    for fact in found:
        every_version = list(itertools.chain.from_iterable(versions[fact.first_row : fact.first_row + fact.num_rows]))
        played.append(Played(fact, dict(metrics[fact.first_row]).get("success"), (min(every_version), max(every_version))))
    return played
