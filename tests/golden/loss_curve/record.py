"""Makes the recorded stream and the loss curves beside it: ``python tests/golden/loss_curve/record.py``.

The stream is one Arrow IPC file with a record batch per learner batch, in the columns of the stream: random tokens, scored by the tiny policy they are
later trained into, with noise in the place of an engine's own rounding. The curves are what training from it reports. Record anew only where the maths is
meant to change, and say so in the change.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import torch

from rollstream import models
from rollstream.buffer.columns import SCHEMA, encode
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.configs.run_folder import Run
from rollstream.learner.collate import flatten, pack
from rollstream.learner.plan import plan
from rollstream.learner.policy import Policy

FOLDER = Path(__file__).resolve().parent
VERSIONS, GROUPS, MEMBERS = 8, 3, 4


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
    from msgspec.structs import replace

    run = test_module().run_in(FOLDER, "async")
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


def test_module() -> ModuleType:
    """The test that trains from it: it knows how."""
    path = FOLDER.parents[1] / "integration" / "test_loss_curve.py"
    spec = importlib.util.spec_from_file_location("loss_curve", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loss_curve"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Writes ``stream.arrow`` and ``curves.json``."""
    torch.set_num_threads(1)
    test = test_module()
    with tempfile.TemporaryDirectory() as folder:
        run: Run = test.run_in(Path(folder), "async")
        policy = Policy(models.load_policy(models.prepare_model(run)))
        with pa.OSFile(str(FOLDER / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
            for version in range(1, VERSIONS + 1):
                groups = tuple(range((version - 1) * GROUPS, version * GROUPS))
                made = Batch(0, version, groups, tuple(trajectory(version, group, member) for group in groups for member in range(MEMBERS)))
                writer.write_batch(encode(scored(policy, made)))
    curves: dict[str, object] = {}
    for name in test.SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            curves[name] = test.curve(test.trained(Path(folder), name)[0])
    (FOLDER / "curves.json").write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
