"""Groups that close while members of them are played: whoever plays them is told and stops; what was under way does no harm."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import streams
from actor_world import world
from rollstream.buffer.audit import audit
from rollstream.buffer.client import ActorClient, LearnerClient
from rollstream.buffer.wire import Lease
from rollstream.envs.chat import ChatEnv, Message, Turn
from rollstream.envs.registry import register

CLOSES = {"group_deadline_s": 0.8, "min_group": 2}


class Straggling(ChatEnv):
    """Every third episode never ends by itself."""

    begun: ClassVar[int] = 0
    interrupted: ClassVar[int] = 0
    closed: ClassVar[int] = 0
    endless = False

    def start(self, task: int) -> str:
        Straggling.begun += 1
        self.endless = Straggling.begun % 3 == 0
        return "wait"

    async def respond(self, message: Message) -> Turn:
        try:
            await asyncio.sleep(3600 if self.endless else 0)
        except asyncio.CancelledError:
            Straggling.interrupted += 1
            raise
        return Turn("enough", reward=float(len(message["content"])), done=True)

    async def malformed_call(self, problem: str) -> Turn:
        return await self.respond({"role": "assistant", "content": problem})

    def close(self) -> None:
        Straggling.closed += self.endless


register("test-closed/Straggling-v0", Straggling)


def test_episodes_of_a_closed_group_are_cancelled_and_their_slots_are_free_again(tmp_path: Path) -> None:
    with world(tmp_path, env_id="test-closed/Straggling-v0", buffer={"depth": 1, "max_lag": 2, **CLOSES}, actors={"slots": 3}) as made:
        made.publish(0)
        actor = made.actor()
        for version in (1, 2):  # with three slots the actor would be stuck after three groups
            batch = made.pull(version)
            assert len(batch.trajectories) == 4
            made.learner.trained(version)
            made.publish(version)
        status = made.until(lambda status: status.peers[-1].counters.get("cancelled_episodes", 0) + status.peers[0].counters.get("cancelled_episodes", 0) >= 4)
        assert status.counters["unplayed_members"] >= 4
        assert (status.counters["superseded"], status.counters["duplicates"], status.counters["refused"]) == (0, 0, 0)
        assert Straggling.interrupted >= 4
        assert Straggling.closed >= 4, "an environment that was interrupted is used no more"
        assert actor.leave() < 2
        assert actor.error is None
    found = audit(tmp_path)
    assert found.problems == []


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return streams.run_in(tmp_path, **CLOSES)


@pytest.fixture
def server(run: Any) -> Iterator[Any]:
    with streams.ServerProcess(run) as process:
        yield process


async def lease_short_of_one_member(client: ActorClient) -> Lease:
    lease = await streams.one_lease(client)
    for member in lease.members[:-1]:
        await client.append(streams.play(lease, member))
    return lease


async def test_an_append_that_was_under_way_when_its_group_closed_is_superseded_and_harmless(run: Any, server: Any) -> None:
    async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
        lease = await lease_short_of_one_member(client)
        assert await asyncio.wait_for(client.closed(), 10) == {lease.group_id}
        await client.append(streams.play(lease, lease.members[-1]))
        client.finish(lease.group_id)
        another = await streams.one_lease(client)
        assert another.group_id > lease.group_id
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.closed(), 0.5)
    with LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(None)
        assert learner.status().counters["superseded"] == 1


async def test_an_actor_is_told_also_by_the_next_process_of_the_buffer(run: Any, server: Any) -> None:
    async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
        lease = await lease_short_of_one_member(client)
        await asyncio.wait_for(client.closed(), 10)
        server.kill()
        server.start()
        assert await asyncio.wait_for(client.closed(), 20) == {lease.group_id}


async def test_a_lease_that_nobody_took_yet_is_taken_back(run: Any, server: Any) -> None:
    """It lay at the actor until its group was dropped; the actor may be given another instead."""
    async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
        client.credit(2)
        first = await client.next_lease()
        assert first is not None
        await asyncio.sleep(2.5)  # both are dropped, and one that replaces the second may wait here
        assert await client.closed() == {first.group_id}
        following = await asyncio.wait_for(client.next_lease(), 10)
        assert following is not None
        assert following.group_id >= 2
