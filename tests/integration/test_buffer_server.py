"""The buffer as its users meet it: a real server over real sockets with the real clients, killed where it hurts."""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollstream.buffer.audit import audit
from rollstream.buffer.client import ActorClient, LearnerClient, SupervisorClient
from rollstream.buffer.server import serve
from rollstream.buffer.types import Batch
from rollstream.configs.run_folder import Run
from rollstream.errors import ConfigError, DataRefused, DeadlineExceeded, Refused, RunFolderError
from streams import GROUP_SIZE, ServerProcess, acting, one_lease, play, pull, run_in, serving, wait_until


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_in(tmp_path)


@pytest.fixture
def process(run: Run) -> Iterator[ServerProcess]:
    made = ServerProcess(run)
    yield made
    made.kill()


def train(learner: LearnerClient, first: int, last: int) -> dict[int, Batch]:
    batches = {}
    for version in range(first, last + 1):
        batches[version] = pull(learner, version)
        learner.trained(version)
    return batches


def content(batch: Batch) -> Any:
    return (
        batch.version,
        batch.groups,
        batch.withheld,
        [(item.key, item.reward, item.segments[0].token_ids.tolist(), item.segments[0].behaviour_logprobs.tolist()) for item in batch.trajectories],
    )


# --- the plain course ---------------------------------------------------------------------------------------------------------------


def test_batches_hold_whole_groups_in_order_and_the_books_close(run: Run) -> None:
    with serving(run), acting(run), LearnerClient(run.endpoint, run.run_id) as learner:
        welcome = learner.hello(0)
        assert (welcome.lineage, welcome.version) == (0, 0)
        batches = train(learner, 1, 6)
        status = learner.status()
    for batch in batches.values():
        assert [item.key[1:3] for item in batch.trajectories] == [(group, member) for group in batch.groups for member in range(GROUP_SIZE)]
        assert not batch.recorded
    assert (status.version, status.groups["trained"]) == (6, 12)
    assert status.counters["trajectories_stored"] >= 6 * 2 * GROUP_SIZE
    report = audit(run.folder)
    assert (report.closes, report.problems, report.num_trained, report.num_age_drops, report.duplicates) == (True, [], 6 * 2 * GROUP_SIZE, 0, 0)


def test_the_same_batch_is_served_again_bit_for_bit(run: Run) -> None:
    with serving(run), acting(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        first = pull(learner, 1)
        again = pull(learner, 1)
    assert content(again) == content(first)
    assert (first.recorded, again.recorded) == (False, True)


def test_large_appends_go_out_as_they_lie_and_give_the_same_batches(tmp_path: Path) -> None:
    run = run_in(tmp_path)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            client.credit(2)
            for _ in range(2):
                lease = await client.next_lease()
                assert lease is not None
                await asyncio.gather(*(client.append(play(lease, member, 30_000)) for member in lease.members))

    with serving(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        asyncio.run(act())
        batch = pull(learner, 1)
    assert [item.num_tokens for item in batch.trajectories] == [30_000] * 2 * GROUP_SIZE
    assert (tmp_path / "stream" / "000001.arrows").stat().st_size > 2 * GROUP_SIZE * 30_000 * 9


def test_several_actors_share_the_leases(run: Run) -> None:
    with serving(run), acting(run, peer_id="actor-0", delay_s=0.01) as one, acting(run, peer_id="actor-1", delay_s=0.01) as two:
        with LearnerClient(run.endpoint, run.run_id) as learner:
            learner.hello(0)
            train(learner, 1, 8)
        assert one.acknowledged
        assert two.acknowledged
    assert audit(run.folder).problems == []


def test_a_waiting_learner_hears_what_it_waits_for(run: Run) -> None:
    reasons: list[str] = []
    stop = threading.Event()

    def on_wait(reason: str) -> None:
        reasons.append(reason)
        stop.set()

    with serving(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        assert learner.pull(1, on_wait, stop) is None
    assert reasons == ["0 of 2 groups ready; nothing leased yet"]


def test_a_second_thread_may_publish_while_the_main_one_waits_for_its_batch(run: Run) -> None:
    with serving(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        stop = threading.Event()
        took: list[float] = []

        def publish() -> None:
            time.sleep(0.2)
            start = time.monotonic()
            learner.published(0, "aa")
            took.append(time.monotonic() - start)
            assert "recorded was aa" in learner.published(0, "bb")
            stop.set()

        thread = threading.Thread(target=publish)
        thread.start()
        assert learner.pull(1, lambda reason: None, stop) is None
        thread.join()
    assert took[0] < 0.5


def test_the_supervisor_sees_everybody_and_ends_the_run(run: Run) -> None:
    with serving(run), SupervisorClient(run.endpoint, run.run_id) as supervisor, LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        with acting(run, delay_s=0.05) as actor:
            wait_until(lambda: bool(actor.acknowledged))
            assert actor.client is not None
            actor.call("report", {"tokens": 7.0}, {"running": 2.0}, "sampler")
            wait_until(lambda: any(peer.counters == {"tokens": 7.0} for peer in supervisor.status(2.0).peers))  # type: ignore[union-attr]
            status = supervisor.status(2.0)
            assert status is not None
            assert {(peer.role, peer.peer_id) for peer in status.peers} == {("supervisor", "supervisor"), ("learner", "learner"), ("actor", "actor-0")}
            (seen,) = [peer for peer in status.peers if peer.role == "actor"]
            assert (seen.gauges, seen.waiting_for) == ({"running": 2.0}, "sampler")
            assert supervisor.stop_everybody(2.0)
            wait_until(lambda: actor.client is not None and actor.client.stop_reason is not None)
        assert learner.pull(1, lambda reason: None, threading.Event()) is None
        learner.close()
        wait_until(lambda: supervisor.status(0.2) is None)
    assert not Path(run.endpoint.removeprefix("ipc://")).exists()


# --- refusals -----------------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def actor_client(run: Run, peer_id: str = "actor-0") -> AsyncIterator[ActorClient]:
    async with ActorClient(run.endpoint, run.run_id, peer_id) as client:
        yield client


def test_one_bad_trajectory_fails_alone_and_the_others_beside_it_are_stored(run: Run) -> None:
    async def act() -> list[BaseException | None]:
        async with actor_client(run) as client:
            lease = await one_lease(client)
            bad = play(lease, 1, status="failed", stop_reason="env")  # failed, and yet with a reward
            misfit = play(lease, 2, task_index=2**70)
            return await asyncio.gather(*(client.append(item) for item in (play(lease, 0), bad, misfit, play(lease, 2))), return_exceptions=True)

    with serving(run), SupervisorClient(run.endpoint, run.run_id) as supervisor:
        fine, refused, misfit, also_fine = asyncio.run(act())
        status = supervisor.status(2.0)
    assert fine is None
    assert also_fine is None
    assert isinstance(refused, Refused)
    assert refused.code == "malformed"
    assert "failed and yet has a reward" in str(refused)
    assert isinstance(misfit, DataRefused)
    assert status is not None
    assert status.counters["trajectories_stored"] == 2


def test_tokens_that_the_policy_does_not_know_are_refused_also_by_a_buffer_started_anew(run: Run) -> None:
    async def act(last_id: int) -> None:
        async with actor_client(run) as client:
            lease = await one_lease(client)
            item = play(lease, lease.members[0])
            tokens = item.segments[0].token_ids.copy()
            tokens[-1] = last_id
            await client.append(msgspec.structs.replace(item, segments=(msgspec.structs.replace(item.segments[0], token_ids=tokens),)))

    with serving(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0, None, 200_000)
        with pytest.raises(Refused, match="has token id 200000: the policy knows 0 to 199999"):
            asyncio.run(act(200_000))
    with serving(run):
        with pytest.raises(Refused, match="has token id 200000"):
            asyncio.run(act(200_000))
        asyncio.run(act(199_999))
    report = audit(run.folder)
    assert (report.closes, report.problems, report.num_trajectories) == (True, [], 1)


def test_a_client_of_another_run_is_refused(run: Run) -> None:
    with serving(run):
        with LearnerClient(run.endpoint, "another") as learner, pytest.raises(Refused, match="wrong_run"):
            learner.hello(0)

        async def act() -> None:
            async with ActorClient(run.endpoint, "another", "actor-0") as client:
                await client.next_lease()

        with pytest.raises(Refused, match="wrong_run"):
            asyncio.run(act())


def test_a_learner_ahead_of_the_record_is_refused(run: Run) -> None:
    with serving(run), LearnerClient(run.endpoint, run.run_id) as learner, pytest.raises(Refused, match="older checkpoint"):
        learner.hello(5)


def test_a_silent_buffer_is_named_with_the_role_that_waited(run: Run) -> None:
    run.socket_folder.mkdir(parents=True, exist_ok=True)
    with (
        LearnerClient(run.endpoint, run.run_id, silent_s=0.3) as learner,
        pytest.raises(DeadlineExceeded, match=r"buffer.* did not answer the learner's Hello for 0\.3 s"),
    ):
        learner.hello(0)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0", silent_s=0.5) as client:
            await client.next_lease()

    with pytest.raises(DeadlineExceeded, match=r"actor-0 waited"):
        asyncio.run(act())


def test_a_busy_port_is_named_with_the_remedy(tmp_path: Path) -> None:
    with sockets.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"buffer\.endpoint tcp://127\.0\.0\.1:{port} is in use; set another port"):
            serve(run_in(tmp_path, endpoint=f"tcp://127.0.0.1:{port}"), threading.Event())


def test_two_buffers_on_one_run_are_refused(run: Run) -> None:
    with serving(run), SupervisorClient(run.endpoint, run.run_id) as supervisor:
        assert supervisor.status(5.0) is not None
        with pytest.raises(RunFolderError, match="in use by another buffer"):
            serve(run, threading.Event())
        assert supervisor.status(2.0) is not None


def test_tcp_on_this_machine_works_as_ipc_does(tmp_path: Path) -> None:
    with sockets.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = run_in(tmp_path, endpoint=f"tcp://127.0.0.1:{port}")
    with serving(run), acting(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        assert len(train(learner, 1, 2)) == 2


# --- lost processes -----------------------------------------------------------------------------------------------------------------


def test_a_new_incarnation_gives_up_what_the_old_one_held_at_once(run: Run) -> None:
    async def act() -> None:
        first = ActorClient(run.endpoint, run.run_id, "actor-0")
        await first.__aenter__()
        lease = await one_lease(first)
        await first.append(play(lease, 1))
        for task in first._background:  # dies without a word
            task.cancel()
        async with actor_client(run) as second:
            second.credit(1)
            again = await asyncio.wait_for(second.next_lease(), 3.0)
            assert again is not None
            assert (again.group_id, again.members, again.attempt) == (lease.group_id, [0, 2], 1)
            assert [(done.member, done.reward) for done in again.finished] == [(1, play(lease, 1).reward)]
        first._socket.close(0)
        first._context.term()

    with serving(run):
        asyncio.run(act())


def test_leases_of_an_actor_that_leaves_go_to_another(run: Run) -> None:
    async def act() -> None:
        async with actor_client(run, "actor-1") as other:
            async with actor_client(run, "actor-0") as client:
                lease = await one_lease(client)
                await client.append(play(lease, 0))
                await client.release()
            other.credit(1)
            again = await asyncio.wait_for(other.next_lease(), 3.0)
            assert again is not None
            assert (again.group_id, again.members) == (lease.group_id, [1, 2])

    with serving(run):
        asyncio.run(act())


def test_leases_of_a_silent_actor_expire(tmp_path: Path) -> None:
    run = run_in(tmp_path, lease_timeout_s=1.5)

    async def act() -> None:
        async with actor_client(run, "actor-0") as silent, actor_client(run, "actor-1") as other:
            lease = await one_lease(silent)
            silent._background[2].cancel()  # its heart stops
            await asyncio.sleep(0.5)
            for _ in range(4):
                new = await one_lease(other)
                if new.group_id == lease.group_id:
                    break
            assert (new.group_id, new.attempt) == (lease.group_id, 1)
            await silent.append(play(lease, 0))  # it was only slow: the work counts
            await other.append(play(new, 0))

    with serving(run), SupervisorClient(run.endpoint, run.run_id) as supervisor:
        asyncio.run(act())
        status = supervisor.status(2.0)
    assert status is not None
    assert (status.counters["superseded"], status.counters["leases_expired"]) == (1, 1)


ACT = """
import asyncio, sys
from rollstream.buffer.client import ActorClient
async def act():
    async with ActorClient(sys.argv[1], sys.argv[2], "actor-0") as client:
        client.credit(1)
        print((await client.next_lease()).group_id, flush=True)
        await asyncio.sleep(60)
asyncio.run(act())
"""


def test_leases_of_a_killed_actor_go_to_another_within_seconds(tmp_path: Path) -> None:
    run = run_in(tmp_path, lease_timeout_s=60.0)

    async def act(group_id: int) -> None:
        async with actor_client(run, "actor-1") as other:
            for _ in range(4):
                other.credit(1)
                again = await asyncio.wait_for(other.next_lease(), 10.0)
                assert again is not None
                if again.group_id == group_id:
                    break
            assert (again.group_id, again.attempt) == (group_id, 1)

    with serving(run):
        child = subprocess.Popen([sys.executable, "-c", ACT, run.endpoint, run.run_id], stdout=subprocess.PIPE)
        assert child.stdout is not None
        group_id = int(child.stdout.readline())
        child.kill()
        child.communicate()
        asyncio.run(act(group_id))


def test_a_learner_that_resumes_gets_the_recorded_batches_again_in_order(run: Run) -> None:
    with serving(run), acting(run):
        with LearnerClient(run.endpoint, run.run_id) as learner:
            learner.hello(0)
            served = train(learner, 1, 4)
        with LearnerClient(run.endpoint, run.run_id) as learner:
            assert learner.hello(2).version == 2
            again = train(learner, 3, 5)
    assert [content(again[version]) for version in (3, 4)] == [content(served[version]) for version in (3, 4)]
    assert [again[version].recorded for version in (3, 4, 5)] == [True, True, False]
    report = audit(run.folder)
    assert (report.closes, report.problems, report.duplicates, report.version) == (True, [], 0, 5)


def test_a_buffer_killed_mid_stream_loses_nothing_that_was_acknowledged(run: Run, process: ServerProcess) -> None:
    with (
        acting(run, peer_id="actor-0", delay_s=0.002) as one,
        acting(run, peer_id="actor-1", delay_s=0.002) as two,
        LearnerClient(run.endpoint, run.run_id) as learner,
    ):
        learner.hello(0)
        batches: dict[int, Batch] = {}
        for kill_at in (3, 5, 8):
            batches |= train(learner, len(batches) + 1, kill_at)
            process.kill()
            process.start()
        batches |= train(learner, 9, 12)
        again = {version: pull(learner, version) for version in batches}
    assert process.end() == 0
    assert {version: content(batch) for version, batch in again.items()} == {version: content(batch) for version, batch in batches.items()}
    report = audit(run.folder)
    assert (report.closes, report.problems, report.duplicates) == (True, [], 0)
    assert report.num_trained == 12 * 2 * GROUP_SIZE
    acknowledged = {(key.group_id, key.member) for key in one.acknowledged + two.acknowledged}
    stored = stored_members(run)
    assert acknowledged <= stored
    assert {(item.key.group_id, item.key.member) for batch in batches.values() for item in batch.trajectories} <= stored


def stored_members(run: Run) -> set[tuple[int, int]]:
    from rollstream.buffer.ledger import Ledger

    ledger = Ledger(run.ledger_path, run.run_id, read_only=True)
    found = set(ledger.rows("SELECT group_id, member FROM members"))
    ledger.close()
    return found  # type: ignore[return-value]


def test_a_killed_buffer_gives_actors_back_the_leases_they_hold(run: Run, process: ServerProcess) -> None:
    async def act() -> None:
        async with actor_client(run) as client:
            lease = await one_lease(client)
            await client.append(play(lease, 0))
            process.kill()
            process.start()
            await client.append(play(lease, 1))
            await client.append(play(lease, 2))
            client.finish(lease.group_id)
            assert (await one_lease(client)).group_id != lease.group_id

    asyncio.run(act())
    assert process.end() == 0
    assert audit(run.folder).counts["ready"] == 1


def test_the_audit_beside_a_live_buffer_finds_the_books_closed(run: Run) -> None:
    with serving(run), acting(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        for version in range(1, 8):
            train(learner, version, version)
            report = audit(run.folder)
            assert (report.closes, report.problems) == (True, [])
            assert report.version == version


def test_sync_makes_a_checkpoint_safe_and_the_stream_goes_on(run: Run) -> None:
    with serving(run), acting(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        train(learner, 1, 2)
        learner.sync()
        train(learner, 3, 4)
    assert audit(run.folder).counts["trained"] == 8
