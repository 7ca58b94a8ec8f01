"""Reads a batch back from the log: its header, where its rows lie, and those rows as frames ready to send."""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from .columns import Compression, Rows, rows_of, stated_checksum, to_frame
from .header import Entry, Member, assemble, entries
from .ledger import Ledger
from .log import Location, Log
from .tables import MemberRow
from .types import Header

_WHOLE_BYTES = 128 * 1024  # from this size on sending an append as it lies costs less than copying its rows
_MERGED_BYTES = 64 * 1024 * 1024

Key = tuple[int, int, int]
"""(group, member, attempt)."""


def read_header(
    ledger: Ledger, log: Log, members: Sequence[MemberRow], group_ids: Sequence[int], shared: Mapping[int, int], known: Mapping[Member, Entry]
) -> Header:
    """The header of a batch of these groups with these ``members``; of those that are not ``known``, from their rows.

    ``shared`` is that of :func:`~.header.assemble`.

    Raises:
        Corrupt: the log no longer holds what was stored.

    """
    found = {key: known[key] for member in members if (key := (member.group_id, member.member)) in known}
    if len(found) < len(members):
        for location, keys, _ in places(ledger, [member for member in members if (member.group_id, member.member) not in found]):
            found |= entries(Rows(committed(log.read(location), set(keys))))
    for member in members:
        entry = found[member.group_id, member.member]
        if entry.reward is None and member.reward is not None:  # it came later: the row does not have it
            found[member.group_id, member.member] = entry._replace(reward=member.reward)
    return assemble(found, group_ids, shared)


def gather(ledger: Ledger, log: Log, members: Sequence[MemberRow], compression: Compression = "none") -> tuple[list[pa.Buffer], list[int]]:
    """Frames that hold the rows of these members and no others, and their checksums.

    A large append all of whose rows are wanted goes out as it lies in the log, neither copied nor read (the receiver checks it); all other rows are checked
    here and merged into few frames.

    Raises:
        Corrupt: the log no longer holds what was stored.

    """
    wanted = places(ledger, members)
    frames: list[pa.Buffer] = []
    checksums: list[int] = []
    merged: list[pa.RecordBatch] = []
    merged_bytes = 0
    for location, keys, whole in wanted:
        if whole and (location.size_bytes >= _WHOLE_BYTES or len(wanted) == 1) and not log.is_sealed(location.segment):
            frames.append(log.frame(location))
            checksums.append(location.checksum)
            continue
        merged.append(committed(log.read(location), set(keys)))
        merged_bytes += location.size_bytes
        if merged_bytes >= _MERGED_BYTES:
            _merge(merged, frames, checksums, compression)
            merged, merged_bytes = [], 0
    if merged:
        _merge(merged, frames, checksums, compression)
    return frames, checksums


class Place(NamedTuple):
    """Where committed rows of a batch lie: an append, which (group, member, attempt) of it they are, and whether they are all of it."""

    location: Location
    keys: list[Key]
    whole: bool


def places(ledger: Ledger, members: Sequence[MemberRow]) -> list[Place]:
    """Where the rows of these members lie."""
    wanted: dict[int, list[Key]] = {}
    for row in members:
        wanted.setdefault(row.append_id, []).append((row.group_id, row.member, row.attempt))
    return [Place(location, wanted[append_id], len(wanted[append_id]) == num) for append_id, location, num in ledger.appends(list(wanted))]


def committed(batch: pa.RecordBatch, keys: set[Key]) -> pa.RecordBatch:
    """The rows of these (group, member, attempt) in an append."""
    found = zip(*(batch.column(name).to_pylist() for name in ("group_id", "member", "attempt")), strict=True)
    return rows_of(batch, [row for row, key in enumerate(found) if key in keys])


def _merge(batches: list[pa.RecordBatch], frames: list[pa.Buffer], checksums: list[int], compression: Compression) -> None:
    frame = to_frame(pa.concat_batches(batches), compression)
    frames.append(frame)
    checksums.append(stated_checksum(frame))
