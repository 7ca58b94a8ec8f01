"""Processes that are stopped for longer than every deadline and go on: time in which nobody could be heard is nobody's silence."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import streams
from rollstream.buffer.client import ActorClient, LearnerClient

WAITS = """
import sys, threading
from rollstream.buffer.client import LearnerClient
with LearnerClient(sys.argv[1], sys.argv[2], silent_s=2.0) as learner:
    learner.hello(0)
    print("waits", flush=True)
    batch = learner.pull(1, lambda reason: None, threading.Event())
    print(len(batch.trajectories), flush=True)
"""
STOPPED_S = 7.0


@pytest.mark.timeout(120)
async def test_leases_and_groups_outlive_a_stop_of_the_buffer_and_a_pull_one_of_the_learner(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path, depth=0, max_lag=0, lease_timeout_s=3.0, group_deadline_s=6.0, min_group=3)
    with streams.ServerProcess(run) as server:
        waiting = subprocess.Popen([sys.executable, "-c", WAITS, run.endpoint, run.run_id], stdout=subprocess.PIPE, text=True)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waits\n"
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            client.credit(2)
            leases = [await client.next_lease() for _ in range(2)]
            waiting.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            server.process.send_signal(signal.SIGCONT)
            waiting.send_signal(signal.SIGCONT)
            await asyncio.sleep(1.0)
            for lease in leases:
                assert lease is not None
                for member in lease.members:
                    await client.append(streams.play(lease, member))
        assert waiting.wait(20) == 0, "the learner was not told that the buffer was silent"
        assert waiting.stdout.readline() == "6\n"
        waiting.stdout.close()
        with LearnerClient(run.endpoint, run.run_id) as learner:
            learner.hello(None)
            counters = learner.status().counters
    assert (counters["leases_expired"], counters["leases_given_up"], counters["superseded"], counters["groups_dropped_late"]) == (0, 0, 0, 0)
