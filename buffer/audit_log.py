"""One pass over the rows of the log for an audit: every recorded append, checksums verified, as columns."""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import Corrupt
from .audit_report import AuditReport, note
from .blob_store import digests_of
from .columns import SCHEMA_MESSAGE, from_frame
from .facts import Lists, segments_of
from .ledger import Ledger
from .log import Location, segment_path
from .sealed import Sealed, SealedFile, file_checksum, sealed_path

Column = npt.NDArray[Any]

_READ = (
    *("group_id", "member", "attempt", "lineage", "env_id", "task_index", "seed", "reward", "status", "stop_reason"),
    *("env_metrics", "loss_mask", "version_starts", "version_values", "media"),
)
UNSAMPLED = np.iinfo(np.int32).max
"""The oldest version where nothing was sampled; the newest is -1."""

_OF_BOTH = "num_tokens, min_version, max_version, num_trained_tokens, task_index, seed, reward, status, stop_reason, env_id"
_MEMBERS_OF = f"""
SELECT append_id, group_id, member, members.attempt, members.lineage, {_OF_BOTH}, NULL AS success
FROM members JOIN groups USING (group_id) WHERE append_id BETWEEN ?1 AND ?2
UNION ALL
SELECT append_id, group_id, member, evaluation_members.attempt, evaluations.lineage, {_OF_BOTH}, success
FROM evaluation_members JOIN evaluation_groups USING (group_id) JOIN evaluations USING (evaluation_id) WHERE append_id BETWEEN ?1 AND ?2
"""  # noqa: S608 - our own names


@dataclass(slots=True)
class Rows:
    """Columns over all rows of the log, ``[N]`` each; ``oldest`` is above ``newest`` where nothing was sampled.

    ``ending`` are places in ``endings``, pairs of status and stop reason; ``env`` are places in ``env_names``.
    """

    append_id: Column
    group_id: Column
    member: Column
    attempt: Column
    lineage: Column
    num_tokens: Column
    oldest: Column
    newest: Column
    num_trained_tokens: Column
    task_index: Column
    seed: Column
    reward: Column
    success: Column
    ending: Column
    env: Column
    env_names: list[str]
    endings: list[tuple[str, str]]
    digests: set[str]

    def where(self, chosen: Column) -> Rows:
        """The rows for which ``chosen``, ``[N] bool``, is true."""
        columns = {field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self) if field.name not in ("env_names", "endings", "digests")}
        return dataclasses.replace(self, **columns)


def read_log(folder: Path, ledger: Ledger, appends: Iterable[tuple[int, Location]], rows_recorded: dict[int, int], report: AuditReport) -> Rows:
    """Every recorded append, its checksum verified, one segment at a time."""
    parts: list[list[Column]] = []
    names: dict[str, int] = {}
    endings: dict[tuple[str, str], int] = {}
    digests: set[str] = set()
    by_segment: dict[int, list[tuple[int, Location]]] = {}
    for append_id, location in appends:
        by_segment.setdefault(location.segment, []).append((append_id, location))
    for segment, found in sorted(by_segment.items()):
        batches = _read_segment(segment_path(folder, segment), found, rows_recorded, report)
        if batches is None:  # sealed, maybe at this very moment: the ledger knows before the original goes
            batches = _read_sealed(folder, ledger, found, rows_recorded, report)
            if batches is None:
                parts.append(_removed(ledger, found, names, endings))
                report.num_removed += len(parts[-1][0])
                continue
        if batches:
            table = pa.Table.from_batches([batch.select(_READ) for _, batch in batches]).combine_chunks()
            ids = np.repeat(np.array([append_id for append_id, _ in batches]), [batch.num_rows for _, batch in batches])
            parts.append(_columns(ids, table.to_batches()[0], names, endings))
            digests.update(digests_of(table.to_batches()[0]))
    for path in folder.glob("*.arrows"):
        if int(path.stem) not in by_segment:
            report.unrecorded_bytes += max(0, path.stat().st_size - len(SCHEMA_MESSAGE))
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.empty(0, np.int64)] * 15
    report.num_rows = len(joined[0]) - report.num_removed
    return Rows(*joined, env_names=list(names), endings=list(endings), digests=digests)


Appends = list[tuple[int, pa.RecordBatch]]


def _read_segment(path: Path, appends: list[tuple[int, Location]], rows_recorded: dict[int, int], report: AuditReport) -> Appends | None:
    """The appends of a segment that lies as it was written; None where there is none."""
    end = max(location.offset + location.size_bytes for _, location in appends)
    try:
        mapped = pa.memory_map(str(path))
    except FileNotFoundError:
        return None
    size = mapped.size()
    report.size_bytes += size
    report.unrecorded_bytes += max(0, size - end - 8)
    if size < end:
        note(report, [f"{path.name} holds {size} bytes, the ledger recorded {end}"])
    batches: list[tuple[int, pa.RecordBatch]] = []
    damaged: list[str] = []
    for append_id, location in appends:
        if location.offset + location.size_bytes > size:
            continue
        mapped.seek(location.offset)
        try:
            batch = from_frame(mapped.read_buffer(location.size_bytes), location.checksum)
        except Corrupt as error:
            damaged.append(f"{path.name} at {location.offset}: {error}")
            continue
        if batch.num_rows != rows_recorded[append_id]:
            damaged.append(f"{path.name} at {location.offset}: {batch.num_rows} rows, the ledger recorded {rows_recorded[append_id]}")
        batches.append((append_id, batch))
    report.num_appends += len(batches)
    note(report, damaged)
    return batches


def _read_sealed(folder: Path, ledger: Ledger, appends: list[tuple[int, Location]], rows_recorded: dict[int, int], report: AuditReport) -> Appends | None:
    """The appends of a sealed segment, the whole file checked against the ledger; None where retention removed it, if only at this very moment."""
    segment = appends[0][1].segment
    path = sealed_path(folder, segment)
    known, removed = _sealed_now(ledger, segment)
    if removed:
        return None
    try:
        found, size = file_checksum(path), path.stat().st_size
        differs = known is not None and (found, size) != (known.checksum, known.size_bytes)
        batches = [] if known is None or differs else _appends_of(Sealed(path), appends)
    except (FileNotFoundError, Corrupt) as error:
        if _sealed_now(ledger, segment)[1]:
            return None
        gone = isinstance(error, FileNotFoundError)
        note(report, [f"{segment_path(folder, segment).name} is missing: {len(appends)} appends with it" if gone else str(error)])
        return []
    if known is None:
        note(report, [f"{segment_path(folder, segment).name} is missing: {len(appends)} appends with it"])
        return []
    report.size_bytes += size
    report.num_sealed += 1
    if differs:
        note(report, [f"{path.name} has {size} bytes with checksum {found}, the ledger recorded {known.size_bytes} with {known.checksum}"])
    report.num_appends += len(batches)
    differ = [append_id for append_id, batch in batches if batch.num_rows != rows_recorded[append_id]]
    note(report, [f"{path.name}: append {append_id} has other than the {rows_recorded[append_id]} rows that the ledger recorded" for append_id in differ])
    return batches


def _sealed_now(ledger: Ledger, segment: int) -> tuple[SealedFile | None, bool]:
    """What the ledger says at this moment of a sealed segment, and whether retention removed it."""
    return next(((known, removed) for known, removed in ledger.segments() if known.segment == segment), (None, False))


def _appends_of(sealed: Sealed, appends: list[tuple[int, Location]]) -> Appends:
    return [(append_id, sealed.read(location.offset)) for append_id, location in appends]


def _removed(ledger: Ledger, appends: list[tuple[int, Location]], names: dict[str, int], endings: dict[tuple[str, str], int]) -> list[Column]:
    """What the ledger still knows of a removed segment's members, as :class:`Rows` with one row each."""
    rows = list(ledger.rows(_MEMBERS_OF, (appends[0][0], appends[-1][0])))
    ids = np.array([row[:6] for row in rows], np.int64).reshape(-1, 6).T
    oldest = np.array([UNSAMPLED if row[6] is None else row[6] for row in rows], np.int64)
    newest = np.array([-1 if row[7] is None else row[7] for row in rows], np.int64)
    numbers = np.array([row[8:11] for row in rows], np.int64).reshape(-1, 3).T
    reward, success = (np.array([np.nan if row[at] is None else row[at] for row in rows], np.float64) for at in (11, 15))
    ending = np.array([endings.setdefault(row[12:14], len(endings)) for row in rows], np.int64)
    env = np.array([names.setdefault(row[14], len(names)) for row in rows], np.int64)
    return [*ids, oldest, newest, *numbers, reward, success, ending, env]


def _columns(append_id: Column, batch: pa.RecordBatch, names: dict[str, int], endings: dict[tuple[str, str], int]) -> list[Column]:
    """One segment's part of :class:`Rows`, but for what the codes stand for."""
    column = {name: batch.column(name) for name in _READ}
    mask = Lists.of(column["loss_mask"])
    segments = segments_of(mask, *(column[name].to_pylist() for name in ("version_starts", "version_values")))
    ours = [[version for version, count in runs if count] for _, runs in segments]
    oldest = np.array([min(versions, default=UNSAMPLED) for versions in ours], np.int64)
    newest = np.array([max(versions, default=-1) for versions in ours], np.int64)
    status, reason = (column[name].dictionary_encode() for name in ("status", "stop_reason"))
    reasons = reason.dictionary.to_pylist()
    pairs = status.indices.to_numpy().astype(np.int64) * len(reasons) + reason.indices.to_numpy()
    found, at = np.unique(pairs, return_inverse=True)
    kinds = [(status.dictionary[pair // len(reasons)].as_py(), reasons[pair % len(reasons)]) for pair in found.tolist()]
    coded = column["env_id"].dictionary_encode()
    codes = np.array([names.setdefault(name, len(names)) for name in coded.dictionary.to_pylist()], np.int64)
    ids, numbers = (
        [column[name].to_numpy().astype(np.int64) for name in chosen] for chosen in (("group_id", "member", "attempt", "lineage"), ("task_index", "seed"))
    )
    return [
        append_id,
        *ids,
        np.array(mask.lengths, np.int64),
        oldest,
        newest,
        np.array([runs[0][1] if len(runs) == 1 else sum(count for _, count in runs) for _, runs in segments], np.int64),
        *numbers,
        column["reward"].to_numpy(zero_copy_only=False).astype(np.float64),
        _metric(column["env_metrics"], "success"),
        np.array([endings.setdefault(kind, len(endings)) for kind in kinds], np.int64)[at],
        codes[coded.indices.to_numpy()],
    ]


def _metric(maps: pa.Array, name: str) -> Column:
    """One value of a map column, NaN where a row has none."""
    offsets = maps.offsets.to_numpy().astype(np.int64)
    chosen = np.flatnonzero(np.array(maps.keys.to_pylist(), object) == name) if len(maps.keys) else np.empty(0, np.int64)
    values = np.full(len(maps), np.nan)
    values[np.searchsorted(offsets, chosen, side="right") - 1] = maps.items.to_numpy(zero_copy_only=False)[chosen]
    return values
