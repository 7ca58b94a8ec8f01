"""Whatever somebody changes in the ledger of a recorded run, the audit says where it contradicts the rows of the log, or itself."""

from __future__ import annotations

import re
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

import recorded_run
from rollstream.buffer.amendments import REWARD, WHOLE, Amendment, Amendments
from rollstream.buffer.audit import audit
from rollstream.buffer.audit_report import AuditReport
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.recovery import fork
from rollstream.buffer.types import Trajectory
from rollstream.buffer.wire import Lease
from rollstream.configs.loader import load_run

OPTIONS = ("learner.versions=9", "buffer={depth: 2, max_lag: 2, max_env_attempts: 1}", "env=[{id: Acme/One-v0, weight: 2}, {id: Acme/Two-v0}]")


def played(lease: Lease, member: int) -> Trajectory:
    """Member 0 failed in every third group, member 1 was cut short, member 2 has two segments and is scored later in every other group."""
    made = recorded_run.trajectory(lease, member)
    if member == 0 and lease.group_id % 3 == 2:
        return msgspec.structs.replace(made, status="failed", stop_reason="env", reward=None)
    if member == 1:
        return msgspec.structs.replace(made, status="truncated", stop_reason="length")
    return msgspec.structs.replace(made, segments=made.segments * 2, reward=None if lease.group_id % 2 else made.reward) if member == 2 else made


def record(folder: Path, first: int, last: int) -> None:
    """Versions ``first`` to ``last``, each of two groups of three."""
    run = load_run(folder)
    stream = recorded_run.Stream(run, segment_bytes=20_000)
    amendments = Amendments(run.amendments_folder, stream.ledger, segment_bytes=4000)
    for version in range(first, last + 1):
        stream.play(played)
        query = """
            SELECT m.lineage, group_id, member, m.attempt FROM members m JOIN groups g USING (group_id)
            WHERE state = 'open' AND reward IS NULL AND status != 'failed'"""
        rows = list(stream.ledger.rows(query))
        scores = [Amendment(lineage, group, member, WHOLE, attempt, REWARD, group / 8, "judge", 1.0) for lineage, group, member, attempt in rows]
        amendments.store(stream.books.amend(scores, amendments.known))
        amendments.flush()
        stream.commit()
        assert stream.books.batch(version) is not None
        stream.trained(version)
    stream.sync()
    amendments.close()
    stream.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six versions."""
    folder = recorded_run.make_run(tmp_path_factory.mktemp("runs"), *OPTIONS).folder
    record(folder, 1, 6)
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def audited_after(folder: Path, statement: str) -> AuditReport:
    database = sqlite3.connect(folder / "ledger.sqlite")
    with database:
        assert database.execute(statement).rowcount > 0
    database.close()
    return audit(folder)


HERE = "WHERE group_id = 4 AND member = 1"
EDITS = {
    f"UPDATE members SET reward = reward + 5 {HERE}": r"^group 4 member 1 has reward [56]\.\d+, its rows say [01]\.\d+$",
    f"UPDATE members SET reward = NULL {HERE}": r"^group 4 member 1 has reward None, its rows say [01]\.\d+$",
    f"UPDATE members SET reward = 'much' {HERE}": r"^group 4 member 1 has reward 'much', its rows say [01]\.\d+$",
    "UPDATE members SET reward = 0 WHERE group_id = 5 AND member = 0": r"^group 5 member 0 has reward 0\.0, its rows say None$",
    "UPDATE members SET reward = 9 WHERE group_id = 5 AND member = 2": r"^group 5 member 2 has reward 9\.0, amended was 0\.625$",
    "UPDATE members SET reward = NULL WHERE group_id = 5 AND member = 2": r"^group 5 member 2 has reward None, amended was 0\.625$",
    "DELETE FROM amendments WHERE group_id = 5": r"^group 5 member 2 has reward 0\.625, its rows say None$",
    f"UPDATE members SET status = 'terminated' {HERE}": r"^group 4 member 1 has status 'terminated', its rows say 'truncated'$",
    f"UPDATE members SET status = 'better' {HERE}": r"^group 4 member 1 has status 'better', its rows say 'truncated'$",
    f"UPDATE members SET stop_reason = '' {HERE}": r"^group 4 member 1 has stop_reason '', its rows say 'length'$",
    f"UPDATE members SET num_tokens = num_tokens + 3 {HERE}": r"^group 4 member 1 has num_tokens \d+, its rows say \d+$",
    f"UPDATE members SET num_trained_tokens = num_trained_tokens + 3 {HERE}": r"^group 4 member 1 has num_trained_tokens \d+, its rows say \d+$",
    f"UPDATE members SET min_version = min_version - 1 {HERE}": r"^group 4 member 1 has min_version -1, its rows say 0$",
    f"UPDATE members SET min_version = NULL {HERE}": r"^group 4 member 1 has min_version None, its rows say 0$",
    f"UPDATE members SET max_version = max_version + 1 {HERE}": r"^group 4 member 1 has max_version 1, its rows say 0$",
    f"UPDATE members SET lineage = 1 {HERE}": r"^group 4 member 1 has lineage 1, its rows say 0$",
    "UPDATE batches SET lag_bound = 99 WHERE version = 3": r"^batch 3 of lineage 0 has lag_bound 99, the configuration .* says buffer\.max_lag 2$",
    "UPDATE batches SET lag_bound = 0 WHERE version = 3": r"^batch 3 trains a lag of 2, allowed were 0$",
    "UPDATE batches SET max_lag = 1 WHERE version = 3": r"^batch 3 has a lag of 2 by its rows, recorded was 1$",
    "UPDATE batches SET withheld = '[[20,1]]' WHERE version = 3": r"^batch 3 withholds group 20 member 1, which is not in it$",
    "UPDATE batches SET withheld = '[[4,7]]' WHERE version = 3": r"^batch 3 withholds group 4 member 7, which is not in it$",
    "UPDATE batches SET withheld = '[[4,1]]' WHERE version = 3": r"^batch 3 withholds group 4 member 1, whose lag is 2 by its rows, allowed were 2$",
    "UPDATE batches SET withheld = 'nothing' WHERE version = 3": r"^ledger\.sqlite is damaged, the audit ends here: ",
    "UPDATE groups SET seed = seed + 1 WHERE group_id = 4": r"^group 4 has seed \d+, its rows say \d+$",
    "UPDATE groups SET task_index = task_index + 1 WHERE group_id = 4": r"^group 4 has task_index \d+, its rows say \d+$",
    "UPDATE groups SET env_id = 'Acme/One-v0' WHERE group_id = 4": r"^group 4 has env_id Acme/One-v0, its rows say Acme/Two-v0$",
    "UPDATE groups SET env_id = 'Acme/None-v0' WHERE group_id = 4": r"^group 4 has env_id Acme/None-v0, its rows say Acme/Two-v0$",
    "UPDATE groups SET admit_version = admit_version + 3 WHERE group_id = 4": r"^group 4 has admit_version 3, its rows begin at version 0$",
    "UPDATE groups SET attempt = -1 WHERE group_id = 4": r"^group 4 has attempt -1, its rows say 0$",
    "UPDATE groups SET version = 2 WHERE group_id = 4": r"^group 4 of batch 3 is trained as one of batch 2$",
    "DELETE FROM groups WHERE group_id = 4": r"^group 4 has rows, it was never leased$",
}


@pytest.mark.parametrize(("statement", "problem"), EDITS.items())
def test_a_ledger_that_contradicts_the_log_is_found_and_named(folder: Path, statement: str, problem: str) -> None:
    found = audited_after(folder, statement).problems
    assert any(re.search(problem, line) for line in found), found


def test_many_contradictions_of_one_kind_are_summed_up(folder: Path) -> None:
    problems = audited_after(folder, "UPDATE members SET num_tokens = num_tokens + 1").problems
    assert problems[-1] == "… and 43 more of that kind"
    assert len(problems) == 6


def test_a_run_with_scores_that_came_later_failures_and_several_environments_is_clean(folder: Path) -> None:
    report = audit(folder)
    assert (report.problems, report.num_trajectories, report.max_lag_trained) == ([], 48, 2)
    assert report.num_amendments > 0
    assert report.failures


def test_a_run_that_forked_is_clean_and_an_edit_of_a_batch_that_trains_what_was_carried_over_is_found(folder: Path) -> None:
    ledger = Ledger(folder / "ledger.sqlite", None)
    fork(ledger, 3, "asked for", lambda location: None)
    ledger.close()
    record(folder, 4, 7)
    report = audit(folder)
    assert (report.problems, report.lineage, report.abandoned) == ([], 1, {0: 3})
    problems = audited_after(folder, "UPDATE batches SET max_lag = max_lag + 1 WHERE version = 5 AND lineage = 1").problems
    assert [problem for problem in problems if problem.startswith("batch 5 has a lag of ")] == problems != []
