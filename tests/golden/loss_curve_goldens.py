"""A recorded stream and the loss curves of training from it.

    python tests/golden/loss_curve_goldens.py      records both anew, in loss_curve/

The stream is one Arrow IPC file with a record batch per learner batch, in the columns of the stream: random tokens, scored by the tiny policy they are
later trained into, with noise in the place of an engine's own rounding. The curves are what training from it reports. Record anew only where the maths is
meant to change, and say so in the change.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from msgspec.structs import replace

from rollstream import models
from rollstream.buffer.columns import SCHEMA, decode, encode
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.buffer.wire import StatusReply, Welcome
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.learner.collate import flatten, pack
from rollstream.learner.loop import learn_from
from rollstream.learner.plan import plan
from rollstream.learner.policy import Policy

FOLDER = Path(__file__).resolve().with_name("loss_curve")
VERSIONS, GROUPS, MEMBERS = 8, 3, 4
SETTINGS = {
    "async": ("learner.preset=async", "learner.loss.entropy_coef=0.01"),
    "grpo": ("learner.preset=grpo", "learner.updates={mini_batches: 3, epochs: 2}"),
    "gspo": ("learner.preset=gspo", "learner.loss={entropy_coef: 0.0, kl: k2, kl_coef: 0.01}"),
}
"""What is trained from the stream: a step per batch, several steps per batch, ratios and a reference per sequence."""


def trajectory(version: int, group: int, member: int) -> Trajectory:
    """Random tokens in one to two turns; its log-probabilities are still to be filled in."""
    rng = np.random.default_rng([version, group, member])
    length = int(rng.integers(12, 48))
    mask = np.zeros(length, np.uint8)
    mask[4 : int(rng.integers(8, length))] = 1
    mask[-3:] = 1
    segment = Segment(
        token_ids=rng.integers(0, 256, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.zeros(length, np.float32),
        version_starts=np.zeros(1, np.int32),
        version_values=np.array([max(version - 1 - int(rng.integers(3)), 0)], np.int32),
        turn_starts=np.array([0, 4], np.int32),
        turn_roles=("user", "assistant"),
        turn_rewards=(None, None),
    )
    reward = float(rng.integers(2)) + 0.25 * float(rng.random())
    return Trajectory(TrajectoryKey(0, group, member, 0), "golden/Random-v0", group, group, "train", (segment,), reward, "terminated", "terminated")


def scored(policy: Policy, made: Batch) -> list[Trajectory]:
    """The trajectories of ``made`` with log-probabilities of the policy, and noise."""
    run = run_in(FOLDER, "async")
    flat = flatten(made, run.config.buffer.max_lag)
    decided = plan(flat.rows, run.config.learner.loss, run.config.learner.advantage, "keep")
    found = np.zeros(len(flat.token_ids), np.float32)
    with torch.no_grad():
        for one in pack(flat, decided, 10_000):
            found[one.scored.numpy()] = policy.logprobs(one, 1.0)[0].numpy()
    noise = np.random.default_rng(made.version).normal(0, 0.02, len(found)).astype(np.float32)
    found = np.where(found < 0, np.minimum(found + noise, 0), 0).astype(np.float32)
    ends = np.cumsum([one.segments[0].num_tokens for one in made.trajectories])
    parts = np.split(found, ends[:-1])
    return [
        replace(one, segments=(replace(one.segments[0], behaviour_logprobs=np.where(one.segments[0].loss_mask, part, 0).astype(np.float32)),))
        for one, part in zip(made.trajectories, parts, strict=True)
    ]


class Stream:
    """The recorded batches in the place of the buffer."""

    def __init__(self) -> None:
        with pa.OSFile(str(FOLDER / "stream.arrow")) as source, pa.ipc.open_stream(source) as reader:
            self.batches = [self._batch(version, part) for version, part in enumerate(reader, start=1)]
        self.digests: dict[int, str] = {}

    @staticmethod
    def _batch(version: int, part: pa.RecordBatch) -> Batch:
        trajectories = decode(part)
        return Batch(0, version, tuple(dict.fromkeys(one.key.group_id for one in trajectories)), tuple(trajectories))

    def hello(self, version: int, lineage: int, vocabulary: int) -> Welcome:
        return Welcome(0, version)

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
        return self.batches[version - 1]

    def trained(self, version: int) -> None:
        return

    def published(self, version: int, digest: str) -> str:
        self.digests[version] = digest
        return ""

    def sync(self) -> None:
        return

    def status(self) -> StatusReply:
        return StatusReply(0, 0, {}, {}, [], "")


def run_in(folder: Path, name: str) -> Run:
    tiny = "model={kind: tiny, num_layers: 2, hidden_size: 32, num_heads: 2, num_kv_heads: 1}"
    sizes = ("learner.batch_groups=3", "learner.group_size=4", "learner.versions=8", "learner.tokens_per_micro_batch=160")
    rest = ("warmup=null", "learner.alarms.ess_stop=null", "learner.optimizer={learning_rate: 3e-3, weight_decay: 0.01, warmup_versions: 2}", "seed=5")
    return Run(folder, load_config("quickstart", [tiny, *sizes, *rest, *SETTINGS[name]]), f"curve-{folder}")


def trained(folder: Path, name: str) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The rows of a run over the whole stream, and the digest of each version's weights."""
    run, source = run_in(folder, name), Stream()
    learn_from(run, source, threading.Event())
    return [json.loads(line) for line in run.metrics_path.read_text().splitlines()], source.digests


def curve(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What follows from the data and the weights."""
    return [{name: value for name, value in row.items() if name.startswith(("loss/", "train/", "optim/"))} for row in rows]


def main() -> None:
    """Writes ``stream.arrow`` and ``curves.json``."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = run_in(Path(folder), "async")
        policy = Policy(models.load_policy(models.prepare_model(run)))
        with pa.OSFile(str(FOLDER / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
            for version in range(1, VERSIONS + 1):
                groups = tuple(range((version - 1) * GROUPS, version * GROUPS))
                made = Batch(0, version, groups, tuple(trajectory(version, group, member) for group in groups for member in range(MEMBERS)))
                writer.write_batch(encode(scored(policy, made)))
    curves: dict[str, object] = {}
    for name in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            curves[name] = curve(trained(Path(folder), name)[0])
    (FOLDER / "curves.json").write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
