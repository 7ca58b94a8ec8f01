"""What the tests of the stream share: a small run, a real buffer (in a thread, or as a process that can be killed), trajectories to send."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollstream.buffer.client import ActorClient, LearnerClient
from rollstream.buffer.server import serve
from rollstream.buffer.types import Batch, MediaSpan, Segment, Trajectory, TrajectoryKey
from rollstream.buffer.wire import Lease
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config

GROUP_SIZE = 3
SERVE = """
import json, signal, sys, threading
from pathlib import Path
from rollstream.buffer.server import serve
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
serve(Run(Path(sys.argv[1]), Config.model_validate(json.loads(sys.argv[2])), sys.argv[3]), stop)
"""


def run_in(folder: Path, *, learner: dict[str, Any] | None = None, **buffer: Any) -> Run:
    settings = {
        "name": "stream",
        "env": {"id": "Acme/Calculator-v0"},
        "buffer": {"depth": 1, "max_lag": 3, "lease_timeout_s": 20.0, **buffer},
        "learner": {"versions": 99, "batch_groups": 2, "group_size": GROUP_SIZE, **(learner or {})},
    }
    return Run(folder, Config.model_validate(settings), f"run-{folder}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def serving(run: Run) -> Iterator[None]:
    """The buffer in a thread of this process."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, run, stop)
        try:
            yield
        finally:
            stop.set()
            served.result(10)


class ServerProcess:
    """The buffer in a process that can be killed; a context manager."""

    def __init__(self, run: Run, script: str = SERVE, *arguments: str) -> None:
        self.run, self._script, self._arguments = run, script, arguments
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", self._script, str(self.run.folder), self.run.config.model_dump_json(), self.run.run_id, *self._arguments]
        self.process = subprocess.Popen(command)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def play(lease: Lease, member: int, num_tokens: int = 40, media: tuple[MediaSpan, ...] = (), **changes: Any) -> Trajectory:
    """A trajectory whose first ten tokens are the prompt."""
    rng = np.random.default_rng([lease.seed, member])
    mask = (np.arange(num_tokens) >= 10).astype(np.uint8)
    segment = Segment(
        rng.integers(0, 250, num_tokens).astype(np.int32),
        mask,
        np.where(mask == 1, -rng.random(num_tokens), 0).astype(np.float32),
        np.zeros(1, np.int32),
        np.array([lease.admit_version], np.int32),
        np.array([0, 10], np.int32),
        ("user", "assistant"),
        (None, None),
        media,
    )
    key = TrajectoryKey(lease.lineage, lease.group_id, member, lease.attempt)
    made = Trajectory(key, lease.env_id, lease.task_index, lease.seed, lease.purpose, (segment,), float(rng.random()), "terminated", "terminated")
    return msgspec.structs.replace(made, **changes)


async def one_lease(client: ActorClient) -> Lease:
    client.credit(1)
    lease = await client.next_lease()
    assert lease is not None
    return lease


async def play_groups(client: ActorClient, num: int, **options: Any) -> list[TrajectoryKey]:
    """Plays ``num`` groups, one after the other."""
    told: list[TrajectoryKey] = []
    for _ in range(num):
        lease = await one_lease(client)
        for member in lease.members:
            trajectory = play(lease, member, **options)
            await client.append(trajectory)
            told.append(trajectory.key)
        client.finish(lease.group_id)
    return told


class Actor:
    """Plays leases in a thread with its own loop until told to stop; ``delay_s`` per member."""

    def __init__(self, run: Run, play: Callable[[Lease, int], Trajectory], peer_id: str, delay_s: float) -> None:
        self.acknowledged: list[TrajectoryKey] = []
        self.client: ActorClient | None = None
        self.sent = 0
        self.may_send = threading.Event()
        self.may_send.set()
        self._run, self._played, self._peer_id, self._delay_s = run, play, peer_id, delay_s
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(lambda: asyncio.run(self._act()))

    async def _act(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with ActorClient(self._run.endpoint, self._run.run_id, self._peer_id, silent_s=60) as self.client, asyncio.TaskGroup() as tasks:
            self.client.credit(4)
            while (lease := await self.client.next_lease()) is not None:
                tasks.create_task(self._play(self.client, lease))
            await self.client.release()

    async def _play(self, client: ActorClient, lease: Lease) -> None:
        for member in lease.members:
            await asyncio.sleep(self._delay_s)
            self.sent += 1
            trajectory = self._played(lease, member)
            while not self.may_send.is_set():
                await asyncio.sleep(0.02)
            await client.append(trajectory)
            self.acknowledged.append(trajectory.key)
        client.finish(lease.group_id)
        client.credit(4)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a method of the client on its own loop."""
        assert self.client is not None
        self._loop.call_soon_threadsafe(getattr(self.client, name), *arguments)

    def stop(self) -> None:
        if not self._done.done():
            self.call("stop")
        self._done.result(30)
        self._pool.shutdown()


@contextlib.contextmanager
def acting(run: Run, play: Callable[[Lease, int], Trajectory] = play, peer_id: str = "actor-0", delay_s: float = 0.0) -> Iterator[Actor]:
    """An actor that sends what ``play`` makes."""
    actor = Actor(run, play, peer_id, delay_s)
    try:
        yield actor
    finally:
        actor.stop()


def pull(learner: LearnerClient, version: int, timeout_s: float = 30.0) -> Batch:
    stop = threading.Event()
    timer = threading.Timer(timeout_s, stop.set)
    timer.start()
    try:
        batch = learner.pull(version, lambda reason: None, stop)
    finally:
        timer.cancel()
    assert batch is not None, f"no batch {version} within {timeout_s} s"
    return batch


def wait_until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def checkpoint(run: Run, learner: LearnerClient, version: int) -> None:
    """As the learner does: sync, then the folder takes its name."""
    learner.sync()
    (run.checkpoints_folder / f"v{version:06d}").mkdir(parents=True)
