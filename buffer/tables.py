"""The tables of the ledger, and their rows as the code sees them.

``groups`` are leases and what became of them; ``members`` the attempts that won; ``failures`` attempts that are played again, with their reason; ``unplayed``
members that a group was closed without, at its deadline, with length and reward where they came late; ``tasks`` the environments with their weights, and
from which of its leases on (``since``) how many tasks each has, null where there is no end to them; ``forks`` where each
lineage but the first began; ``amendments`` what was said of rows after they had been stored, ``amendment_files`` which of its files are sealed.
"""

from __future__ import annotations

from typing import NamedTuple

from .types import GroupState

LEDGER_VERSION = 9
"""Of the tables below and of those of evaluations: another one's ledger is refused."""

TABLES = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups(
    group_id INTEGER PRIMARY KEY, lineage INTEGER NOT NULL, sequence INTEGER NOT NULL, env_id TEXT NOT NULL, task_index INTEGER NOT NULL, seed INTEGER NOT NULL,
    num_members INTEGER NOT NULL, admit_version INTEGER NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL, version INTEGER, reason TEXT, holder TEXT);
CREATE INDEX IF NOT EXISTS groups_unassigned ON groups(sequence) WHERE state IN ('open', 'ready');
CREATE TABLE IF NOT EXISTS members(
    group_id INTEGER NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, append_id INTEGER NOT NULL, reward REAL, status TEXT NOT NULL,
    stop_reason TEXT NOT NULL, num_tokens INTEGER NOT NULL, num_trained_tokens INTEGER NOT NULL, min_version INTEGER, max_version INTEGER,
    lineage INTEGER NOT NULL, PRIMARY KEY(group_id, member)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS failures(
    group_id INTEGER NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY(group_id, member, attempt)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unplayed(
    group_id INTEGER NOT NULL, member INTEGER NOT NULL, num_tokens INTEGER, reward REAL, PRIMARY KEY(group_id, member)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS amendments(
    lineage INTEGER NOT NULL, group_id INTEGER NOT NULL, member INTEGER NOT NULL, segment INTEGER NOT NULL, attempt INTEGER NOT NULL,
    column TEXT NOT NULL, value REAL NOT NULL, source TEXT NOT NULL, written_at REAL NOT NULL,
    append_id INTEGER NOT NULL, file INTEGER NOT NULL, offset INTEGER NOT NULL, size_bytes INTEGER NOT NULL, checksum TEXT NOT NULL,
    PRIMARY KEY(group_id, member, attempt, segment, column)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS amendments_by_file ON amendments(file);
CREATE TABLE IF NOT EXISTS amendment_files(
    file INTEGER PRIMARY KEY, last_append_id INTEGER NOT NULL, size_bytes INTEGER NOT NULL, checksum TEXT NOT NULL, num_rows INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tasks(place INTEGER PRIMARY KEY, env_id TEXT NOT NULL, weight REAL NOT NULL, num_tasks INTEGER, since INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS appends(
    append_id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL, size_bytes INTEGER NOT NULL, checksum TEXT NOT NULL,
    num_rows INTEGER NOT NULL, num_trajectories INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS blobs(
    digest TEXT PRIMARY KEY, size_bytes INTEGER NOT NULL, first_append_id INTEGER NOT NULL, last_append_id INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS blobs_by_append ON blobs(last_append_id);
CREATE TABLE IF NOT EXISTS batches(
    lineage INTEGER NOT NULL, version INTEGER NOT NULL, groups TEXT NOT NULL, withheld TEXT NOT NULL, max_lag INTEGER NOT NULL, lag_bound INTEGER NOT NULL,
    PRIMARY KEY(lineage, version)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS forks(lineage INTEGER PRIMARY KEY, parent INTEGER NOT NULL, version INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS segments(
    segment INTEGER PRIMARY KEY, last_append_id INTEGER NOT NULL, size_bytes INTEGER NOT NULL, checksum TEXT NOT NULL, num_rows INTEGER NOT NULL,
    removed INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS versions(lineage INTEGER NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL, PRIMARY KEY(lineage, version)) WITHOUT ROWID;
"""


class GroupRow(NamedTuple):
    """One group as the ledger keeps it."""

    group_id: int
    lineage: int
    sequence: int
    env_id: str
    task_index: int
    seed: int
    num_members: int
    admit_version: int
    attempt: int
    state: GroupState
    version: int | None
    reason: str | None
    holder: str | None


class MemberRow(NamedTuple):
    """One committed member: the attempt that won, where it lies, and what batches are formed by."""

    group_id: int
    member: int
    attempt: int
    append_id: int
    reward: float | None
    status: str
    stop_reason: str
    num_tokens: int
    num_trained_tokens: int
    min_version: int | None
    max_version: int | None
    lineage: int = 0
    """Whose versions these are."""


class BatchRow(NamedTuple):
    """One batch, recorded by ``lineage``: its groups in order, the members withheld, the largest lag among what trains, the bound then in force."""

    lineage: int
    version: int
    groups: list[int]
    withheld: list[tuple[int, int]]
    max_lag: int
    lag_bound: int
