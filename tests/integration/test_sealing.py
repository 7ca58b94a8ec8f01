"""Sealing, retention and a full disk, on a real buffer over real sockets, killed at the worst moments."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import streams
from rollstream.buffer.audit import audit
from rollstream.buffer.client import LearnerClient
from rollstream.buffer.inspect import Filter, Inspector
from rollstream.buffer.log_files import local_files
from rollstream.buffer.types import Batch, Trajectory
from rollstream.buffer.wire import Lease
from rollstream.configs.run_folder import Run
from rollstream.errors import ConfigError, Refused
from rollstream.summary import audit_lines

checkpoint = streams.checkpoint

GROUP_SIZE = streams.GROUP_SIZE
NUM_TOKENS = 20_000  # a batch of two groups is about a megabyte, the smallest segment
SERVE = """
import json, os, pathlib, signal, sys, threading
from rollstream.buffer import sealed, sealer, server
from rollstream.buffer.ledger import Ledger
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def dies_before(function, suffix):
    return lambda path, *rest, **more: die() if path.suffix == suffix else function(path, *rest, **more)

def refuse(*_):
    raise OSError(28, "No space left on device")

match sys.argv[4]:
    case "copy half written": sealed._compare = die
    case "copy not renamed": sealed.flush_file = die
    case "copy renamed, not recorded": Ledger.put_segment = die
    case "original not removed": pathlib.Path.unlink = dies_before(pathlib.Path.unlink, ".arrows")
    case "no copy, removal recorded, file there": sealer.seal, pathlib.Path.unlink = refuse, dies_before(pathlib.Path.unlink, ".arrows")
    case "no copy": sealer.seal = refuse
    case "removal recorded, file there": pathlib.Path.unlink = dies_before(pathlib.Path.unlink, ".parquet")
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
server.serve(Run(pathlib.Path(sys.argv[1]), Config.model_validate(json.loads(sys.argv[2])), sys.argv[3]), stop)
"""


def run_in(folder: Path, **buffer: Any) -> Run:
    return streams.run_in(folder, **{"depth": 0, "segment_mb": 1, "lease_timeout_s": 60.0, **buffer})


class Server:
    """The buffer in a process; ``dies_at`` names the moment at which it kills itself."""

    def __init__(self, run: Run, dies_at: str = "") -> None:
        self.run = run
        self.process = subprocess.Popen([sys.executable, "-c", SERVE, str(run.folder), run.config.model_dump_json(), run.run_id, dies_at])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)


def play(lease: Lease, member: int) -> Trajectory:
    return streams.play(lease, member, NUM_TOKENS)


def acting(run: Run) -> Any:
    """An actor that plays long trajectories."""
    return streams.acting(run, play)


def pull(learner: LearnerClient, version: int) -> Batch:
    return streams.pull(learner, version, 100)


def train(learner: LearnerClient, first: int, last: int) -> dict[int, Batch]:
    batches = {}
    for version in range(first, last + 1):
        batches[version] = pull(learner, version)
        learner.trained(version)
    return batches


def train_and_keep(run: Run, learner: LearnerClient, first: int, last: int) -> None:
    for version in range(first, last + 1):
        train(learner, version, version)
        checkpoint(run, learner, version)


def content(batch: Batch) -> Any:
    return [(item.key, item.reward, item.segments[0].token_ids.tolist(), item.segments[0].behaviour_logprobs.tolist()) for item in batch.trajectories]


def wait_until(condition: Callable[[], bool]) -> None:
    streams.wait_until(condition, 40.0)


def files(run: Run, suffix: str) -> list[int]:
    return sorted(int(path.stem) for path in run.stream_folder.glob(f"*{suffix}"))


def test_trained_segments_become_parquet_while_the_run_goes_on_and_their_batches_are_served_again_the_same(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with Server(run), acting(run), LearnerClient(run.endpoint, run.run_id, silent_s=60, files=local_files(run)) as learner:
        learner.hello(0)
        batches = train(learner, 1, 4)
        assert files(run, ".parquet") == [], "nothing is sealed before a sync covered it"
        learner.sync()
        wait_until(lambda: len(files(run, ".parquet")) >= 3 and not set(files(run, ".parquet")) & set(files(run, ".arrows")))
        assert audit(tmp_path).problems == []  # also beside the live buffer
        again = {version: pull(learner, version) for version in batches}
        assert all(content(again[version]) == content(batches[version]) for version in batches)
        assert all(batch.recorded for batch in again.values())
        train(learner, 5, 5)
    report = audit(tmp_path)
    assert (report.closes, report.problems, report.num_trained) == (True, [], 5 * 2 * GROUP_SIZE)
    assert report.num_sealed >= 3
    table = pq.read_table(run.stream_folder / "000001.parquet")
    assert len(table.column("token_ids")[0]) == NUM_TOKENS
    import duckdb

    with duckdb.connect() as database:
        (count, tokens) = database.sql(f"SELECT count(*), min(len(token_ids)) FROM '{run.stream_folder}/*.parquet'").fetchall()[0]
    assert (count >= 3 * GROUP_SIZE, tokens) == (True, NUM_TOKENS)


def test_a_damaged_sealed_segment_is_found_by_the_audit_and_refused_at_a_redo(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with Server(run), acting(run), LearnerClient(run.endpoint, run.run_id, silent_s=60, files=local_files(run)) as learner:
        learner.hello(0)
        train(learner, 1, 3)
        learner.sync()
        wait_until(lambda: 1 in files(run, ".parquet") and 1 not in files(run, ".arrows"))
        with (run.stream_folder / "000001.parquet").open("r+b") as file:
            file.seek(file.seek(0, 2) // 2)
            file.write(b"\x55" * 64)
        with pytest.raises(Refused, match=r"corrupt: .*000001\.parquet"):
            pull(learner, 1)
    assert any("000001.parquet" in problem and "checksum" in problem for problem in audit(tmp_path).problems)


MOMENTS = ["copy half written", "copy not renamed", "copy renamed, not recorded", "original not removed"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_sealing_leaves_exactly_one_good_copy(tmp_path: Path, moment: str) -> None:
    run = run_in(tmp_path)
    with contextlib.ExitStack() as servers, acting(run), LearnerClient(run.endpoint, run.run_id, silent_s=60, files=local_files(run)) as learner:
        first = servers.enter_context(Server(run))
        learner.hello(0)
        batches = train(learner, 1, 2)
        first.process.kill()
        first.process.wait()
        with Server(run, moment) as second:
            learner.sync()
            assert second.process.wait(40) == -signal.SIGKILL
        assert audit(tmp_path).problems == []
        servers.enter_context(Server(run))
        learner.sync()
        assert content(pull(learner, 1)) == content(batches[1])
        wait_until(lambda: 1 in files(run, ".parquet") and 1 not in files(run, ".arrows"))
    assert audit(tmp_path).problems == []
    assert not list(run.stream_folder.glob("*.tmp"))
    assert not set(files(run, ".arrows")) & set(files(run, ".parquet"))


def test_retention_removes_the_oldest_rows_that_no_checkpoint_can_need_and_the_audit_says_so(tmp_path: Path) -> None:
    run = run_in(tmp_path, keep_gb=0.0005)
    with contextlib.ExitStack() as servers, acting(run), LearnerClient(run.endpoint, run.run_id, silent_s=60, files=local_files(run)) as learner:
        server = servers.enter_context(Server(run, "removal recorded, file there"))
        learner.hello(0)
        checkpoint(run, learner, 0)
        train(learner, 1, 3)
        checkpoint(run, learner, 3)
        wait_until(lambda: 1 in files(run, ".parquet"))
        pull(learner, 1)  # version 0 can still be resumed from
        batch = train(learner, 4, 6)[6]
        checkpoint(run, learner, 6)  # two are kept: 3 and 6
        with ThreadPoolExecutor(1) as pool:
            trained = pool.submit(train, learner, 7, 7)
            assert server.process.wait(40) == -signal.SIGKILL
            assert audit(tmp_path).problems == []
            servers.enter_context(Server(run))
            trained.result(40)
        wait_until(lambda: 1 not in files(run, ".parquet"))
        with pytest.raises(Refused, match=r"000001\.parquet is gone: .*retention \(buffer\.keep_gb\)"):
            pull(learner, 1)
        assert content(pull(learner, 6)) == content(batch), "a checkpoint before it is still there"
        train(learner, 8, 8)
    report = audit(tmp_path)
    assert (report.closes, report.problems, report.num_trained) == (True, [], 8 * 2 * GROUP_SIZE)
    assert report.num_removed >= GROUP_SIZE
    with Inspector(tmp_path) as inspector:
        listed = inspector.listed(Filter())
        left = sum(table.num_rows for table in inspector.tables(listed))
        assert (inspector.num_removed, left) == (report.num_removed, len(listed) - report.num_removed)
        with pytest.raises(ConfigError, match=r"group 0 member 0: its rows were removed by retention"):
            inspector.trajectory(0, 0)
        assert inspector.query("SELECT count(*) FROM trajectories").column(0).to_pylist() == [left]
    assert f"{report.num_removed} trajectories removed by retention" in "\n".join(audit_lines(report))


def test_retention_removes_rows_as_they_came_where_they_could_not_be_sealed(tmp_path: Path) -> None:
    run = run_in(tmp_path, keep_gb=0.0005)
    with contextlib.ExitStack() as servers, acting(run), LearnerClient(run.endpoint, run.run_id, silent_s=60, files=local_files(run)) as learner:
        server = servers.enter_context(Server(run, "no copy, removal recorded, file there"))
        learner.hello(0)
        with ThreadPoolExecutor(1) as pool:
            trained = pool.submit(train_and_keep, run, learner, 1, 5)
            assert server.process.wait(40) == -signal.SIGKILL
            assert audit(tmp_path).problems == []
            servers.enter_context(Server(run, "no copy"))
            trained.result(60)
        train_and_keep(run, learner, 6, 9)
        train(learner, 10, 10)
        wait_until(lambda: min(files(run, ".arrows")) > 5)
        with pytest.raises(Refused, match=r"is gone: .*retention \(buffer\.keep_gb\)"):
            pull(learner, 3)
        assert pull(learner, 9).recorded, "it can still be resumed from checkpoint 8"
    report = audit(tmp_path)
    assert (report.closes, report.problems, report.num_trained) == (True, [], 10 * 2 * GROUP_SIZE)
    assert (report.num_sealed, report.num_removed >= 5 * GROUP_SIZE) == (0, True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65536))
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0")


@pytest.mark.parametrize("killed", [False, True])
def test_a_full_disk_holds_the_actors_loses_nothing_and_the_run_goes_on_once_there_is_space(small_disk: Path, killed: bool) -> None:
    run = run_in(small_disk / "run", depth=1)
    run.folder.mkdir()
    ballast = small_disk / "ballast"
    with contextlib.ExitStack() as servers, acting(run) as actor, LearnerClient(run.endpoint, run.run_id, silent_s=60, files=local_files(run)) as learner:
        server = servers.enter_context(Server(run))
        learner.hello(0)
        train(learner, 1, 2)
        wait_until(lambda: len(actor.acknowledged) == actor.sent)
        actor.may_send.clear()
        acknowledged = list(actor.acknowledged)
        train(learner, 3, 3)
        wait_until(lambda: actor.sent > len(acknowledged))
        fill(ballast)
        actor.may_send.set()
        wait_until(lambda: "disk full" in learner.status().holds_for)
        time.sleep(6)  # longer than actors wait before they send again
        assert actor.acknowledged == acknowledged
        if killed:
            server.process.kill()
            server.process.wait()
        ballast.unlink()
        if killed:
            servers.enter_context(Server(run))
        train(learner, 4, 5)
        assert learner.status().holds_for == ""
        wait_until(lambda: len(actor.acknowledged) > len(acknowledged))
    report = audit(run.folder)
    assert (report.closes, report.problems, report.duplicates, report.num_trained) == (True, [], 0, 5 * 2 * GROUP_SIZE)
