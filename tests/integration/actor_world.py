"""A buffer in this process, the learner's two ends, and real actors on threads: what the tests of actors share.

To be loaded once per process, under the name ``actor_world``: it registers an environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.actors.loop import act
from rollstream.buffer.client import LearnerClient
from rollstream.buffer.server import serve
from rollstream.buffer.types import Batch
from rollstream.buffer.weights import WeightsWriter
from rollstream.buffer.wire import StatusReply
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config
from rollstream.envs.chat import ChatEnv, Message, Turn
from rollstream.envs.registry import register


class Counting(ChatEnv):
    """Two turns, the second one scored; raises or waits where its arguments say so."""

    max_turns = 2

    def __init__(self, broken: bool = False, wait_s: float = 0.0) -> None:
        self.broken, self.wait_s = broken, wait_s
        self.turns = 0

    def start(self, task: int) -> str:
        self.turns = 0
        return f"count {task}"

    async def respond(self, message: Message) -> Turn:
        if self.broken:
            raise KeyError("answer")
        await asyncio.sleep(self.wait_s)
        self.turns += 1
        return Turn("more", reward=None if self.turns == 1 else len(message["content"]) / 10, done=self.turns == 2)

    async def malformed_call(self, problem: str) -> Turn:
        return await self.respond({"role": "assistant", "content": problem})


register("test-actor/Counting-v0", Counting)


@dataclass
class Role(threading.Thread):
    """A role's blocking loop on a thread of its own; its error is kept."""

    work: Callable[[threading.Event], None]
    stop: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.start()

    def run(self) -> None:
        try:
            self.work(self.stop)
        except Exception as error:  # noqa: BLE001 - whatever it was, the test looks at it
            self.error = error

    def __hash__(self) -> int:
        return id(self)

    def leave(self, timeout_s: float = 10.0) -> float:
        """Asks it to stop and returns the seconds it took."""
        started = time.monotonic()
        self.stop.set()
        self.join(timeout_s)
        assert not self.is_alive(), "still running"
        return time.monotonic() - started


@dataclass
class World:
    """A buffer, the learner's two ends, and actors to start."""

    run: Run
    learner: LearnerClient
    writer: WeightsWriter
    roles: list[Role] = field(default_factory=list)

    def actor(self, name: str = "actor-0") -> Role:
        self.roles.append(Role(lambda stop: act(self.run, name, stop)))
        return self.roles[-1]

    def publish(self, version: int, tensors: list[Any] | None = None) -> None:
        given = tensors or [("weight", "float32", (256,), memoryview(np.full(256, version, np.float32)))]
        manifest = self.writer.write(0, version, given)
        assert manifest is not None
        self.learner.published(version, manifest.digest)

    def pull(self, version: int, timeout_s: float = 30.0) -> Batch:
        stop = threading.Event()
        timer = threading.Timer(timeout_s, stop.set)
        timer.start()
        batch = self.learner.pull(version, lambda _: None, stop)
        timer.cancel()
        assert batch is not None, f"no batch {version} after {timeout_s} s: {self.learner.status()}"
        return batch

    def until(self, condition: Callable[[StatusReply], bool], timeout_s: float = 20.0) -> StatusReply:
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.learner.status()
            assert status is not None
            if condition(status):
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.02)


@contextlib.contextmanager
def world(folder: Path, **sections: Any) -> Iterator[World]:
    config = Config.model_validate({
        "name": "test",
        "folder": str(folder),
        "env": {"id": sections.pop("env_id", "test-actor/Counting-v0"), "kwargs": sections.pop("env_kwargs", {})},
        "actors": {"slots": 8, "sampler": {"kind": "scripted"}, "sampling": {"max_turn_tokens": 8, "max_trajectory_tokens": 64}, **sections.pop("actors", {})},
        "learner": {"versions": 10, "batch_groups": 2, "group_size": 3},
        **sections,
    })  # fmt: skip
    run = Run(folder=folder, config=config, run_id=f"run-{folder.name}")
    run.stream_folder.mkdir(parents=True)
    run.socket_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    buffer = Role(lambda stop: serve(run, stop))
    writer = WeightsWriter(run.weights_folder, num_readers=2)
    learner = LearnerClient(run.endpoint, run.run_id)
    made = World(run, learner, writer)
    try:
        learner.hello(0)
        yield made
    finally:
        for role in made.roles:
            role.leave()
        learner.close()
        writer.close()
        buffer.leave()
        assert buffer.error is None
