"""Compares what the ledger says of every member, and of its group, with the rows of the log.

Vectorised over the whole run: columns over trajectories on one side, columns of the ledger's tables on the other. What retention removed comes from the ledger
(see ``audit_log``) and so agrees with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .audit_log import UNSAMPLED, Column, Rows
from .audit_report import AuditReport, note
from .evaluation_tables import FIRST_GROUP
from .ledger import Ledger

MEMBERS = 2**15
"""Members fit int16: a member's key is its group times this, and itself."""

_SAID = "num_tokens, num_trained_tokens, min_version, max_version, m.status, stop_reason, reward"
_COMMITTED = f"SELECT group_id * {MEMBERS} + member, attempt, append_id, lineage, {_SAID} FROM members m ORDER BY group_id, member"  # noqa: S608 - our own names
_EVALUATED = f"""
SELECT group_id * {MEMBERS} + member, m.attempt, append_id, e.lineage, {_SAID}, success
FROM evaluation_members m JOIN evaluation_groups USING (group_id) JOIN evaluations e USING (evaluation_id) ORDER BY group_id, member"""  # noqa: S608
_LEASED = """
SELECT group_id, env_id, task_index, seed, attempt, lineage, admit_version, CASE WHEN state IN ('assigned', 'trained') THEN version END
FROM groups ORDER BY group_id"""
_ASKED = "SELECT group_id, env_id, task_index, seed, attempt, NULL, NULL, NULL FROM evaluation_groups ORDER BY group_id"
_COLUMNS = (
    *("key", "attempt", "append_id", "lineage", "num_tokens", "num_trained_tokens", "min_version", "max_version"),
    *("status", "stop_reason", "reward", "success"),
)
_GROUP_COLUMNS = ("group_id", "env_id", "task_index", "seed", "attempt", "lineage", "admit_version", "version")


@dataclass(frozen=True, slots=True)
class Members:
    """What the ledger has: of members by (group, member), ``[M]`` each, and of their groups, ``[G]`` each. ``columns`` and ``groups`` are as they lie there."""

    kind: Literal["group", "evaluation group"]
    key: Column
    attempt: Column
    append_id: Column
    columns: Mapping[str, Sequence[Any]]
    groups: Mapping[str, Sequence[Any]]

    def name(self, key: int) -> str:
        """How messages call a member."""
        return f"{self.group_name(key // MEMBERS)} member {key % MEMBERS}"

    def group_name(self, group_id: int) -> str:
        """How messages call a group."""
        return f"{self.kind} {group_id - FIRST_GROUP if self.kind != 'group' else group_id}"


def read_members(ledger: Ledger, *, evaluated: bool = False) -> Members:
    """The members and groups of training, or those of evaluations."""
    columns = _turned(ledger.rows(_EVALUATED if evaluated else _COMMITTED), _COLUMNS if evaluated else _COLUMNS[:-1])
    groups = _turned(ledger.rows(_ASKED if evaluated else _LEASED), _GROUP_COLUMNS)
    key, attempt, append_id = (np.array(columns[name], np.int64) for name in ("key", "attempt", "append_id"))
    return Members("evaluation group" if evaluated else "group", key, attempt, append_id, columns, groups)


@dataclass(frozen=True, slots=True)
class Amended:
    """Rewards that came later, ``[A]`` each: key and attempt of the member, and the reward."""

    key: Column
    attempt: Column
    reward: Column


def _turned(rows: Any, names: Sequence[str]) -> dict[str, Sequence[Any]]:
    return dict(zip(names, list(zip(*rows, strict=True)) or [()] * len(names), strict=True))


@dataclass(slots=True)
class Played:
    """Columns over all stored trajectories, ``[M]`` each, in the order of (group, member); several attempts at one member lie side by side."""

    key: Column
    attempt: Column
    append_id: Column
    num_tokens: Column
    num_trained_tokens: Column
    oldest: Column
    newest: Column
    lineage: Column
    task_index: Column
    seed: Column
    reward: Column
    success: Column
    ending: Column
    env: Column
    env_names: list[str]
    endings: list[tuple[str, str]]

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Whether our policy sampled anything."""
        return self.oldest <= self.newest

    def keep(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Forgets the others."""
        for name in ("key", "attempt", "append_id", *_SUMMED, *_FIRST):
            setattr(self, name, getattr(self, name)[chosen])


_SUMMED: dict[str, Any] = {"num_tokens": np.add, "num_trained_tokens": np.add, "oldest": np.minimum, "newest": np.maximum}
_FIRST = ("lineage", "task_index", "seed", "reward", "success", "ending", "env")


def per_trajectory(rows: Rows) -> Played:
    """The rows of each trajectory as one."""
    order = np.lexsort((rows.attempt, rows.member, rows.group_id))
    ids = [column[order] for column in (rows.group_id * MEMBERS + rows.member, rows.attempt, rows.append_id)]
    first = np.flatnonzero(np.append(True, np.any([np.diff(column) != 0 for column in ids], axis=0))[: len(order)])
    columns = {name: getattr(rows, name)[order] for name in (*_SUMMED, *_FIRST)}
    summed = {name: sum_up.reduceat(columns[name], first) if len(first) else columns[name] for name, sum_up in _SUMMED.items()}
    return Played(
        *(column[first] for column in ids), **summed, **{name: columns[name][first] for name in _FIRST}, env_names=rows.env_names, endings=rows.endings
    )


def match_members(played: Played, members: Members, report: AuditReport) -> tuple[Column, Column]:
    """Every committed member has its rows, once; keeps in ``played`` only those rows.

    Gives the place in ``members`` of each trajectory that is kept, ``[M]``, and the keys of members without rows.
    """
    place = np.searchsorted(members.key, played.key)
    place[place == len(members.key)] = 0
    known = np.zeros(len(played.key), bool)
    if len(members.key):
        known = (members.key[place] == played.key) & (members.attempt[place] == played.attempt) & (members.append_id[place] == played.append_id)
    missing = np.setdiff1d(members.key, played.key[known])
    note(report, [f"{members.name(key)} is committed, its rows are not in the log" for key in missing.tolist()])
    if unclaimed := int(np.count_nonzero(~known)):
        note(report, [f"{unclaimed} trajectories {'of evaluations ' * (members.kind != 'group')}in the log belong to no committed member"])
    played.keep(known)
    twice = len(played.key) - len(np.unique(played.key))
    report.duplicates += twice
    if twice:
        note(report, [f"{twice} members have their rows in the log twice"])
    return place[known], missing


def compare_members(played: Played, place: Column, members: Members, report: AuditReport, amended: Amended | None = None) -> None:
    """Everything the ledger says of a member is what its rows say; ``place`` are their places in ``members``.

    A reward that came later counts instead of the row's, also in ``played``.
    """
    came_later = np.zeros(len(played.key), bool)
    if amended is not None and len(played.key):
        at = np.minimum(np.searchsorted(played.key, amended.key), len(played.key) - 1)
        about = (played.key[at] == amended.key) & (played.attempt[at] == amended.attempt)
        came_later[at[about]] = True
        played.reward[at[about]] = amended.reward[about]
    if members.kind == "group":  # an evaluated one has the lineage of its evaluation
        _differ(members, played.key, place, "lineage", played.lineage, report)
    _differ(members, played.key, place, "num_tokens", played.num_tokens, report)
    _differ(members, played.key, place, "num_trained_tokens", played.num_trained_tokens, report)
    for name, versions in (("min_version", played.oldest), ("max_version", played.newest)):
        _differ(members, played.key, place, name, np.where(played.sampled, versions, np.nan), report)
    _differ(members, played.key, place, "reward", played.reward, report, came_later)
    if members.kind != "group":
        _differ(members, played.key, place, "success", played.success, report)
    for number, name in enumerate(("status", "stop_reason")):
        said = [ending[number] for ending in played.endings]
        words = {word: code for code, word in enumerate(dict.fromkeys(said))}
        recorded = np.array([words.get(word, -1) for word in members.columns[name]], np.int64)[place]
        wrong = np.flatnonzero(recorded != np.array([words[word] for word in said], np.int64)[played.ending])
        lines = [(members.name(int(played.key[at])), members.columns[name][int(place[at])], said[int(played.ending[at])]) for at in wrong.tolist()]
        note(report, [f"{who} has {name} {found!r}, its rows say {word!r}" for who, found, word in lines])


def _differ(
    members: Members, key: Column, place: Column, name: str, said: Column, report: AuditReport, came_later: npt.NDArray[np.bool_] | None = None
) -> None:
    """Notes the members of which a column of numbers differs from ``said``; NaN is null."""
    recorded = _numbers(members.columns[name])[place]
    wrong = np.flatnonzero((recorded != said) & ~(np.isnan(recorded) & np.isnan(said)))
    lines: list[str] = []
    for at in wrong.tolist():
        source = "its rows say" if came_later is None or not came_later[at] else "amended was"
        found = None if np.isnan(said[at]) else float(said[at]) if name in ("reward", "success") else int(said[at])
        lines.append(f"{members.name(int(key[at]))} has {name} {members.columns[name][int(place[at])]!r}, {source} {found}")
    note(report, lines)


def compare_groups(played: Played, members: Members, report: AuditReport) -> None:
    """Every group was leased for what its rows were played on, and no row is older or later than its lease allows.

    Rows of a group's newest attempt began at ``admit_version`` at least (a fork only ever lowers it), and that lies before the version its batch made.
    """
    groups, place = members.groups, _places(members.groups["group_id"], played.key // MEMBERS)
    known = place >= 0
    note(report, [f"{members.group_name(int(key) // MEMBERS)} has rows, it was never leased" for key in _firsts(played.key[~known])])
    key, place = played.key[known], place[known]
    leased = {name: _numbers(groups[name])[place] for name in ("attempt", "lineage", "admit_version")}

    def check(name: str, wrong: npt.NDArray[np.bool_], said: Column, verb: str = "say") -> None:
        at = np.flatnonzero(wrong)
        _, first = np.unique(key[at] // MEMBERS, return_index=True)
        lines = [(members.group_name(int(key[row]) // MEMBERS), groups[name][int(place[row])], said[row]) for row in at[first].tolist()]
        note(report, [f"{group} has {name} {found}, its rows {verb} {spoken}" for group, found, spoken in lines])

    codes = {name: code for code, name in enumerate(played.env_names)}
    env = np.array([codes.get(name, -1) for name in groups["env_id"]], np.int64)
    check("env_id", env[place] != played.env[known], np.array(played.env_names, object)[played.env[known]])
    for name in ("task_index", "seed"):
        said = getattr(played, name)[known]
        check(name, _numbers(groups[name])[place] != said, said)
    attempt, oldest = played.attempt[known], played.oldest[known]
    check("attempt", attempt > leased["attempt"], attempt)
    own = (attempt == leased["attempt"]) & (played.lineage[known] == leased["lineage"]) & (oldest < UNSAMPLED)
    check("admit_version", own & (oldest < leased["admit_version"]), oldest, "begin at version")
    late = np.flatnonzero(_numbers(groups["admit_version"]) >= _numbers(groups["version"]))
    lines = [(members.group_name(groups["group_id"][at]), groups["admit_version"][at], groups["version"][at]) for at in late.tolist()]
    note(report, [f"{name} has admit_version {admitted}, its batch made version {version}" for name, admitted, version in lines])


def _places(known: Sequence[int], wanted: Column) -> Column:
    """Place of each of ``wanted`` in ``known``, which rises; -1 where it is not there."""
    if not len(known):
        return np.full(len(wanted), -1)
    every = np.array(known, np.int64)
    place = np.minimum(np.searchsorted(every, wanted), len(every) - 1)
    return np.where(every[place] == wanted, place, -1)


def _firsts(keys: Column) -> list[int]:
    """One key of each group."""
    return keys[np.unique(keys // MEMBERS, return_index=True)[1]].tolist()


def _numbers(values: Sequence[Any]) -> npt.NDArray[np.float64]:
    """A column of the ledger, NaN where it is null, infinite where somebody put what is no number."""
    try:
        return np.array(values, np.float64)
    except (ValueError, TypeError):
        return np.array([value if value is None or isinstance(value, int | float) else np.inf for value in values], np.float64)
