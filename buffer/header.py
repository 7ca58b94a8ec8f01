"""The header of a batch: made from the columns of its rows, the same for whoever makes it.

The buffer makes it from the log when a batch is pulled. A batch that never crossed the stream (a recording, a test) gets the same from its trajectories.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import xxhash

from .columns import Rows, encode
from .facts import Lists, Segment, segments_of
from .lineages import folded
from .types import Batch, Header

Member = tuple[int, int]
"""(group, member)."""


class Entry(NamedTuple):
    """One trajectory of a header, its versions as they were sampled."""

    lineage: int
    reward: float | None
    status: Any
    stop_reason: Any
    env_metrics: dict[str, float]
    temperature: float
    top_p: float
    top_k: int
    env_id: str
    segments: list[Segment]


_OWN = ("lineage", "reward", "status", "stop_reason", "env_metrics", "temperature", "top_p", "top_k", "env_id")


def entries(rows: Rows, segments: Sequence[Segment] | None = None) -> dict[Member, Entry]:
    """The entries of the trajectories that ``rows`` hold, one after the other; ``segments`` are those of the rows where they are known."""
    if segments is None:
        segments = segments_of(Lists.of(rows["loss_mask"]), rows.listed("version_starts"), rows.listed("version_values"))
    own = zip(*map(rows.listed, _OWN), strict=True)
    keys = zip(rows.listed("group_id"), rows.listed("member"), strict=True)
    found: dict[Member, Entry] = {}
    for key, values, segment in zip(keys, own, segments, strict=True):
        if key not in found:
            found[key] = Entry._make((*values[:4], dict(values[4]), *values[5:], []))
        found[key].segments.append(segment)
    return found


def assemble(found: Mapping[Member, Entry], groups: Iterable[int], shared: Mapping[int, int] = MappingProxyType({})) -> Header:
    """The header of a batch of ``groups``, in that order and member by member.

    ``shared`` gives, for each lineage that is not the learner's, the last version f that both histories have in common: a version v beyond it is reckoned as
    2f - v, so that the lag of any token is V less its version.
    """
    place = {group_id: index for index, group_id in enumerate(groups)}
    keys = sorted(found, key=lambda key: (place[key[0]], key[1]))
    ordered = [found[key] for key in keys]
    segments = [(length, runs, shared.get(entry.lineage)) for entry in ordered for length, runs in entry.segments]
    versions = [version if fork is None else folded(version, version, fork) for _, runs, fork in segments for version, _ in runs]
    own = [list(values) for values in zip(*(entry[1:-1] for entry in ordered), strict=True)] or [[] for _ in _OWN[1:]]
    return Header(
        [group_id for group_id, _ in keys],
        [member for _, member in keys],
        *own,
        segment_counts=[len(entry.segments) for entry in ordered],
        segment_tokens=[length for length, _, _ in segments],
        run_counts=[len(runs) for _, runs, _ in segments],
        run_versions=versions,
        run_sampled=[count for _, runs, _ in segments for _, count in runs],
    )


def header_of(batch: Batch) -> Header:
    """The header of ``batch``; where it carries none, its trajectories are the whole batch and give it."""
    if batch.header is not None:
        return batch.header
    return assemble(entries(Rows(encode(batch.trajectories))) if batch.trajectories else {}, batch.groups)


def digest_of(batch: Batch) -> str:
    """What ranks compare to know that they hold the same batch: xxh3-128 of its identity and its whole header."""
    parts = (batch.lineage, batch.version, batch.groups, sorted(batch.withheld), header_of(batch))
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(parts))
