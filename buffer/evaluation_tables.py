"""What the ledger keeps of evaluations, in tables of its own: nothing that trains ever counts them.

Ids of their groups begin at :data:`FIRST_GROUP`, far beyond those of training, so that one log holds both. An evaluation is ``open`` and then ``done``,
``skipped`` (its version could not be kept for it) or ``dropped``, the last two with a reason; its groups are ``open``, then ``done``, or ``dropped`` with it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

FIRST_GROUP = 2**40
"""Group ids from here on belong to evaluations."""

EvaluationState = Literal["open", "done", "skipped", "dropped"]
EvaluatedGroupState = Literal["open", "done", "dropped"]

EVALUATION_TABLES = """
CREATE TABLE IF NOT EXISTS evaluations(
    evaluation_id INTEGER PRIMARY KEY, lineage INTEGER NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL, state TEXT NOT NULL, reason TEXT,
    settings TEXT NOT NULL, num_groups INTEGER NOT NULL, num_members INTEGER NOT NULL, opened_at REAL NOT NULL, number INTEGER, metrics TEXT);
CREATE INDEX IF NOT EXISTS evaluations_versions ON evaluations(lineage, version);
CREATE INDEX IF NOT EXISTS evaluations_numbers ON evaluations(number);
CREATE TABLE IF NOT EXISTS evaluation_groups(
    group_id INTEGER PRIMARY KEY, evaluation_id INTEGER NOT NULL, env_id TEXT NOT NULL, task_index INTEGER NOT NULL, seed INTEGER NOT NULL,
    num_members INTEGER NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL, holder TEXT);
CREATE INDEX IF NOT EXISTS evaluation_groups_of ON evaluation_groups(evaluation_id);
CREATE TABLE IF NOT EXISTS evaluation_members(
    group_id INTEGER NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, append_id INTEGER NOT NULL, reward REAL, status TEXT NOT NULL,
    stop_reason TEXT NOT NULL, num_tokens INTEGER NOT NULL, num_trained_tokens INTEGER NOT NULL, min_version INTEGER, max_version INTEGER, success REAL,
    PRIMARY KEY(group_id, member)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evaluation_failures(
    group_id INTEGER NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY(group_id, member, attempt)) WITHOUT ROWID;
"""


class EvaluationRow(NamedTuple):
    """One evaluation as the ledger keeps it. ``number`` is its place among the closed ones, from 1; ``metrics`` is JSON; ``opened_at`` in Unix seconds."""

    evaluation_id: int
    lineage: int
    version: int
    digest: str
    state: EvaluationState
    reason: str | None
    settings: str
    num_groups: int
    num_members: int
    opened_at: float
    number: int | None
    metrics: str | None


class EvaluatedGroup(NamedTuple):
    """One group of an evaluation: a task and who plays it."""

    group_id: int
    evaluation_id: int
    env_id: str
    task_index: int
    seed: int
    num_members: int
    attempt: int
    state: EvaluatedGroupState
    holder: str | None


class EvaluatedMember(NamedTuple):
    """One committed trajectory of an evaluation. ``success`` is what its environment reported, None where it reported nothing."""

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
    success: float | None
