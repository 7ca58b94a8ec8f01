"""Closes the books of a run from the outside: everything the ledger claims is checked against the rows of the log.

Reads only, also beside a live buffer (the ledger is read as of one moment; what was appended later is not looked at). One pass over the log, over columns.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import RunFolderError
from .amendments import REWARD, Amendment, places, read_amendments, recorded_amendments
from .audit_batches import check_batches, check_bounds
from .audit_evaluations import check_evaluated, close_evaluations
from .audit_log import read_log
from .audit_members import MEMBERS, Amended, compare_groups, compare_members, match_members, per_trajectory, read_members
from .audit_report import AuditReport, note
from .audit_tasks import check_tasks
from .bias import Bias
from .blob_store import blob_path, is_whole
from .evaluation_tables import FIRST_GROUP
from .ledger import Ledger
from .lineages import Lineages
from .log import refuse_without_ledger
from .recovery import newest_version, refuse_older

Ints = npt.NDArray[np.int64]


def audit(folder: Path) -> AuditReport:
    """Audits the run in ``folder``.

    Raises:
        RunFolderError: there is no ledger, or it was lost.

    """
    path = folder / "ledger.sqlite"
    if not path.is_file():
        refuse_without_ledger(folder / "stream", path)
        raise RunFolderError(f"{folder} holds no ledger.sqlite: nothing was streamed there yet")
    report = AuditReport(folder)
    try:
        _audit(folder, Ledger(path, None, read_only=True, log_folder=folder / "stream"), report)
    except sqlite3.OperationalError:
        raise
    except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
        report.closes = False
        note(report, [f"{path.name} is damaged, the audit ends here: {error}"])
    return report


def _audit(folder: Path, ledger: Ledger, report: AuditReport) -> None:
    newest = newest_version(folder / "checkpoints")  # before the moment that the ledger is read of
    try:
        with ledger.snapshot():
            _compare_checkpoint(ledger, newest, report)
            note(report, [f"ledger.sqlite: {found}" for (found,) in ledger.rows("PRAGMA quick_check") if found != "ok"])
            _close_books(ledger, report)
            members = read_members(ledger)
            failed = _count_endings(ledger, report)
            check_tasks(ledger, report)
            bias = Bias(ledger, report.lineage)
            report.fates = {env_id: bias.fates(env_id) for env_id in bias.envs()}
            lineages = ledger.lineages()
            batches, every_batch = list(ledger.batches(lineages.current)), ledger.all_batches()
            appends = list(ledger.locations())
            evaluated, pinned = close_evaluations(ledger, report)
            rows_recorded = dict(ledger.rows("SELECT append_id, num_rows FROM appends"))
            blobs: dict[str, int] = dict(ledger.rows("SELECT digest, size_bytes FROM blobs"))
            amendments, lie_at = recorded_amendments(ledger), places(ledger)
        amended = _check_amendments(read_amendments(folder / "amendments", ledger, lie_at), amendments, report)
        rows = read_log(folder / "stream", ledger, appends, rows_recorded, report)
        _check_blobs(folder / "blobs", ledger, blobs, rows.digests, report)
    finally:
        ledger.close()
    evaluates = rows.group_id >= FIRST_GROUP
    check_evaluated(per_trajectory(rows.where(evaluates)), evaluated, pinned, report)
    played = per_trajectory(rows.where(~evaluates))
    report.num_trajectories = len(members.key)
    place, lost = match_members(played, members, report)
    compare_members(played, place, members, report, amended)
    compare_groups(played, members, report)
    check_bounds(folder, every_batch, report)
    check_batches(played, batches, lineages, lost, failed, report)


def _compare_checkpoint(ledger: Ledger, newest: int, report: AuditReport) -> None:
    try:
        refuse_older(ledger, newest)
    except RunFolderError as error:
        note(report, [str(error)])


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
        for group_id in batch.groups:
            state, version = states.get(group_id, ("unknown", None))
            if state != wanted:
                wrong.append(f"group {group_id} of batch {batch.version} is {state} instead of {wanted}")
            elif version != batch.version:
                wrong.append(f"group {group_id} of batch {batch.version} is {state} as one of batch {version}")
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


def _check_amendments(logged: Iterable[tuple[int, list[Amendment] | str]], recorded: list[tuple[int, Amendment]], report: AuditReport) -> Amended:
    """Every amendment lies in its file as the ledger says; gives the rewards among them. What retention removed while the audit ran is not asked for."""
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
    rewards = [amendment for _, amendment in recorded if amendment.column == REWARD]
    keys = np.array([amendment.group_id * MEMBERS + amendment.member for amendment in rewards], np.int64)
    return Amended(keys, np.array([amendment.attempt for amendment in rewards]), np.array([amendment.value for amendment in rewards], np.float64))


def _count_endings(ledger: Ledger, report: AuditReport) -> Ints:
    """Counts how committed members ended; returns the keys of those that failed."""
    for status, reason, count in ledger.rows("SELECT status, stop_reason, count(*) FROM members GROUP BY status, stop_reason ORDER BY stop_reason"):
        (report.failures if status == "failed" else report.endings)[reason] = count
    too_old = "SELECT count(*) FROM members JOIN groups USING (group_id) WHERE state = 'dropped' AND reason = 'age'"
    report.num_age_drops = next(ledger.rows(too_old))[0]
    report.repeated = dict(ledger.rows("SELECT reason, count(*) FROM failures GROUP BY reason ORDER BY reason"))
    failed = list(ledger.rows("SELECT group_id, member FROM members WHERE status = 'failed'"))
    return np.array([group_id * MEMBERS + member for group_id, member in failed], np.int64)
