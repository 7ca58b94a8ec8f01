"""Closes the books of evaluations, apart from those of what trains: every group in one state, every member's rows in the log, each of the pinned version."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from .audit_members import Members, Played, compare_groups, compare_members, match_members, read_members
from .audit_report import AuditReport, note
from .evaluation_tables import FIRST_GROUP
from .ledger import Ledger

Ints = npt.NDArray[np.int64]

_GROUPS = "SELECT evaluation_id, g.state, count(*) FROM evaluation_groups g GROUP BY evaluation_id, g.state"
_UNFINISHED = """
SELECT g.group_id, g.num_members, count(m.member) FROM evaluation_groups g LEFT JOIN evaluation_members m USING (group_id)
WHERE g.state = 'done' GROUP BY g.group_id HAVING count(m.member) != g.num_members
"""
_PINNED = """
SELECT e.version FROM evaluation_members m JOIN evaluation_groups USING (group_id) JOIN evaluations e USING (evaluation_id) ORDER BY m.group_id, m.member
"""


def close_evaluations(ledger: Ledger, report: AuditReport) -> tuple[Members, Ints]:
    """Counts evaluations and their groups per state; reads only the ledger. Gives their members, and the version that each is pinned to, ``[M]``."""
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
    return read_members(ledger, evaluated=True), np.array([version for (version,) in ledger.rows(_PINNED)], np.int64)


def check_evaluated(played: Played, members: Members, pinned: Ints, report: AuditReport) -> None:
    """Every member has its rows, once, the ledger says what they say, and no token is of another version; ``played`` are those of evaluations."""
    report.num_evaluated = len(members.key)
    place, _ = match_members(played, members, report)
    compare_members(played, place, members, report)
    compare_groups(played, members, report)
    wanted = pinned[place]
    if strays := int(np.count_nonzero(played.sampled & ((played.oldest != wanted) | (played.newest != wanted)))):
        note(report, [f"{strays} trajectories of evaluations hold tokens of another version than the one they are pinned to"])
