"""Closes the books of a run from the outside: everything the ledger claims is checked against the rows of the log.

Reads only, also beside a live buffer (the ledger is read as of one moment; what was appended later is not looked at). One pass over the log, over columns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import RunFolderError
from .amendments import REWARD, Amendment, places, read_amendments, recorded_amendments
from .audit_evaluations import check_evaluated, close_evaluations
from .audit_log import Column, Rows, read_log
from .audit_report import AuditReport, EnvBias, note
from .audit_tasks import check_tasks
from .bias import Bias
from .blob_store import blob_path, is_whole
from .evaluation_tables import FIRST_GROUP
from .ledger import Ledger
from .lineages import Lineages
from .tables import BatchRow

Ints = npt.NDArray[np.int64]


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
            check_tasks(ledger, report)
            bias = Bias(ledger, report.lineage)
            report.fates = {env_id: bias.fates(env_id) for env_id in bias.envs()}
            lineages = ledger.lineages()
            batches = list(ledger.batches(lineages.current))
            appends = list(ledger.locations())
            claims = close_evaluations(ledger, report)
            rows_recorded = dict(ledger.rows("SELECT append_id, num_rows FROM appends"))
            blobs: dict[str, int] = dict(ledger.rows("SELECT digest, size_bytes FROM blobs"))
            amendments, lie_at = recorded_amendments(ledger), places(ledger)
            held = {(row[0], row[1], row[2]): row[3] for row in ledger.rows("SELECT group_id, member, attempt, reward FROM members")} if amendments else {}
        amended = _check_amendments(read_amendments(folder / "amendments", ledger, lie_at), amendments, held, report)
        rows = read_log(folder / "stream", ledger, appends, rows_recorded, report)
        _check_blobs(folder / "blobs", ledger, blobs, rows.digests, report)
    finally:
        ledger.close()
    evaluated = rows.group_id >= FIRST_GROUP
    check_evaluated(claims, rows.where(evaluated), report)
    played = _per_trajectory(rows.where(~evaluated))
    _match_members(played, np.array(members, np.int64).reshape(-1, 4), report)
    for key, reward in amended.items():
        played.reward[played.key == key] = reward
    _check_batches(played, batches, lineages, failed, report)
    return report


def _check_blobs(folder: Path, ledger: Ledger, recorded: dict[str, int], named: set[str], report: AuditReport) -> None:
    """Every image that a row names is recorded, and every recorded one holds the bytes of its digest."""
    wrong = [f"blob {digest} is named by a row and recorded nowhere" for digest in sorted(named - recorded.keys())]
    for digest, size_bytes in recorded.items():
        path = blob_path(folder, digest)
        if is_whole(path, digest, size_bytes):
            report.num_blobs += 1
            report.blob_bytes += size_bytes
        elif next(iter(ledger.rows("SELECT 1 FROM blobs WHERE digest = ?", (digest,))), None) is not None:  # else retention removed it meanwhile
            wrong.append(f"blob {digest} {'does not match its digest' if path.exists() else 'is missing'}")
    note(report, wrong)


# --- the ledger alone ---------------------------------------------------------------------------------------------------------------


def _close_books(ledger: Ledger, report: AuditReport) -> None:
    """Counts per state; every lease in exactly one; batches and states agree."""
    lineages = ledger.lineages()
    report.forks, report.lineage, report.version = list(lineages.forks), lineages.current, int(ledger.meta("version") or 0)
    report.num_leased = ledger.num_groups()
    report.counts = {**dict.fromkeys(("open", "ready", "assigned", "trained", "dropped"), 0), **ledger.counts()}
    report.refused = refusals(ledger)
    report.drop_reasons = dict(ledger.rows("SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"))
    states: dict[int, tuple[str, int | None]] = {
        group_id: (state, version) for group_id, state, version in ledger.rows("SELECT group_id, state, version FROM groups")
    }
    recorded: Counter[int] = Counter()
    wrong: list[str] = []
    for batch in ledger.batches(report.lineage):
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
    note(report, wrong + [f"group {group_id} is in {recorded[group_id]} batches" for group_id in twice])
    _look_at_abandoned(ledger, lineages, report)
    in_batches = report.counts["assigned"] + report.counts["trained"]
    if in_batches != len(recorded):
        note(report, [f"{in_batches} groups are assigned or trained, the batches hold {len(recorded)}"])
    if report.num_batches < report.version:
        note(report, [f"version {report.version} was trained, only {report.num_batches} batches are recorded"])
    total = sum(report.counts.values())
    if total != report.num_leased or len(states) != report.num_leased:
        note(report, [f"{report.num_leased} groups leased, {total} accounted for"])
    _count_members(ledger, report)
    report.closes = not report.problems


def _look_at_abandoned(ledger: Ledger, lineages: Lineages, report: AuditReport) -> None:
    """What forks left behind: counted, and no group twice in the history of any lineage."""
    for batch in ledger.all_batches():
        if not lineages.shares(batch.lineage, batch.version):
            report.abandoned[batch.lineage] = report.abandoned.get(batch.lineage, 0) + 1
    for lineage in report.abandoned:
        times = Counter(group_id for batch in ledger.batches(lineage) for group_id in batch.groups)
        twice = sorted(group_id for group_id, number in times.items() if number > 1)
        report.duplicates += len(twice)
        note(report, [f"group {group_id} is in {times[group_id]} batches of the history of lineage {lineage}" for group_id in twice])


def _count_members(ledger: Ledger, report: AuditReport) -> None:
    """A group that no longer waits has each of its members once: finished, or recorded as one it was closed without."""
    report.num_unplayed = next(ledger.rows("SELECT count(*) FROM unplayed"))[0]
    query = """
        SELECT group_id, state, num_members, (SELECT count(*) FROM members m WHERE m.group_id = g.group_id) AS finished,
            (SELECT count(*) FROM unplayed u WHERE u.group_id = g.group_id) AS missing,
            (SELECT count(*) FROM members m JOIN unplayed u USING (group_id, member) WHERE m.group_id = g.group_id) AS both
        FROM groups g WHERE (state = 'open' AND missing > 0) OR (state != 'open' AND finished + missing != num_members) OR both > 0"""
    note(
        report,
        [
            f"group {group_id} is {state} with {finished} finished and {missing} unplayed of its {num_members} members, {both} of them both"
            for group_id, state, num_members, finished, missing, both in ledger.rows(query)
        ],
    )


def refusals(ledger: Ledger) -> dict[str, int]:
    """What the buffer refused over the whole run, by code."""
    counters = json.loads(ledger.meta("counters") or "{}")
    return {name.removeprefix("refused_"): count for name, count in sorted(counters.items()) if name.startswith("refused_")}


def _check_amendments(
    logged: Iterable[tuple[int, list[Amendment] | str]],
    recorded: list[tuple[int, Amendment]],
    held: Mapping[tuple[int, int, int], float | None],
    report: AuditReport,
) -> dict[int, float]:
    """Every amendment lies in its file as the ledger says, and every reward that came later is its member's; gives those, by key of the member.

    ``held`` are rewards by (group, member, attempt). What retention removed while the audit ran is not asked for.
    """
    found: dict[int, set[Amendment]] = {}
    for append_id, amendments in logged:
        if isinstance(amendments, str):
            note(report, [f"amendments {amendments}"])
        found[append_id] = set() if isinstance(amendments, str) else set(amendments)
    report.num_amendments = len(recorded)
    note(
        report,
        [
            f"the amendment of {amendment.name} is not in its log as the ledger has it"
            for append_id, amendment in recorded
            if append_id in found and amendment not in found[append_id]
        ],
    )
    rewards = {amendment[1:3]: amendment for _, amendment in recorded if amendment.column == REWARD and (*amendment[1:3], amendment.attempt) in held}
    for (group_id, member), amendment in rewards.items():
        reward = held[group_id, member, amendment.attempt]
        if reward != amendment.value:
            note(report, [f"group {group_id} member {member} has reward {reward}, amended was {amendment.value}"])
    return {group_id * _MEMBERS + member: amendment.value for (group_id, member), amendment in rewards.items()}


def _count_endings(ledger: Ledger, report: AuditReport) -> Ints:
    """Counts how committed members ended; returns the keys of those that failed."""
    for status, reason, count in ledger.rows("SELECT status, stop_reason, count(*) FROM members GROUP BY status, stop_reason ORDER BY stop_reason"):
        (report.failures if status == "failed" else report.endings)[reason] = count
    too_old = "SELECT count(*) FROM members JOIN groups USING (group_id) WHERE state = 'dropped' AND reason = 'age'"
    report.num_age_drops = next(ledger.rows(too_old))[0]
    report.repeated = dict(ledger.rows("SELECT reason, count(*) FROM failures GROUP BY reason ORDER BY reason"))
    failed = list(ledger.rows("SELECT group_id, member FROM members WHERE status = 'failed'"))
    return np.array([group_id * _MEMBERS + member for group_id, member in failed], np.int64)


# --- both -------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Played:
    """Columns over all stored trajectories, ``[M]`` each, in the order of (group, member); several attempts at one member lie side by side."""

    key: Column
    attempt: Column
    append_id: Column
    num_tokens: Column
    lineage: Column
    oldest: Column
    newest: Column
    sampled: Column
    reward: Column
    success: Column
    env: Column
    env_names: list[str]


_MEMBERS = 2**15  # members fit int16


def _per_trajectory(rows: Rows) -> _Played:
    order = np.lexsort((rows.attempt, rows.member, rows.group_id))
    key = (rows.group_id * _MEMBERS + rows.member)[order]
    attempt, append_id = rows.attempt[order], rows.append_id[order]
    new = np.append(True, (np.diff(key) != 0) | (np.diff(attempt) != 0) | (np.diff(append_id) != 0))[: len(key)]
    first = np.flatnonzero(new)
    if len(first) == 0:
        first = np.empty(0, np.int64)
        return _Played(key, attempt, append_id, key, key, key, key, key > 0, rows.reward, rows.success, key, rows.env_names)
    oldest = np.minimum.reduceat(rows.oldest[order], first)
    newest = np.maximum.reduceat(rows.newest[order], first)
    num_tokens = np.add.reduceat(rows.num_tokens[order], first)
    lineage, *rest = [column[order][first] for column in (rows.lineage, rows.reward, rows.success, rows.env)]
    reward, success, env = rest
    ids = (key[first], attempt[first], append_id[first])
    return _Played(*ids, num_tokens, lineage, oldest, newest, oldest <= newest, reward, success, env, rows.env_names)


def _match_members(played: _Played, members: Ints, report: AuditReport) -> None:
    """Every committed member has its rows, once; keeps in ``played`` only those rows."""
    report.num_trajectories = len(members)
    wanted = members[:, 0] * _MEMBERS + members[:, 1]
    place = np.searchsorted(wanted, played.key)
    place[place == len(wanted)] = 0
    known = np.zeros(len(played.key), bool)
    if len(wanted):
        known = (wanted[place] == played.key) & (members[place, 2] == played.attempt) & (members[place, 3] == played.append_id)
    missing = np.setdiff1d(wanted, played.key[known])
    note(report, [f"group {key // _MEMBERS} member {key % _MEMBERS} is committed, its rows are not in the log" for key in missing.tolist()])
    unclaimed = int(np.count_nonzero(~known))
    if unclaimed != 0:
        note(report, [f"{unclaimed} trajectories in the log belong to no committed member"])
    for name in ("key", "attempt", "append_id", "num_tokens", "lineage", "oldest", "newest", "sampled", "reward", "success", "env"):
        setattr(played, name, getattr(played, name)[known])
    twice = len(played.key) - len(np.unique(played.key))
    report.duplicates += twice
    if twice:
        note(report, [f"{twice} members have their rows in the log twice"])


def _check_batches(played: _Played, batches: list[BatchRow], lineages: Lineages, failed: Ints, report: AuditReport) -> None:
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
        lag = int((batch.version - 1 - _reckoned(played, live, lineages, batch.lineage)).max(initial=0))
        if lag > batch.lag_bound:
            note(report, [f"batch {batch.version} trains a lag of {lag}, allowed were {batch.lag_bound}"])
        if lag != batch.max_lag:
            note(report, [f"batch {batch.version} has a lag of {lag} by its rows, recorded was {batch.max_lag}"])
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


def _reckoned(played: _Played, rows: Ints, lineages: Lineages, learner: int) -> Column:
    """The version that the lag of each of ``rows`` counts from, for a learner of that lineage; see :meth:`Lineages.reckoned`."""
    oldest = played.oldest[rows].copy()
    for lineage in np.unique(played.lineage[rows]).tolist():
        if lineage != learner:
            foreign = played.lineage[rows] == lineage
            oldest[foreign] = np.minimum(oldest[foreign], 2 * lineages.common(lineage, learner) - played.newest[rows][foreign])
    return oldest


def _mean(values: Column) -> float:
    """Mean of the values that are given, NaN where none is."""
    given = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    return float(given.mean()) if len(given) else float("nan")
