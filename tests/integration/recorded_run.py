"""A run on disk without its processes: trajectories made up, everything that stores and trains them real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.buffer.books import Books
from rollstream.buffer.columns import Rows, encode, frame_checksum, to_frame
from rollstream.buffer.facts import facts
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.log import Log
from rollstream.buffer.recorded import Recorded
from rollstream.buffer.recovery import fork_once
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.buffer.window import Rules
from rollstream.buffer.wire import Lease, StatusReply, Welcome
from rollstream.configs.loader import create_run, load_config
from rollstream.configs.run_folder import Run

SETTINGS = (
    *("learner.batch_groups=2", "learner.group_size=3", "learner.alarms.ess_stop=0", "buffer.depth=1", "buffer.max_lag=3", "warmup=null"),
    *("model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}", "learner.optimizer.learning_rate=0.003"),
)


def make_run(folder: Path, *overrides: str) -> Run:
    return create_run(load_config("quickstart", [f"folder={folder}", *SETTINGS, *overrides]), resume=False)


def trajectory(lease: Lease, member: int) -> Trajectory:
    rng = np.random.default_rng([lease.group_id, member, lease.attempt])
    length = int(rng.integers(6, 24))
    mask = (rng.random(length) < 0.5).astype(np.uint8)
    mask[0], mask[-1] = 0, 1
    segment = Segment(
        token_ids=rng.integers(0, 200, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, rng.normal(-5.5, 0.3, length), 0.0).astype(np.float32),
        version_starts=np.array([0], np.int32),
        version_values=np.array([lease.admit_version], np.int32),
        turn_starts=np.array([0], np.int32),
        turn_roles=("assistant",),
        turn_rewards=(None,),
    )
    key = TrajectoryKey(lease.lineage, lease.group_id, member, lease.attempt)
    success = float(rng.integers(2))
    return Trajectory(
        key, lease.env_id, lease.task_index, lease.seed, "train", (segment,), success + 0.1 * float(rng.random()), "terminated", "terminated",
        env_metrics={"success": success},
    )  # fmt: skip


class Stream:
    """A buffer in this process, in the place of :class:`LearnerClient`: every pull plays what can be leased, records the batch, and reads it from the files.

    ``segment_bytes`` is that of the log.
    """

    def __init__(self, run: Run, *, segment_bytes: int = 2**20) -> None:
        self.run = run
        self.ledger = Ledger(run.ledger_path, run.run_id)
        self.log = Log(run.stream_folder, segment_bytes=segment_bytes)
        self.log.start_after(self.ledger.last_segment())
        fork_once(self.ledger, run.fork, self.log.read)
        self.books = Books(self.ledger, Rules.of(run.config))
        self.notes: list[str] = []

    def close(self) -> None:
        self.log.close()
        self.ledger.close()

    def play(self, played: Callable[[Lease, int], Trajectory] = trajectory) -> None:
        while (lease := self.books.grant("actor-0", 0.0)) is not None:
            batch = encode([played(lease, member) for member in lease.members])
            append_id = self.ledger.last_append_id() + 1
            found = facts(Rows(batch))
            self.books.check_known(found)
            assert {self.books.receive(fact, append_id) for fact in found} == {"store"}
            frame = to_frame(batch)
            self.ledger.put_append(append_id, self.log.append(frame, frame_checksum(frame)), batch.num_rows, len(lease.members))
            self.commit()

    def commit(self) -> None:
        self.books.save_counters()
        self.log.flush()
        self.ledger.commit()

    # --- what the learner calls -----------------------------------------------------------------------------------------------------------

    def hello(self, version: int, lineage: int, vocabulary: int) -> Welcome:
        self.books.resume(version, lineage)
        return Welcome(self.books.lineage, self.books.version)

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
        on_wait("nothing")
        if stop.is_set():
            return None
        self.play()
        assert self.books.batch(version) is not None
        self.commit()
        with Recorded(self.run.folder) as source:
            return source.batch(version)

    def trained(self, version: int) -> None:
        self.books.trained(version)
        self.commit()

    def published(self, version: int, digest: str) -> str:
        self.notes.append(self.books.published(version, digest))
        self.commit()
        return self.notes[-1]

    def sync(self) -> None:
        self.log.sync()
        self.ledger.sync()

    def status(self) -> StatusReply:
        return StatusReply(self.books.lineage, self.books.version, {}, {}, [], "")


def options(**learner: Any) -> list[str]:
    return [f"learner.{name}={value}" for name, value in learner.items()]
