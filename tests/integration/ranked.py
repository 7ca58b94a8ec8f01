"""What the tests of ranks share: recorded batches, dealt to the ranks of a learner, and what its run left. The processes are those of ``rank_nursery.py``."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollstream.buffer.deal import costs, deal
from rollstream.buffer.header import header_of
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.buffer.wire import StatusReply, Welcome
from rollstream.configs.schema import Config
from rollstream.learner.ranks import Ranks

VERSIONS, EVERY, GROUPS, MEMBERS = 6, 2, 3, 4
PLAIN = {"kind": "dppo_tv", "old": "mu", "delta": 0.2, "is_cap": 5.0, "mu_sq_coef": 0.001, "agg": "group_mean_token_mean", "entropy_coef": 0.01}
VALUED: dict[str, Any] = {
    "versions": 2, "advantage": {"mode": "gae", "lam": 0.9, "whiten": True}, "value": {"warmup_versions": 1}, "updates": {"mini_batches": 2},
    "loss": {"kind": "ppo", "old": "prox", "kl": "k1", "kl_coef": 0.01, "kl_in": "reward"}, "tokens_per_micro_batch": 60,
}  # fmt: skip
"""Everything that is scored before the first update: values, a reference, proximal log-probabilities of two updates."""


def trajectory(version: int, group: int, member: int) -> Trajectory:
    rng = np.random.default_rng([version, group, member])
    segments: list[Segment] = []
    for _ in range(1 + int(rng.integers(2))):
        length = int(rng.integers(6, 30))
        mask = (rng.random(length) < 0.5).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        segments.append(
            Segment(
                token_ids=rng.integers(0, 200, length).astype(np.int32), loss_mask=mask,
                behaviour_logprobs=np.where(mask, rng.normal(-5.5, 0.3, length), 0.0).astype(np.float32),
                version_starts=np.zeros(1, np.int32), version_values=np.array([max(version - 2, 0)], np.int32),
                turn_starts=np.zeros(1, np.int32), turn_roles=("assistant",), turn_rewards=(None,),
            )
        )  # fmt: skip
    return Trajectory(TrajectoryKey(0, group, member, 0), "env", 0, 0, "train", tuple(segments), float(rng.random()), "terminated", "terminated")


def batch(version: int, rank: int = 0, ranks: int = 1) -> Batch:
    """The recorded batch as the buffer gives it to a rank."""
    groups = tuple(range(version * GROUPS, version * GROUPS + GROUPS))
    whole = Batch(0, version, groups, tuple(trajectory(version, group, member) for group in groups for member in range(MEMBERS)))
    header = header_of(whole)
    mine = deal(costs(header, whole.withheld, config().learner.advantage, "keep"), ranks)[rank]
    return msgspec.structs.replace(whole, header=header, trajectories=tuple(whole.trajectories[index] for index in mine))


def config(**learner: Any) -> Config:
    return Config.model_validate({
        "name": "ranks", "seed": 3, "env": {"id": "rollstream/KeyValue-v0"},
        "model": {"kind": "tiny", "num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1},
        "learner": {
            "versions": VERSIONS, "batch_groups": GROUPS, "group_size": MEMBERS, "loss": PLAIN, "advantage": {"mode": "grpo"},
            "optimizer": {"learning_rate": 0.003, "weight_decay": 0.01}, "checkpoint": {"every": EVERY, "keep_last": 9}, "alarms": {"ess_stop": 0.0},
            **learner,
        },
    })  # fmt: skip


class Source:
    """Recorded batches in the place of the buffer, for one rank; ``before`` hears of each pull."""

    def __init__(self, ranks: Ranks, before: Callable[[int], None] = lambda version: None) -> None:
        self.ranks, self.before, self.told, self.digests = ranks, before, list[str](), dict[int, str]()

    def hello(self, version: int | None, lineage: int | None, vocabulary: int | None) -> Welcome:
        return Welcome(0, version or 0)

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
        on_wait("nothing")
        self.before(version)
        return None if stop.is_set() else batch(version, self.ranks.rank, self.ranks.num)

    def trained(self, version: int) -> None:
        self.told.append(f"trained {version}")

    def published(self, version: int, digest: str) -> str:
        self.digests[version] = digest
        return ""

    def sync(self) -> None:
        self.told.append("sync")

    def status(self) -> StatusReply:
        return StatusReply(0, 0, {}, {}, [], "")


def caught(call: Callable[[], object]) -> str:
    try:
        return f"none: {call()}"
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def followed(folder: Path) -> list[dict[str, Any]]:
    """What follows from the data alone."""
    return [{name: value for name, value in row.items() if name.startswith(("train/", "loss/", "optim/", "value/"))} for row in rows(folder)]
