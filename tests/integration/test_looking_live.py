"""``rollstream log``, ``replay`` and ``audit`` beside a live run whose stream is sealed and removed under their hands: never a trace, never wrong rows."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

import recorded_run
import streams
from rollstream import cli
from rollstream.buffer.inspect import Filter, Inspector
from rollstream.buffer.types import Trajectory
from rollstream.buffer.wire import Lease
from rollstream.configs.run_folder import Run

PADDING = 240_000  # bytes of a trajectory's messages, so that every batch fills a segment of a megabyte
PLAY_S = 0.1


def play(lease: Lease, member: int) -> Trajectory:
    time.sleep(PLAY_S)
    return made(lease, member)


def made(lease: Lease, member: int) -> Trajectory:
    """The same whenever it is asked for; long."""
    padding = np.random.default_rng([lease.group_id, member]).bytes(PADDING // 2).hex()
    return msgspec.structs.replace(recorded_run.trajectory(lease, member), messages=json.dumps([{"role": "user", "content": padding}]))


@contextlib.contextmanager
def live(run: Run) -> Iterator[None]:
    """Buffer and learner as processes, an actor as a thread."""
    roles = [subprocess.Popen([sys.executable, "-m", "rollstream", role, str(run.folder)]) for role in ("buffer", "learner")]
    try:
        streams.wait_until(lambda: (run.socket_folder / "buffer").exists(), 60.0)
        with streams.acting(run, play):
            yield
    finally:
        for role in reversed(roles):
            role.terminate()
            role.wait(30)


def command(capsys: pytest.CaptureFixture[str], name: str, run: Run, *options: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main([name, str(run.folder), *options])
    code = caught.value.code
    assert isinstance(code, int)
    return code, *capsys.readouterr()


def removed(run: Run) -> int:
    """Segments that retention removed so far."""
    numbers = [int(path.stem) for path in run.stream_folder.iterdir() if path.suffix in (".arrows", ".parquet")]
    return min(numbers, default=1) - 1


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Each row is what its actor sent."""
    assert rows
    for row in rows:
        lease = Lease(
            row["lineage"], row["group_id"], 0, row["attempt"], "train", row["env_id"], row["task_index"], row["seed"], [], int(row["version_values"][0])
        )
        sent = made(lease, row["member"])
        assert row["token_ids"] == sent.segments[0].token_ids.tolist()
        assert row["messages"] == sent.messages
        assert row["reward"] == sent.reward


@pytest.mark.long
@pytest.mark.timeout(300)
def test_looking_and_replaying_beside_a_live_stream_that_is_sealed_and_removed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = recorded_run.make_run(
        tmp_path, "learner.versions=100000", "learner.checkpoint={every: 2, keep_last: 8}", "buffer.segment_mb=1", "buffer.keep_gb=0.003",
        "buffer.degenerate=mask",
    )  # fmt: skip
    replays: Counter[str] = Counter()
    with live(run):
        streams.wait_until(lambda: removed(run) > 0, 100.0)
        first, rounds, deadline = removed(run), 0, time.monotonic() + 90
        while removed(run) < first + 3 or rounds < 2 or not replays["0"]:
            assert time.monotonic() < deadline, "the stream goes on while it is looked at"
            rounds += 1
            code, out, err = command(capsys, "log", run, "--limit", "40")
            assert (code, err) == (0, "")
            newest, oldest = out.splitlines()[-2].split()[:2], out.splitlines()[1].split()[:2]
            for group, member in (newest, oldest, ("0", "0")):
                code, out, err = command(capsys, "log", run, "--show", f"{group}/{member}")
                assert code == 0 or (code == 2 and "were removed by retention" in err and err.count("\n") == 1), (out, err)
                assert code == 0 or group == "0" or (group, member) == tuple(oldest)
            export = tmp_path / f"{rounds}.parquet"
            code, out, err = command(capsys, "log", run, "--export", str(export))
            assert code == 0, err
            check_rows(pq.read_table(export).to_pylist()[::5])
            code, out, err = command(capsys, "log", run, "--sql", "SELECT count(*) n, count(DISTINCT (group_id, member)) d FROM trajectories")
            assert (code, err) == (0, "")
            num, distinct = map(int, out.splitlines()[1].split())
            assert num == distinct > 0
            version = json.loads(run.metrics_path.read_text(encoding="utf-8").splitlines()[-2])["version"]
            code, out, err = command(capsys, "replay", run, "--version", str(version))
            if code == 0:
                assert "figures agree" in out
            else:
                assert (code, err.count("\n")) in ((1, 1), (2, 1)), (out, err)
                assert "removed by" in err or "has no checkpoint before it" in err
            replays[str(code)] += 1
            code, out, err = command(capsys, "audit", run)
            assert code == 0, (out, err)
        with Inspector(run.folder) as inspector:  # somebody who reads slowly holds nobody up
            listed = inspector.listed(Filter())
            tables = inspector.tables(listed)
            rows = next(tables).to_pylist()
            before = removed(run)
            streams.wait_until(lambda: removed(run) > before, 60.0)
            rows += [row for table in tables for row in table.to_pylist()]
            assert len(rows) + inspector.num_removed == len(listed)
            assert inspector.num_removed > 0
            check_rows(rows[::5])
    code, out, err = command(capsys, "audit", run)
    assert code == 0, (out, err)
