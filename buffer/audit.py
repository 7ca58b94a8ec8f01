"""Closes the books of a run from the outside: everything the ledger claims is checked against the rows of the log.

Reads only, also beside a live buffer (the ledger is read as of one moment; what was appended later is not looked at). One pass over the log, over columns.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import Corrupt, RunFolderError
from .audit_report import AuditReport, EnvBias
from .columns import SCHEMA_MESSAGE, from_frame
from .facts import Lists, sampled
from .ledger import BatchRow, Ledger
from .log import Location, segment_path
from .sealed import Sealed, SealedFile, file_checksum, sealed_path

Ints = npt.NDArray[np.int64]
Column = npt.NDArray[Any]

_READ = ("group_id", "member", "attempt", "env_id", "reward", "env_metrics", "loss_mask", "version_starts", "version_values")
_UNSAMPLED = np.iinfo(np.int32).max
_MAX_NAMED = 5  # problems of one kind that are spelled out


def audit(folder: Path) -> AuditReport:
    """Audits the run in ``folder``.

    Raises:
        RunFolderError: there is no ledger.

    """
    path = folder / "ledger.sqlite"
    if not path.is_file():
        raise RunFolderError(f"{folder} holds no ledger.sqlite: nothing was streamed there yet")
    report = AuditReport(folder)
    ledger = Ledger(path, None, read_only=True)
    try:
        with ledger.snapshot():
            _close_books(ledger, report)
            members = list(ledger.rows("SELECT group_id, member, attempt, append_id FROM members ORDER BY group_id, member"))
            failed = _count_endings(ledger, report)
            batches = list(ledger.batches(report.lineage, 1, 2**62))
            discarded = list(ledger.rows("SELECT group_id, member, attempt, append_id FROM discarded"))
            appends = list(ledger.locations())
            rows_recorded = dict(ledger.rows("SELECT append_id, num_rows FROM appends"))
        rows = _read_log(folder / "stream", ledger, appends, rows_recorded, report)
    finally:
        ledger.close()
    played = _per_trajectory(rows)
    _match_members(played, np.array(members, np.int64).reshape(-1, 4), np.array(discarded, np.int64).reshape(-1, 4), report)
    _check_batches(played, batches, failed, report)
    return report


# --- the ledger alone ---------------------------------------------------------------------------------------------------------------


def _close_books(ledger: Ledger, report: AuditReport) -> None:
    """Counts per state; every lease in exactly one; batches and states agree."""
    report.lineage, report.version = int(ledger.meta("lineage") or 0), int(ledger.meta("version") or 0)
    report.num_leased = ledger.num_groups()
    report.counts = {**dict.fromkeys(("open", "ready", "assigned", "trained", "dropped"), 0), **ledger.counts()}
    report.drop_reasons = dict(ledger.rows("SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"))
    states: dict[int, tuple[str, int | None]] = {
        group_id: (state, version) for group_id, state, version in ledger.rows("SELECT group_id, state, version FROM groups")
    }
    recorded: Counter[int] = Counter()
    wrong: list[str] = []
    for batch in ledger.batches(report.lineage, 1, 2**62):
        report.num_batches += 1
        recorded.update(batch.groups)
        wanted = "trained" if batch.version <= report.version else "assigned"
        wrong.extend(
            f"group {group_id} of batch {batch.version} is {states.get(group_id, ('unknown', None))[0]} instead of {wanted}"
            for group_id in batch.groups
            if states.get(group_id) != (wanted, batch.version)
        )
    twice = sorted(group_id for group_id, times in recorded.items() if times > 1)
    report.duplicates += len(twice)
    _note(report, wrong + [f"group {group_id} is in {recorded[group_id]} batches" for group_id in twice])
    in_batches = report.counts["assigned"] + report.counts["trained"]
    if in_batches != len(recorded):
        _note(report, [f"{in_batches} groups are assigned or trained, the batches hold {len(recorded)}"])
    if report.num_batches < report.version:
        _note(report, [f"version {report.version} was trained, only {report.num_batches} batches are recorded"])
    total = sum(report.counts.values())
    if total != report.num_leased or len(states) != report.num_leased:
        _note(report, [f"{report.num_leased} groups leased, {total} accounted for"])
    report.closes = not report.problems


def _count_endings(ledger: Ledger, report: AuditReport) -> Ints:
    """Counts how committed members ended; returns the keys of those that failed."""
    for status, reason, count in ledger.rows("SELECT status, stop_reason, count(*) FROM members GROUP BY status, stop_reason ORDER BY stop_reason"):
        (report.failures if status == "failed" else report.endings)[reason] = count
    report.num_repeated = next(iter(ledger.rows("SELECT count(*) FROM failures")))[0]
    failed = list(ledger.rows("SELECT group_id, member FROM members WHERE status = 'failed'"))
    return np.array([group_id * _MEMBERS + member for group_id, member in failed], np.int64)


# --- the log ------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rows:
    """Columns over all rows of the log, ``[N]`` each; ``oldest`` is above ``newest`` where nothing was sampled."""

    append_id: Column
    group_id: Column
    member: Column
    attempt: Column
    num_tokens: Column
    oldest: Column
    newest: Column
    reward: Column
    success: Column
    env: Column
    env_names: list[str]


def _read_log(folder: Path, ledger: Ledger, appends: Iterable[tuple[int, Location]], rows_recorded: dict[int, int], report: AuditReport) -> _Rows:
    """Every recorded append, its checksum verified, one segment at a time."""
    parts: list[list[Column]] = []
    names: dict[str, int] = {}
    by_segment: dict[int, list[tuple[int, Location]]] = {}
    for append_id, location in appends:
        by_segment.setdefault(location.segment, []).append((append_id, location))
    for segment, found in sorted(by_segment.items()):
        batches = _read_segment(segment_path(folder, segment), found, rows_recorded, report)
        if batches is None:  # sealed, maybe at this very moment: the ledger knows before the original goes
            sealed = {known.segment: (known, removed) for known, removed in ledger.segments()}
            batches = _read_sealed(folder, sealed.get(segment), found, rows_recorded, report)
            if batches is None:
                parts.append(_removed(ledger, found, names))
                report.num_removed += len(parts[-1][0])
                continue
        if batches:
            table = pa.Table.from_batches([batch.select(_READ) for _, batch in batches]).combine_chunks()
            ids = np.repeat(np.array([append_id for append_id, _ in batches]), [batch.num_rows for _, batch in batches])
            parts.append(_columns(ids, table.to_batches()[0], names))
    for path in folder.glob("*.arrows"):
        if int(path.stem) not in by_segment:
            report.unrecorded_bytes += max(0, path.stat().st_size - len(SCHEMA_MESSAGE))
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.empty(0, np.int64)] * 10
    report.num_rows = len(joined[0]) - report.num_removed
    return _Rows(*joined, env_names=list(names))


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
        _note(report, [f"{path.name} holds {size} bytes, the ledger recorded {end}"])
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
    _note(report, damaged)
    return batches


def _read_sealed(
    folder: Path, known: tuple[SealedFile, bool] | None, appends: list[tuple[int, Location]], rows_recorded: dict[int, int], report: AuditReport
) -> Appends | None:
    """The appends of a sealed segment, the whole file checked against the ledger; None where retention removed it."""
    path = sealed_path(folder, appends[0][1].segment)
    if known is not None and known[1]:
        return None
    if known is None or not path.is_file():
        _note(report, [f"{segment_path(folder, appends[0][1].segment).name} is missing: {len(appends)} appends with it"])
        return []
    found, size = file_checksum(path), path.stat().st_size
    report.size_bytes += size
    report.num_sealed += 1
    if (found, size) != (known[0].checksum, known[0].size_bytes):
        _note(report, [f"{path.name} has {size} bytes with checksum {found}, the ledger recorded {known[0].size_bytes} with {known[0].checksum}"])
        return []
    try:
        sealed = Sealed(path)
        batches = [(append_id, sealed.read(location.offset)) for append_id, location in appends]
    except Corrupt as error:
        _note(report, [str(error)])
        return []
    report.num_appends += len(batches)
    differ = [append_id for append_id, batch in batches if batch.num_rows != rows_recorded[append_id]]
    _note(report, [f"{path.name}: append {append_id} has other than the {rows_recorded[append_id]} rows that the ledger recorded" for append_id in differ])
    return batches


def _removed(ledger: Ledger, appends: list[tuple[int, Location]], names: dict[str, int]) -> list[Column]:
    """What the ledger still knows of a removed segment's members, as :class:`_Rows` with one row each."""
    query = (
        "SELECT append_id, group_id, member, members.attempt, num_tokens, min_version, max_version, reward, env_id FROM members JOIN groups USING (group_id) "
        "WHERE append_id BETWEEN ? AND ?"
    )
    rows = list(ledger.rows(query, (appends[0][0], appends[-1][0])))
    ids = np.array([row[:5] for row in rows], np.int64).reshape(-1, 5).T
    oldest = np.array([_UNSAMPLED if row[5] is None else row[5] for row in rows], np.int64)
    newest = np.array([-1 if row[6] is None else row[6] for row in rows], np.int64)
    reward = np.array([np.nan if row[7] is None else row[7] for row in rows], np.float64)
    env = np.array([names.setdefault(row[8], len(names)) for row in rows], np.int64)
    return [*ids, oldest, newest, reward, np.full(len(rows), np.nan), env]


def _columns(append_id: Ints, batch: pa.RecordBatch, names: dict[str, int]) -> list[Column]:
    """One segment's part of :class:`_Rows`, but for the names of environments."""
    column = {name: batch.column(name) for name in _READ}
    mask = Lists.of(column["loss_mask"])
    oldest, newest, _ = sampled(mask, Lists.of(column["version_starts"]), Lists.of(column["version_values"]))
    coded = column["env_id"].dictionary_encode()
    codes = np.array([names.setdefault(name, len(names)) for name in coded.dictionary.to_pylist()], np.int64)
    ids = [column[name].to_numpy().astype(np.int64) for name in ("group_id", "member", "attempt")]
    reward = column["reward"].to_numpy(zero_copy_only=False).astype(np.float64)
    return [append_id, *ids, mask.lengths, oldest, newest, reward, _metric(column["env_metrics"], "success"), codes[coded.indices.to_numpy()]]


def _metric(maps: pa.Array, name: str) -> Column:
    """One value of a map column, NaN where a row has none."""
    offsets = maps.offsets.to_numpy().astype(np.int64)
    chosen = np.flatnonzero(np.array(maps.keys.to_pylist(), object) == name) if len(maps.keys) else np.empty(0, np.int64)
    values = np.full(len(maps), np.nan)
    values[np.searchsorted(offsets, chosen, side="right") - 1] = maps.items.to_numpy(zero_copy_only=False)[chosen]
    return values


# --- both -------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Played:
    """Columns over all stored trajectories, ``[M]`` each, in the order of (group, member); several attempts at one member lie side by side."""

    key: Column
    attempt: Column
    append_id: Column
    num_tokens: Column
    oldest: Column
    sampled: Column
    reward: Column
    success: Column
    env: Column
    env_names: list[str]


_MEMBERS = 2**15  # members fit int16


def _per_trajectory(rows: _Rows) -> _Played:
    order = np.lexsort((rows.attempt, rows.member, rows.group_id))
    key = (rows.group_id * _MEMBERS + rows.member)[order]
    attempt, append_id = rows.attempt[order], rows.append_id[order]
    new = np.append(True, (np.diff(key) != 0) | (np.diff(attempt) != 0) | (np.diff(append_id) != 0))[: len(key)]
    first = np.flatnonzero(new)
    if len(first) == 0:
        first = np.empty(0, np.int64)
        return _Played(key, attempt, append_id, key, key, key > 0, rows.reward, rows.success, key, rows.env_names)
    oldest = np.minimum.reduceat(rows.oldest[order], first)
    newest = np.maximum.reduceat(rows.newest[order], first)
    num_tokens = np.add.reduceat(rows.num_tokens[order], first)
    rest = [column[order][first] for column in (rows.reward, rows.success, rows.env)]
    return _Played(key[first], attempt[first], append_id[first], num_tokens, oldest, oldest <= newest, *rest, env_names=rows.env_names)


def _match_members(played: _Played, members: Ints, discarded: Ints, report: AuditReport) -> None:
    """Every committed member has its rows, once; keeps in ``played`` only those rows. ``discarded`` rows were given up when power was lost."""
    report.num_trajectories = len(members)
    wanted = members[:, 0] * _MEMBERS + members[:, 1]
    place = np.searchsorted(wanted, played.key)
    place[place == len(wanted)] = 0
    known = np.zeros(len(played.key), bool)
    if len(wanted):
        known = (wanted[place] == played.key) & (members[place, 2] == played.attempt) & (members[place, 3] == played.append_id)
    missing = np.setdiff1d(wanted, played.key[known])
    _note(report, [f"group {key // _MEMBERS} member {key % _MEMBERS} is committed, its rows are not in the log" for key in missing.tolist()])
    unclaimed = int(np.count_nonzero(~known)) - len(discarded)
    if unclaimed != 0:
        _note(report, [f"{unclaimed} trajectories in the log belong to no committed member"])
    for name in ("key", "attempt", "append_id", "num_tokens", "oldest", "sampled", "reward", "success", "env"):
        setattr(played, name, getattr(played, name)[known])
    twice = len(played.key) - len(np.unique(played.key))
    report.duplicates += twice
    if twice:
        _note(report, [f"{twice} members have their rows in the log twice"])


def _check_batches(played: _Played, batches: list[BatchRow], failed: Ints, report: AuditReport) -> None:
    """Recomputes the lag of everything that was trained, and compares what was trained with what was played. ``failed`` are keys of members."""
    trained = np.zeros(len(played.key), bool)
    for batch in batches:
        report.lag_bound = max(report.lag_bound, batch.lag_bound)
        report.num_age_drops += len(batch.withheld)
        groups = np.sort(np.array(batch.groups, np.int64))
        spans = zip(np.searchsorted(played.key, groups * _MEMBERS).tolist(), np.searchsorted(played.key, (groups + 1) * _MEMBERS).tolist(), strict=True)
        inside = np.concatenate([np.arange(start, stop) for start, stop in spans]) if batch.groups else np.empty(0, np.int64)
        withheld = np.isin(played.key[inside], [group_id * _MEMBERS + member for group_id, member in batch.withheld])
        live = inside[~withheld & played.sampled[inside]]
        lag = int((batch.version - 1 - played.oldest[live]).max(initial=0))
        if lag > batch.lag_bound:
            _note(report, [f"batch {batch.version} trains a lag of {lag}, allowed were {batch.lag_bound}"])
        if lag != batch.max_lag:
            _note(report, [f"batch {batch.version} has a lag of {lag} by its rows, recorded was {batch.max_lag}"])
        if batch.version <= report.version:
            report.max_lag_trained = max(report.max_lag_trained, lag)
            trained[inside[~withheld]] = True
    trained &= ~np.isin(played.key, failed)
    report.num_trained = int(np.count_nonzero(trained))
    for code, name in enumerate(played.env_names):
        here = played.env == code
        report.bias[name] = EnvBias(
            int(np.count_nonzero(here)),
            int(np.count_nonzero(here & trained)),
            *(_mean(column[chosen]) for column in (played.num_tokens, played.reward, played.success) for chosen in (here, here & trained)),
        )


def _mean(values: Column) -> float:
    """Mean of the values that are given, NaN where none is."""
    given = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    return float(given.mean()) if len(given) else float("nan")


def _note(report: AuditReport, problems: list[str]) -> None:
    report.problems.extend(problems[:_MAX_NAMED])
    if len(problems) > _MAX_NAMED:
        report.problems.append(f"… and {len(problems) - _MAX_NAMED} more of that kind")
