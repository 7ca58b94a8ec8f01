"""The audit finds what is wrong with a recorded run, and nothing where all is well."""

from __future__ import annotations

import io
import math
import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from rollstream.buffer.audit import audit
from rollstream.buffer.books import Books
from rollstream.buffer.columns import Rows, encode, frame_checksum, to_frame
from rollstream.buffer.facts import facts
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.log import Log
from rollstream.buffer.recovery import forget
from rollstream.buffer.tables import LEDGER_VERSION
from rollstream.buffer.types import Segment, Trajectory, TrajectoryKey
from rollstream.buffer.window import Rules
from rollstream.buffer.wire import Lease
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.errors import RunFolderError
from rollstream.summary import Ending, audit_lines, print_summary

RULES = Rules(2, 3, 1, 2, 0, 2, 2, None, False, (("Acme/Calculator-v0", 1.0),), 3, 1_000_000, min_group=2, group_deadline_s=30.0)


class Stream:
    """A recorded run without sockets: plays, stores and trains in one thread."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(folder / "ledger.sqlite", "run-a")
        self.log = Log(folder / "stream", segment_bytes=20_000)
        self.lost = self.log.recover(self.ledger.segment_ends(), self.ledger.unsynced())
        if self.lost:
            forget(self.ledger, self.lost, self.log.read)
        self.books = Books(self.ledger, RULES)

    def store(self, trajectories: list[Trajectory]) -> None:
        batch = encode(trajectories)
        frame = to_frame(batch)
        append_id = self.ledger.last_append_id() + 1
        assert {self.books.receive(fact, append_id) for fact in facts(Rows(batch))} == {"store"}
        self.ledger.put_append(append_id, self.log.append(frame, frame_checksum(frame)), batch.num_rows, len(trajectories))

    def play(self, num_tokens: Callable[[int], int] = lambda group_id: 20) -> None:
        while (lease := self.books.grant("actor-0", 0.0)) is not None:
            self.store([trajectory(lease, member, num_tokens(lease.group_id)) for member in lease.members])

    def train(self, version: int) -> None:
        assert self.books.batch(version) is not None
        self.books.trained(version)

    def close(self) -> None:
        self.log.flush()
        self.ledger.close()
        self.log.close()


def trajectory(lease: Lease, member: int, num_tokens: int) -> Trajectory:
    mask = (np.arange(num_tokens) >= 5).astype(np.uint8)
    zeros = np.zeros(1, np.int32)
    segments = [
        Segment(
            np.arange(size, dtype=np.int32),
            mask[:size],
            np.zeros(size, np.float32),
            zeros,
            np.array([lease.admit_version], np.int32),
            zeros,
            ("assistant",),
            (None,),
        )
        for size in (num_tokens, 5)  # the second has nothing sampled
    ]
    key, success = TrajectoryKey(0, lease.group_id, member, lease.attempt), {"success": float(member == 0)}
    task = (lease.env_id, lease.task_index, lease.seed)
    return Trajectory(key, *task, "train", tuple(segments), float(member), "terminated", "terminated", env_metrics=success)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four versions of two groups with three members; two ready groups, nothing else."""
    stream = Stream(tmp_path)
    for version in range(1, 5):
        stream.play()
        stream.train(version)
    stream.close()
    return tmp_path


def change(folder: Path, statement: str, *values: Any) -> None:
    database = sqlite3.connect(folder / "ledger.sqlite")
    database.execute(statement, values)
    database.commit()
    database.close()


def test_a_sound_run_has_no_problems_and_its_numbers_are_right(folder: Path) -> None:
    report = audit(folder)
    assert (report.closes, report.problems, report.duplicates) == (True, [], 0)
    assert (report.num_leased, report.version, report.num_batches) == (10, 4, 4)
    assert report.counts == {"open": 0, "ready": 2, "assigned": 0, "trained": 8, "dropped": 0}
    assert (report.num_trajectories, report.num_rows, report.num_appends) == (30, 60, 10)
    assert (report.num_trained, report.max_lag_trained, report.lag_bound, report.num_age_drops) == (24, 1, 2, 0)
    assert report.unrecorded_bytes == 0


def test_the_drop_bias_compares_what_was_trained_with_what_was_played(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.play(lambda group_id: 20 if group_id < 2 else 50)
    stream.train(1)
    stream.close()
    bias = audit(tmp_path).bias["Acme/Calculator-v0"]
    assert (bias.num_leased, bias.num_trained) == (12, 6)
    assert (bias.leased_tokens_mean, bias.trained_tokens_mean) == (40.0, 25.0)
    assert (bias.leased_reward_mean, bias.trained_reward_mean) == (1.0, 1.0)
    assert math.isclose(bias.trained_success_mean, 1 / 3)


def test_failed_trajectories_are_told_apart_and_are_not_trained(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.books = Books(stream.ledger, replace(RULES, max_infra_attempts=1, max_env_attempts=1))
    while (lease := stream.books.grant("actor-0", 0.0)) is not None:
        played = [trajectory(lease, member, 20) for member in lease.members]
        played[0] = msgspec.structs.replace(played[0], status="failed", stop_reason="infra" if lease.group_id else "env", reward=None)
        played[1] = msgspec.structs.replace(played[1], status="truncated", stop_reason="length")
        stream.store(played)
    stream.train(1)
    stream.close()
    report = audit(tmp_path)
    num_groups = report.num_leased
    assert report.problems == []
    assert report.failures == {"env": 1, "infra": num_groups - 1}
    assert report.endings == {"length": num_groups, "terminated": num_groups}
    assert report.num_trained == 4, "two groups of three, one failed in each"
    assert report.bias["Acme/Calculator-v0"].num_trained == 4
    lines = "\n".join(audit_lines(report))
    assert f"failed {num_groups} (env 1, infra {num_groups - 1})" in lines
    assert "terminated 50.0 %, turns 0.0 %, length 50.0 %, time 0.0 %" in lines
    (tmp_path / "metrics.jsonl").write_text('{"version": 1, "train/reward_mean": 0.5}\n')
    console = Console(record=True, width=200, quiet=False, file=io.StringIO())
    print_summary(Run(tmp_path, load_config("quickstart"), "a" * 32), Ending(0, 1.0, {}, 0, ["rollstream", "train", "x"]), console)
    told = console.export_text()
    assert f"{num_groups * 3} generated, 4 trained, failed {num_groups} (env 1, infra {num_groups - 1})" in told
    assert "terminated 50.0 %, turns 0.0 %, length 50.0 %, time 0.0 %" in told


@pytest.mark.parametrize(("versions", "kept", "finished"), [(1, True, True), (1, False, False), (2, True, False)])
def test_a_stop_that_came_after_the_last_checkpoint_leaves_nothing_to_go_on_with(tmp_path: Path, versions: int, kept: bool, finished: bool) -> None:
    Stream(tmp_path).close()
    (tmp_path / "metrics.jsonl").write_text('{"version": 1, "train/reward_mean": 0.5}\n')
    run = Run(tmp_path, load_config("quickstart", [f"learner.versions={versions}"]), "a" * 32)
    if kept:
        (run.checkpoints_folder / f"v{versions:06d}").mkdir(parents=True)
    console = Console(record=True, width=200, quiet=False, file=io.StringIO())
    print_summary(run, Ending(130, 1.0, {}, 0, ["train", "x"]), console)
    told = console.export_text()
    assert told.strip().startswith("finished" if finished else "stopped")
    assert ("--resume" in told) != finished


def test_a_run_in_which_nothing_was_played_yet_closes(tmp_path: Path) -> None:
    Stream(tmp_path).close()
    report = audit(tmp_path)
    assert (report.closes, report.problems, report.num_leased) == (True, [], 0)


def test_a_folder_without_a_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"holds no ledger\.sqlite"):
        audit(tmp_path)


def flip_a_byte(folder: Path) -> None:
    path = folder / "stream" / "000001.arrows"
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)


def cut_a_segment(folder: Path) -> None:
    path = folder / "stream" / "000002.arrows"
    path.write_bytes(path.read_bytes()[:-1000])


DAMAGES: dict[str, Callable[[Path], None]] = {
    r"000001\.arrows at \d+: .*checksum": flip_a_byte,
    r"000002\.arrows holds \d+ bytes, the ledger recorded \d+": cut_a_segment,
    r"000001\.arrows is missing": lambda folder: (folder / "stream" / "000001.arrows").unlink(),
    r"10 groups leased, 9 accounted for|8 groups are assigned or trained|group 3 of batch 2 is unknown": lambda folder: change(
        folder, "DELETE FROM groups WHERE group_id = 3"
    ),
    r"group 3 of batch 2 is ready instead of trained": lambda folder: change(folder, "UPDATE groups SET state = 'ready' WHERE group_id = 3"),
    r"group 2 of batch 2 is trained as one of batch 3$": lambda folder: change(folder, "UPDATE groups SET version = 3 WHERE group_id = 2"),
    r"group 2 is in 2 batches": lambda folder: change(folder, "UPDATE batches SET groups = '[2, 4]' WHERE version = 3"),
    r"version 5 was trained, only 4 batches": lambda folder: change(folder, "UPDATE meta SET value = 5 WHERE key = 'version'"),
    r"batch 4 trains a lag of 1, allowed were 0": lambda folder: change(folder, "UPDATE batches SET lag_bound = 0 WHERE version = 4"),
    r"batch 4 has a lag of 1 by its rows, recorded was 2": lambda folder: change(folder, "UPDATE batches SET max_lag = 2 WHERE version = 4"),
    r"group 1 member 2 is committed, its rows are not in the log": lambda folder: change(
        folder, "UPDATE members SET attempt = 1 WHERE group_id = 1 AND member = 2"
    ),
    r"1 trajectories in the log belong to no committed member": lambda folder: change(folder, "DELETE FROM members WHERE group_id = 1 AND member = 2"),
}


@pytest.mark.parametrize(("problem", "damage"), DAMAGES.items())
def test_each_damage_is_found_and_named(folder: Path, problem: str, damage: Callable[[Path], None]) -> None:
    damage(folder)
    report = audit(folder)
    assert any(re.search(problem, found) for found in report.problems), report.problems


def test_a_withheld_trajectory_is_counted_and_not_trained(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.play()
    stream.train(1)
    stream.books = Books(stream.ledger, replace(RULES, max_lag=0))
    stream.train(2)
    stream.close()
    report = audit(tmp_path)
    assert (report.problems, report.num_age_drops, report.num_trained) == ([], 6, 6)
    change(tmp_path, "UPDATE batches SET withheld = '[]' WHERE version = 2")
    assert audit(tmp_path).problems == ["batch 2 trains a lag of 1, allowed were 0", "batch 2 has a lag of 1 by its rows, recorded was 0"]


@pytest.mark.parametrize("kept_bytes", [9_000, 12_000, 100])
def test_after_power_loss_the_next_start_repairs_and_the_audit_is_clean(folder: Path, kept_bytes: int) -> None:
    """The last segments are shorter than the ledger says: rows, members and batches that stood on them go together."""
    for path in sorted((folder / "stream").iterdir())[1:]:
        path.write_bytes(path.read_bytes()[:kept_bytes])
    stream = Stream(folder)
    assert stream.lost
    assert stream.books.version < 4
    for version in range(stream.books.version + 1, 6):
        stream.play()
        stream.train(version)
    stream.close()
    report = audit(folder)
    assert (report.closes, report.problems, report.version) == (True, [], 5)


def test_members_that_groups_were_closed_without_are_counted_and_their_absence_is_in_order(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    leases = [stream.books.grant("actor-0", 0.0) for _ in range(4)]
    for lease, num_finished in zip(leases, (3, 2, 1, 2), strict=True):
        assert lease is not None
        stream.store([trajectory(lease, member, 20) for member in lease.members[:num_finished]])
    stream.books.close_late(30.0)
    stream.train(1)
    stream.close()
    report = audit(tmp_path)
    assert report.problems == []
    assert (report.num_unplayed, report.drop_reasons, report.num_trained) == (4, {"deadline": 1}, 5)
    assert "4 members not played before the deadline of their group" in "\n".join(audit_lines(report))
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    with database:
        database.execute("DELETE FROM unplayed WHERE group_id = 1")
    database.close()
    assert audit(tmp_path).problems == ["group 1 is trained with 2 finished and 0 unplayed of its 3 members, 0 of them both"]


def test_a_ledger_whose_file_is_damaged_is_a_problem_and_not_a_crash(folder: Path) -> None:
    path = folder / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    data[size * 3 : size * 3 + 200] = b"\xff" * 200
    path.write_bytes(data)
    report = audit(folder)
    assert not report.closes
    assert any(problem.startswith("ledger.sqlite") for problem in report.problems), report.problems


def test_a_ledger_that_is_just_being_made_or_that_another_version_wrote_is_refused_in_a_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    sqlite3.connect(path).close()
    path.touch()
    with pytest.raises(RunFolderError, match="holds nothing yet: the buffer of this run is just starting; look again in a moment"):
        audit(tmp_path)
    Ledger(path, "run-a").close()
    assert audit(tmp_path).closes
    database = sqlite3.connect(path)
    with database:
        database.execute("DELETE FROM meta WHERE key = 'ledger_version'")
    database.close()
    with pytest.raises(RunFolderError, match=f"has ledger_version None, this version of Rollstream has {LEDGER_VERSION}; use the version that wrote it"):
        audit(tmp_path)
