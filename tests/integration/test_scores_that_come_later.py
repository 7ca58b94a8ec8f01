"""Scores through a real buffer: durable before they are acknowledged, in the batch the learner gets, in the log command's rows, in the audit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import streams
from rollstream.buffer.amendments import REWARD, WHOLE, Amendment
from rollstream.buffer.audit import audit
from rollstream.buffer.client import ActorClient, LearnerClient, ScorerClient
from rollstream.buffer.header import header_of
from rollstream.buffer.inspect import Filter, Inspector
from rollstream.buffer.recorded import Recorded
from rollstream.buffer.wire import Amended
from rollstream.configs.run_folder import Run
from rollstream.errors import DataRefused, Refused

pytestmark = pytest.mark.timeout(120)


def judged(group_id: int, member: int) -> float:
    return group_id + member / 8


def score_all(run: Run) -> int:
    """What a judge beside a live run does."""
    with Inspector(run.folder) as stream, ScorerClient(run.endpoint, run.run_id) as scorer:
        awaited = stream.awaited()
        for one in awaited:
            _, trajectory = stream.trajectory(one.group_id, one.member)
            assert scorer.score(trajectory.key, judged(one.group_id, one.member)).num_stored == 1
            assert scorer.score(trajectory.key, judged(one.group_id, one.member)).num_known == 1
        return len(awaited)


def test_scores_survive_a_kill_reach_the_learner_the_log_and_the_audit(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path)

    async def play() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            await streams.play_groups(client, 2, reward=None)

    with streams.ServerProcess(run) as server:
        asyncio.run(play())
        assert score_all(run) == 6
        with ScorerClient(run.endpoint, run.run_id) as scorer, Inspector(run.folder) as stream:
            key = stream.trajectory(0, 0)[1].key
            with pytest.raises(Refused, match="the first one stands"):
                scorer.score(key, 77.0)
        server.kill()
        server.start()
        with LearnerClient(run.endpoint, run.run_id) as learner:
            learner.hello(0)
            batch = streams.pull(learner, 1)
            learner.trained(1)
        assert server.end() == 0
    wanted = [judged(group_id, member) for group_id in (0, 1) for member in range(streams.GROUP_SIZE)]
    assert header_of(batch).rewards == wanted
    assert [trajectory.reward for trajectory in batch.trajectories] == wanted
    with Recorded(run.folder) as recorded:
        assert [trajectory.reward for trajectory in recorded.batch(1).trajectories] == wanted
    with Inspector(run.folder) as stream:
        assert stream.awaited() == []
        assert stream.trajectory(1, 2)[1].reward == judged(1, 2)
        exported = [row for table in stream.tables(stream.listed(Filter())) for row in table.to_pylist()]
        assert [row["reward"] for row in exported] == wanted
        assert stream.query("SELECT reward FROM trajectories ORDER BY group_id, member")["reward"].to_pylist() == wanted
        assert stream.query("SELECT value FROM amendments WHERE \"column\" = 'reward' ORDER BY group_id, member")["value"].to_pylist() == wanted
    report = audit(run.folder)
    assert (report.problems, report.num_amendments) == ([], 6)
    assert report.bias["Acme/Calculator-v0"].trained_reward_mean == pytest.approx(sum(wanted) / 6)


async def test_an_actor_scores_and_remarks_on_what_it_appended(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path)
    with streams.serving(run):
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            (*_, key) = await streams.play_groups(client, 1, reward=None)
            score = Amendment(key.lineage, key.group_id, key.member, WHOLE, key.attempt, REWARD, 0.5, "actor-0", 1.0)
            remark = score._replace(column="judge/style", value=2.0)
            assert await client.amend([score, remark]) == Amended(2, 0)
            assert await client.amend([score]) == Amended(0, 1)
            with pytest.raises(Refused, match="the first one stands"):
                await client.amend([score._replace(value=0.75)])
            with pytest.raises(Refused, match="no such row is committed"):
                await client.amend([score._replace(member=99)])
            with pytest.raises(DataRefused, match="no name of a column"):
                await client.amend([score._replace(column="Not a name")])
    with Inspector(run.folder) as stream:
        assert stream.trajectory(key.group_id, key.member)[1].reward == 0.5


def test_the_audit_finds_an_amendment_that_is_not_in_its_log_and_a_reward_that_is_not_its_amendment(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path)

    async def play() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            await streams.play_groups(client, 1, reward=None)

    with streams.serving(run):
        asyncio.run(play())
        assert score_all(run) == 3
    assert audit(run.folder).problems == []
    import sqlite3

    database = sqlite3.connect(run.ledger_path)
    with database:
        database.execute("UPDATE amendments SET value = 9 WHERE member = 1")
    database.close()
    problems = " | ".join(audit(run.folder).problems)
    assert "the amendment of reward of group 0 member 1 attempt 0 is not in its log as the ledger has it" in problems
    assert "group 0 member 1 has reward 0.125, amended was 9.0" in problems
    (path,) = run.amendments_folder.glob("*.arrows")
    path.write_bytes(path.read_bytes()[:600])
    assert any(path.name in problem for problem in audit(run.folder).problems)
