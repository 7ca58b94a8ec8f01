"""Starts roles as real processes within milliseconds: everything is imported once, then each role is a fork.

    python nursery.py FOLDER < commands

A command is one JSON line ``{"role": …, "name": …, "log": …, …}``; the answer is the child's process id. With ``die_at`` the child dies by itself at that
window of ``failpoints.py``; ``fork`` is the fork its run was asked for. ``{"kill": [pid, …]}`` kills children and
answers when each has ended, all its threads with it. The roles are the real buffer, the real actor (with the
scripted sampler) and a double of the learner without torch. The end of standard input kills the children.

Journals in FOLDER, one line per event, each written by one ``write``: ``appended.jsonl`` what an actor was told is stored; ``pulled.jsonl`` what the
learner was served.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import failpoints
from rollstream.actors.evaluator import evaluate
from rollstream.actors.loop import act
from rollstream.buffer.client import ActorClient, LearnerClient
from rollstream.buffer.log_files import local_files
from rollstream.buffer.manifest import Manifest
from rollstream.buffer.server import serve
from rollstream.buffer.types import Batch, Trajectory
from rollstream.buffer.weights import WeightsWriter
from rollstream.buffer.wire import Retained, RetainedVersion, SkippedVersion
from rollstream.configs.run_folder import ForkPoint, Run
from rollstream.configs.schema import Config
from rollstream.models import build_tiny_tokenizer


def journal(path: Path, entry: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, json.dumps(entry).encode() + b"\n")
    os.close(descriptor)


# --- the actor ----------------------------------------------------------------------------------------------------------------------


def note_what_is_acknowledged(folder: Path) -> None:
    append = ActorClient.append

    async def noted(self: ActorClient, trajectory: Trajectory) -> None:
        await append(self, trajectory)
        journal(folder / "appended.jsonl", {"key": trajectory.key})

    ActorClient.append = noted  # type: ignore[method-assign]


# --- the learner's double -------------------------------------------------------------------------------------------------------------


def content_of(batch: Batch) -> str:
    """Digest of all that is trained on."""
    digest = xxhash.xxh3_128(json.dumps([batch.version, batch.groups, sorted(batch.withheld)]).encode())
    for item in batch.trajectories:
        digest.update(json.dumps([item.key, item.reward, item.status]).encode())
        for segment in item.segments:
            for values in (segment.token_ids, segment.loss_mask, segment.behaviour_logprobs, segment.version_starts, segment.version_values):
                digest.update(np.ascontiguousarray(values))
    return digest.hexdigest()


def next_weights(weights: str, content: str) -> str:
    """What training does here: the new weights depend on the old ones and on every token of the batch."""
    return xxhash.xxh3_128_hexdigest((weights + content).encode())


class Learner:
    """A learner whose weights are one digest. Each checkpoint is a file; a start resumes from one of the kept ones, not always the newest."""

    KEPT = 4

    def __init__(self, run: Run, seed: int, step_s: float, every: int) -> None:
        self.run, self.random, self.step_s, self.every = run, random.Random(seed), step_s, every
        self.folder = run.folder / "double"
        self.folder.mkdir(exist_ok=True)
        kept = sorted(self.folder.glob("v*.json"))
        chosen = kept[-1] if kept and self.random.random() < 0.6 else self.random.choice(kept) if kept else None
        saved = json.loads(chosen.read_text()) if chosen else {"version": 0, "weights": "none"}
        self.version, self.weights, self.lineage = int(saved["version"]), str(saved["weights"]), int(saved.get("lineage", 0))
        self.client = LearnerClient(run.endpoint, run.run_id, files=local_files(run))
        self.writer: WeightsWriter | None = None
        self.kept: dict[tuple[int, int], RetainedVersion] = {}

    def learn(self, stop: threading.Event) -> None:
        welcome = self.client.hello(self.version, self.lineage)
        assert welcome.version == self.version
        self.lineage = welcome.lineage
        evaluation = self.run.config.evaluation
        self.writer = WeightsWriter(self.run.weights_folder, 4, evaluation.retain if evaluation is not None else 0)
        if not list(self.folder.glob("v*.json")):
            self.save()
        self.publish()
        while self.version < self.run.config.learner.versions and not stop.is_set():
            batch = self.client.pull(self.version + 1, lambda reason: self.tell_kept(), stop)
            if batch is None:
                break
            content = content_of(batch)
            tokens = {f"{item.key.group_id}/{item.key.member}": item.num_tokens for item in batch.trajectories}
            journal(self.run.folder / "pulled.jsonl", {"version": batch.version, "content": content, "recorded": batch.recorded, "tokens": tokens})
            time.sleep(self.step_s * self.random.expovariate(1.0))
            self.weights = next_weights(self.weights, content)
            self.version = batch.version
            self.client.trained(self.version)
            self.publish()
            if self.version % self.every == 0:
                self.save()
        self.client.close()
        self.writer.close()

    def publish(self) -> None:
        assert self.writer is not None
        values = np.frombuffer(bytes.fromhex(xxhash.xxh3_128_hexdigest(self.weights.encode())) * 16, np.uint8)
        manifest = self.writer.write(self.lineage, self.version, [("weight", "uint8", values.shape, memoryview(values))])
        if manifest is not None:
            self.client.published(self.version, manifest.digest)
            self.tell_kept(manifest)

    def tell_kept(self, manifest: Manifest | None = None) -> None:
        """As the learner does: keeps what is due, and says so."""
        assert self.writer is not None
        evaluation = self.run.config.evaluation
        if evaluation is None:
            return
        skipped: list[SkippedVersion] = []
        if manifest is not None and evaluation.is_due(manifest.version, self.run.config.learner.versions):
            if self.writer.retention.keep(manifest):
                self.kept[self.lineage, manifest.version] = RetainedVersion(self.lineage, manifest.version, manifest.digest)
            else:
                skipped.append(SkippedVersion(self.lineage, manifest.version, self.writer.retention.full))
        reply = self.client.retained(Retained(list(self.kept.values()), skipped, (self.lineage, self.version)))
        wanted = {(item.lineage, item.version) for item in reply.open}
        self.kept = {key: value for key, value in self.kept.items() if key in wanted}
        self.writer.retention.want(wanted)

    def save(self) -> None:
        path = self.folder / f"v{self.version:06d}.json"
        path.with_suffix(".tmp").write_text(json.dumps({"version": self.version, "weights": self.weights, "lineage": self.lineage}))
        self.client.sync()
        path.with_suffix(".tmp").replace(path)
        for old in sorted(self.folder.glob("v*.json"))[: -self.KEPT]:
            old.unlink()


# --- processes ------------------------------------------------------------------------------------------------------------------------


def live(folder: Path, config: Config, run_id: str, command: dict[str, Any]) -> None:
    """The life of one child."""
    log = os.open(folder / "logs" / f"{command['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s", force=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    run = Run(folder, config, run_id, fork=ForkPoint(**command["fork"]) if command.get("fork") else None)
    if command.get("die_at"):
        failpoints.WINDOWS[command["die_at"]][1]()
    if command["role"] == "buffer":
        serve(run, stop)
    elif command["role"] == "evaluator":
        note_what_is_acknowledged(folder)
        evaluate(run, command["name"], stop)
    elif command["role"] == "actor":
        note_what_is_acknowledged(folder)
        act(run, command["name"], stop)
    else:
        Learner(run, command["seed"], command["step_s"], command["every"]).learn(stop)


def answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    folder = Path(sys.argv[1])
    config, run_id = Config.model_validate(json.loads(sys.argv[2])), sys.argv[3]
    build_tiny_tokenizer(512)
    asyncio.Runner().close()
    children: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if "kill" in command:
            for pid in command["kill"]:
                os.kill(pid, signal.SIGKILL)
            for pid in command["kill"]:
                os.waitpid(pid, 0)
                children.discard(pid)
            answer("killed")
            continue
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(folder, config, run_id, command)
                code = 0
            except BaseException:
                logging.exception("event=failed")
            finally:
                os._exit(code)
        children.add(pid)
        answer(str(pid))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
