"""What the books of evaluations need to know of rows: purpose, what the environment called a success, and the versions of every token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import DataRefused
from .columns import Rows
from .facts import Fact
from .types import Purpose


class Played(NamedTuple):
    """A trajectory of an evaluation. ``versions`` are the oldest and the newest over all its tokens, sampled or not; ``success`` None where unreported."""

    fact: Fact
    success: float | None
    versions: tuple[int, int]


def purpose_of(rows: Rows) -> Purpose:
    """The purpose of all rows of an append.

    Raises:
        DataRefused: they have more than one.

    """
    found = sorted(set(rows.listed("purpose")))
    if len(found) != 1:
        raise DataRefused(f"an append with rows of the purposes {' and '.join(found)}; send them apart")
    return found[0]


def played_of(rows: Rows, found: Sequence[Fact]) -> list[Played]:
    """The trajectories of an append of evaluations, whose facts were ``found``."""
    metrics, versions = rows.listed("env_metrics"), rows.listed("version_values")
    played: list[Played] = []
    for fact in found:
        every_version = list(itertools.chain.from_iterable(versions[fact.first_row : fact.first_row + fact.num_rows]))
        played.append(Played(fact, dict(metrics[fact.first_row]).get("success"), (min(every_version), max(every_version))))
    return played
