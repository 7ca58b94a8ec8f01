"""Closes the books of evaluations, apart from those of what trains: every group in one state, every member's rows in the log, each of the pinned version."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .audit_log import Rows
from .audit_report import AuditReport, note
from .evaluation_tables import FIRST_GROUP
from .ledger import Ledger

_MEMBERS = 2**15  # members fit int16
_GROUPS = "SELECT evaluation_id, g.state, count(*) FROM evaluation_groups g GROUP BY evaluation_id, g.state"
_UNFINISHED = """
SELECT g.group_id, g.num_members, count(m.member) FROM evaluation_groups g LEFT JOIN evaluation_members m USING (group_id)
WHERE g.state = 'done' GROUP BY g.group_id HAVING count(m.member) != g.num_members
"""
_CLAIMS = """
SELECT m.group_id, m.member, m.attempt, m.append_id, e.version, e.lineage FROM evaluation_members m
JOIN evaluation_groups USING (group_id) JOIN evaluations e USING (evaluation_id) ORDER BY m.group_id, m.member
"""


@dataclass(frozen=True, slots=True)
class Claims:
    """Members that the ledger has of evaluations, ``[M, 6]``: group, member, attempt, append, pinned version, lineage."""

    members: npt.NDArray[np.int64]


def close_evaluations(ledger: Ledger, report: AuditReport) -> Claims:
    """Counts evaluations and their groups per state; reads only the ledger."""
    wrong: list[str] = []
    found = list(ledger.rows("SELECT evaluation_id, lineage, version, state, reason, num_groups FROM evaluations ORDER BY evaluation_id"))
    report.evaluations = dict(Counter(state for _, _, _, state, _, _ in found))
    report.evaluation_reasons = [f"version {version}: {reason}" for _, _, version, _, reason, _ in found if reason]
    states: dict[int, Counter[str]] = {}
    for evaluation_id, state, count in ledger.rows(_GROUPS):
        states.setdefault(evaluation_id, Counter())[state] += count
        report.evaluation_groups[state] = report.evaluation_groups.get(state, 0) + count
    for evaluation_id, _, version, state, _, num_groups in found:
        groups = states.pop(evaluation_id, Counter())
        closed_wrongly = (state == "done" and groups["done"] != num_groups) or (state in ("skipped", "dropped") and groups["open"])
        if groups.total() != num_groups or closed_wrongly:
            wrong.append(f"the evaluation of version {version} is {state} with {num_groups} groups, of which {dict(groups)} are accounted for")
    wrong += [f"{groups.total()} groups belong to evaluation {evaluation_id}, which does not exist" for evaluation_id, groups in states.items()]
    wrong += [
        f"evaluation group {group_id - FIRST_GROUP} is done with {num_done} of {num_members} members"
        for group_id, num_members, num_done in ledger.rows(_UNFINISHED)
    ]
    twice = Counter((lineage, version) for _, lineage, version, state, _, _ in found if state in ("open", "done"))
    wrong += [f"version {version} of lineage {lineage} is evaluated {times} times" for (lineage, version), times in twice.items() if times > 1]
    note(report, wrong)
    report.closes = report.closes and not wrong
    return Claims(np.array(list(ledger.rows(_CLAIMS)), np.int64).reshape(-1, 6))


def check_evaluated(claims: Claims, rows: Rows, report: AuditReport) -> None:
    """Every member has its rows, once, and no token of another version; ``rows`` are those of evaluations."""
    members = claims.members
    report.num_evaluated = len(members)
    wanted = (members[:, 0] - FIRST_GROUP) * _MEMBERS + members[:, 1]
    key = (rows.group_id - FIRST_GROUP) * _MEMBERS + rows.member
    place = np.searchsorted(wanted, key)
    place[place == len(wanted)] = 0
    known = np.zeros(len(key), bool)
    if len(wanted):
        known = (wanted[place] == key) & (members[place, 2] == rows.attempt) & (members[place, 3] == rows.append_id)
    missing = np.setdiff1d(wanted, key[known])
    note(report, [f"evaluation group {one // _MEMBERS} member {one % _MEMBERS} is committed, its rows are not in the log" for one in missing.tolist()])
    if unclaimed := int(np.count_nonzero(~known)):
        note(report, [f"{unclaimed} rows of evaluations belong to no committed member"])
    pinned = members[place[known], 4] if len(wanted) else np.empty(0, np.int64)
    oldest, newest = rows.oldest[known], rows.newest[known]
    other = (oldest <= newest) & ((oldest != pinned) | (newest != pinned))
    if strays := int(np.count_nonzero(other)):
        note(report, [f"{strays} rows of evaluations hold tokens of another version than the one they are pinned to"])
