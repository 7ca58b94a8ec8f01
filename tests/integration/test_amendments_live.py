"""Scores of a long run: sealed with the rows they are about and removed with them, over a kill, right for whoever looks."""

from __future__ import annotations

from pathlib import Path

import pytest

import streams
from rollstream.buffer.amendments import WHOLE, Amendment
from rollstream.buffer.audit import audit
from rollstream.buffer.client import LearnerClient, ScorerClient
from rollstream.buffer.header import header_of
from rollstream.buffer.inspect import Filter, Inspector
from rollstream.buffer.types import Trajectory
from rollstream.buffer.wire import Lease
from rollstream.configs.run_folder import Run
from rollstream.errors import Refused


def unscored(lease: Lease, member: int) -> Trajectory:
    return streams.play(lease, member, 20_000, reward=None)


def judged(group_id: int, member: int) -> float:
    return group_id + member / 8


def score_what_waits(run: Run) -> None:
    with Inspector(run.folder) as stream, ScorerClient(run.endpoint, run.run_id) as scorer:
        streams.wait_until(lambda: len(stream.awaited()) >= 2 * streams.GROUP_SIZE, 60.0)
        for one in stream.awaited():
            scorer.score(stream.trajectory(one.group_id, one.member)[1].key, judged(one.group_id, one.member))


def files(run: Run, suffix: str) -> list[int]:
    return sorted(int(path.stem) for path in run.amendments_folder.glob(f"*{suffix}"))


@pytest.mark.timeout(240)
def test_amendments_live_as_long_as_the_rows_they_are_about(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path, depth=0, segment_mb=1, keep_gb=0.003, lease_timeout_s=60.0)
    with (
        streams.ServerProcess(run) as server,
        streams.acting(run, unscored),
        LearnerClient(run.endpoint, run.run_id, silent_s=60) as learner,
        ScorerClient(run.endpoint, run.run_id) as scorer,
    ):
        learner.hello(0)
        for version in range(1, 9):
            if version == 5:
                server.kill()
                server.start()
            score_what_waits(run)
            batch = streams.pull(learner, version, 60)
            assert header_of(batch).rewards == [judged(group_id, member) for group_id in batch.groups for member in range(streams.GROUP_SIZE)]
            learner.trained(version)
            streams.checkpoint(run, learner, version)
        streams.wait_until(lambda: 1 not in files(run, ".parquet") + files(run, ".arrows"), 60.0)
        with pytest.raises(Refused, match="removed by retention"):
            scorer.amend([Amendment(0, 0, 0, WHOLE, 0, "judge/style", 1.0, "judge", 1.0)])
        assert audit(run.folder).problems == []
        server.kill()
        server.start()
        learner.status()
    report = audit(run.folder)
    assert report.problems == []
    assert 0 < report.num_amendments < 8 * 2 * streams.GROUP_SIZE, "those of removed rows are forgotten"
    with Inspector(run.folder) as stream:
        listed = stream.listed(Filter())
        assert [one.reward for one in listed if one.state == "trained"] == [
            judged(group_id, member) for group_id in range(16) for member in range(streams.GROUP_SIZE)
        ]
        rows = [row for table in stream.tables(listed) for row in table.to_pylist()]
        assert stream.num_removed > 0
        assert all(row["reward"] == judged(row["group_id"], row["member"]) for row in rows if row["state"] == "trained")
        unexplained = "SELECT count(*) n FROM trajectories t ANTI JOIN amendments a USING (group_id, member) WHERE t.state = 'trained'"
        assert stream.query(unexplained).to_pylist() == [{"n": 0}], "an amendment is there as long as its row"
