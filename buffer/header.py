"""The header of a batch: made from the columns of its rows, the same for whoever makes it.

The buffer makes it from the log when a batch is pulled. A batch that never crossed the stream (a recording, a test) gets the same from its trajectories.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import xxhash

from .columns import columns_of, encode
from .facts import Lists, sampled
from .lineages import folded
from .types import Batch, Header

Member = tuple[int, int]
"""(group, member)."""


class Entry(NamedTuple):
    """One trajectory of a header; ``segments`` are (tokens, [(version, tokens sampled by it)])."""

    reward: float | None
    status: Any
    stop_reason: Any
    env_metrics: dict[str, float]
    temperature: float
    top_p: float
    top_k: int
    env_id: str
    segments: list[tuple[int, list[tuple[int, int]]]]


_OWN = ("reward", "status", "stop_reason", "env_metrics", "temperature", "top_p", "top_k", "env_id")


def entries(batch: pa.RecordBatch, shared: Mapping[int, int] = MappingProxyType({})) -> dict[Member, Entry]:
    """The entries of the trajectories whose rows ``batch`` holds, one after the other.

    ``shared`` gives, for each lineage that is not the learner's, the last version f that both histories have in common: a version v beyond it is reckoned as
    2f - v, so that the lag of any token is V less its version.
    """
    column = columns_of(batch)
    mask = Lists.of(column["loss_mask"])
    every_run = sampled(mask, column["version_starts"].to_pylist(), column["version_values"].to_pylist())
    own = list(zip(*(column[name].to_pylist() for name in _OWN), strict=True))
    found: dict[Member, Entry] = {}
    keys = zip(*(column[name].to_pylist() for name in ("group_id", "member")), strict=True)
    lineages = column["lineage"].to_pylist()
    for key, lineage, values, length, runs in zip(keys, lineages, own, mask.lengths, every_run, strict=True):
        if key not in found:
            found[key] = Entry._make((*values[:3], dict(values[3]), *values[4:], []))
        fork = shared.get(lineage)
        found[key].segments.append((length, runs if fork is None else [(folded(version, version, fork), count) for version, count in runs]))
    return found


def assemble(found: dict[Member, Entry], groups: Iterable[int]) -> Header:
    """The header of a batch of ``groups``, in that order and member by member."""
    place = {group_id: index for index, group_id in enumerate(groups)}
    keys = sorted(found, key=lambda key: (place[key[0]], key[1]))
    ordered = [found[key] for key in keys]
    segments = [segment for entry in ordered for segment in entry.segments]
    runs = [run for _, its_runs in segments for run in its_runs]
    own = [list(values) for values in zip(*(entry[:-1] for entry in ordered), strict=True)] or [[] for _ in _OWN]
    return Header(
        [group_id for group_id, _ in keys],
        [member for _, member in keys],
        *own,
        segment_counts=[len(entry.segments) for entry in ordered],
        segment_tokens=[length for length, _ in segments],
        run_counts=[len(its_runs) for _, its_runs in segments],
        run_versions=[version for version, _ in runs],
        run_sampled=[count for _, count in runs],
    )


def header_of(batch: Batch) -> Header:
    """The header of ``batch``; where it carries none, its trajectories are the whole batch and give it."""
    if batch.header is not None:
        return batch.header
    return assemble(entries(encode(batch.trajectories)) if batch.trajectories else {}, batch.groups)


def digest_of(batch: Batch) -> str:
    """What ranks compare to know that they hold the same batch: xxh3-128 of its identity and its whole header."""
    parts = (batch.lineage, batch.version, batch.groups, sorted(batch.withheld), header_of(batch))
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(parts))
