"""Bytes under way to the buffer are bounded by what it grants, waits have deadlines that name whom was waited for, and nothing is copied or kept too long."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pytest
import zmq

import streams
from rollstream.buffer import appends, wire
from rollstream.buffer.audit import audit
from rollstream.buffer.client import ActorClient, LearnerClient
from rollstream.buffer.columns import aligned, decode, encode, frame_checksum, from_frame, rows_of, to_frame
from rollstream.buffer.types import Trajectory
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config
from rollstream.errors import DataRefused, DeadlineExceeded

LEASE = wire.Lease(0, 7, 0, 0, "train", "Acme/Calculator-v0", 7, 99, [0, 1], 0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return streams.run_in(tmp_path)


# --- credit ---------------------------------------------------------------------------------------------------------------------------

SLOW = """
import time
from rollstream.buffer import handlers, peers
peers.BUDGET_BYTES = 4 * 2**20
append = handlers.Handlers._append
def slowly(self, *arguments):
    time.sleep(0.02)
    append(self, *arguments)
handlers.Handlers._append = slowly
"""
NUM_ACTORS, MIB = 3, 2**20


def test_a_slow_buffer_under_large_rows_stays_small_and_loses_nothing(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path, depth=40, max_lag=40, learner={"batch_groups": 1, "group_size": 8})
    most: list[int] = []
    grown: list[int] = []

    async def act(name: str) -> int:
        async with ActorClient(run.endpoint, run.run_id, name, silent_s=90) as client:
            client.credit(3)
            leases = [await client.next_lease() for _ in range(3)]
            appends = [client.append(streams.play(lease, member, 80_000)) for lease in leases if lease is not None for member in lease.members]
            watch = asyncio.create_task(look(client))
            await asyncio.gather(*appends)
            watch.cancel()
            return len(appends)

    async def look(client: ActorClient) -> None:
        while True:
            most.append(client._appends.num_unacknowledged_bytes)
            grown.append(psutil.Process(process.process.pid).memory_info().rss)
            await asyncio.sleep(0.005)

    async def act_all() -> int:
        return sum(await asyncio.gather(*(act(f"actor-{index}") for index in range(NUM_ACTORS))))

    with streams.ServerProcess(run, streams.SERVE.replace("stop = threading", SLOW + "stop = threading", 1)) as process:
        num = asyncio.run(act_all())
        assert process.end() == 0
    sent = num * 80_000 * 9
    assert sent > 45 * MIB
    assert max(most) <= 4 * MIB + 1.5 * MIB  # until it is told of the others, the first has the whole budget
    assert max(grown) - grown[0] < 30 * MIB
    report = audit(run.folder)
    assert (report.problems, report.num_trajectories) == ([], num)


def test_an_actor_that_heeds_no_credit_fills_its_own_memory_and_not_the_buffers(run: Run) -> None:
    junk = bytes(MIB)
    with streams.ServerProcess(run, streams.SERVE.replace("stop = threading", SLOW + "stop = threading", 1)) as process, zmq.Context() as context:
        with LearnerClient(run.endpoint, run.run_id) as learner:
            learner.hello(0)
        before = psutil.Process(process.process.pid).memory_info().rss
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(run.endpoint)
        socket.send(msgspec.msgpack.encode(wire.Envelope(wire.PROTOCOL_VERSION, run.run_id, 1, wire.Hello("actor", "greedy", "one", 1))))
        assert socket.poll(10_000)
        for index in range(400):
            socket.send_multipart([msgspec.msgpack.encode(wire.Envelope(wire.PROTOCOL_VERSION, run.run_id, index + 2, wire.Append(1, 0))), junk])
        most = 0
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            most = max(most, psutil.Process(process.process.pid).memory_info().rss - before)
            time.sleep(0.02)
        socket.close()
        assert most < 180 * MIB
        assert process.end() == 0


def test_a_trajectory_larger_than_any_frame_is_refused_where_it_is_made(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100_000)

    async def act() -> list[Any]:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            lease = await streams.one_lease(client)
            appends = [client.append(streams.play(lease, member, num_tokens)) for member, num_tokens in enumerate((40, 40_000, 40))]
            return await asyncio.gather(*appends, return_exceptions=True)

    with streams.serving(run):
        fine, refused, also_fine = asyncio.run(act())
    assert (fine, also_fine) == (None, None)
    assert isinstance(refused, DataRefused)
    assert "at most 100,000 go over the wire at once" in str(refused)


# --- deadlines ------------------------------------------------------------------------------------------------------------------------


def test_an_append_that_is_never_acknowledged_is_named_although_heartbeats_are_answered(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollstream.buffer.handlers import Handlers

    monkeypatch.setattr(Handlers, "_append", lambda *_: None)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0", silent_s=2) as client:
            await client.append(streams.play(await streams.one_lease(client), 0))

    with (
        streams.serving(run),
        pytest.raises(DeadlineExceeded, match=r"did not acknowledge the Append of [\d,]+ bytes of actor-0 for 2 s, though it answers heartbeats"),
    ):
        asyncio.run(act())


def test_a_pull_without_progress_names_whom_it_waits_for(run: Run) -> None:
    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            await streams.one_lease(client)
            with pytest.raises(DeadlineExceeded, match=r"no progress towards batch 1 for 1\.5 s .*oldest is group 0 .*played by actor-0"):
                await asyncio.to_thread(wait)

    def wait() -> None:
        with LearnerClient(run.endpoint, run.run_id, stalled_s=1.5) as learner:
            learner.hello(0)
            learner.pull(1, lambda reason: None, threading.Event())

    with streams.serving(run):
        asyncio.run(act())


def test_an_actor_that_gets_no_weights_names_the_learner(tmp_path: Path) -> None:
    from rollstream.actors.loop import act

    settings = {
        "name": "alone",
        "env": {"id": "rollstream/KeyValue-v0"},
        "actors": {"sampler": {"kind": "scripted"}},
        "buffer": {"stall_timeout_s": 1.5},
        "learner": {"versions": 9, "batch_groups": 1, "group_size": 2},
    }
    run = Run(tmp_path, Config.model_validate(settings), f"run-{tmp_path}")
    with streams.serving(run), pytest.raises(DeadlineExceeded, match=r"no weights of version 0 came from the learner for 1\.5 s .*; actor-0 holds none"):
        act(run, "actor-0", threading.Event())


# --- lifetimes ------------------------------------------------------------------------------------------------------------------------


def content(item: Trajectory) -> Any:
    return item.key, item.segments[0].token_ids.tolist(), item.segments[0].behaviour_logprobs.tolist()


def test_what_is_sent_stays_alive_and_unchanged_until_the_buffer_has_it(run: Run) -> None:
    """The socket does not copy: the frames wait in its queue while no buffer is there, and everything around them is freed and reused."""
    run.socket_folder.mkdir(parents=True, mode=0o700)

    async def act() -> list[Trajectory]:
        async with ActorClient(run.endpoint, run.run_id, "actor-0", silent_s=60) as client:
            with streams.serving(run):
                lease = await streams.one_lease(client)
                made = [streams.play(lease, member, 30_000) for member in lease.members]
                wanted = [content(item) for item in made]
            appends = [asyncio.create_task(client.append(item)) for item in made]
            await asyncio.sleep(0.1)
            del made
            gc.collect()
            churn = [np.full(40_000, 7, np.int32) for _ in range(200)]  # whatever was freed too early is overwritten
            assert client._appends.num_unacknowledged_bytes > 0
            with streams.serving(run):
                await asyncio.gather(*appends)
            assert len(churn) == 200
            return wanted

    wanted = asyncio.run(act())
    with streams.serving(run):
        pass
    from rollstream.buffer.inspect import Inspector

    with Inspector(run.folder) as inspector:
        assert [content(inspector.trajectory(0, member)[1]) for member in range(streams.GROUP_SIZE)] == wanted


def test_received_arrays_are_views_that_keep_their_frame_and_no_longer(run: Run) -> None:
    wanted = [streams.play(LEASE, member, 20_000) for member in range(2)]
    frame = to_frame(encode(wanted))
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        receiver.bind("inproc://views")
        sender.connect("inproc://views")
        sender.send(frame, copy=False)
        received = receiver.recv(copy=False)
        batch = from_frame(aligned(received.buffer), frame_checksum(frame))
        gone = weakref.ref(received)
        del frame, received
        views = decode(batch)
        del batch
        gc.collect()
        address = views[0].segments[0].token_ids.__array_interface__["data"][0]
        assert address + 4 * 20_000 <= views[1].segments[0].token_ids.__array_interface__["data"][0] + 1  # one after the other in the frame
        assert [content(item) for item in views] == [content(item) for item in wanted]
        del views
        gc.collect()
        assert gone() is None


def test_rows_taken_out_of_a_batch_do_not_hold_the_whole_of_it() -> None:
    gc.collect()
    before = pa.total_allocated_bytes()
    batch = encode([streams.play(LEASE, member, 100_000) for member in range(20)])
    one = rows_of(batch, [3])
    del batch
    gc.collect()
    assert pa.total_allocated_bytes() - before < 2 * 100_000 * 9
    assert decode(one)[0].key.member == 3


def test_the_buffer_keeps_no_frame_once_its_round_is_committed(run: Run) -> None:
    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            lease = await streams.one_lease(client)
            for member in lease.members:
                await client.append(streams.play(lease, member, 200_000))

    with streams.ServerProcess(run) as process:
        asyncio.run(act())
        held = psutil.Process(process.process.pid).memory_info().rss
        asyncio.run(act())
        assert psutil.Process(process.process.pid).memory_info().rss - held < 4 * MIB
        assert process.end() == 0


# --- coalescing -----------------------------------------------------------------------------------------------------------------------


def test_trajectories_that_finish_together_go_in_one_append_and_wait_for_nothing_else(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends, "_COALESCE_S", 3600.0)  # only what is under way makes the next one wait

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            for _ in range(2):
                lease = await streams.one_lease(client)
                await asyncio.wait_for(asyncio.gather(*(client.append(streams.play(lease, member)) for member in lease.members)), 30)
                client.finish(lease.group_id)

    with streams.serving(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        asyncio.run(act())
        counters = learner.status().counters
        assert (counters["appends"], counters["trajectories_stored"]) == (2, 2 * streams.GROUP_SIZE)
