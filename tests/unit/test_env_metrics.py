"""A batch of several environments has numbers of each."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.learner import metrics


def trajectory(group_id: int, member: int, env_id: str, num_tokens: int, reward: float) -> Trajectory:
    mask = np.array([0] + [1] * (num_tokens - 1), np.uint8)
    zero = np.zeros(1, np.int32)
    segment = Segment(np.arange(num_tokens, dtype=np.int32), mask, -mask.astype(np.float32), zero, zero, zero, ("user",), (None,))
    key = TrajectoryKey(0, group_id, member, 0)
    return Trajectory(key, env_id, 0, 0, "train", (segment,), reward, "terminated", "terminated", env_metrics={"success": float(reward > 0)})


def test_each_environment_has_its_share_and_its_means_and_one_without_episodes_only_its_share() -> None:
    played = [trajectory(0, member, "demo/A-v0", 10, 1.0) for member in range(3)] + [trajectory(1, 0, "demo/B-v0", 30, 0.5)]
    cut = replace(trajectory(1, 1, "demo/B-v0", 50, -0.5), status="truncated", stop_reason="length")
    failed = replace(trajectory(1, 2, "demo/B-v0", 2, 0.0), status="failed", stop_reason="env", reward=None, env_metrics={})
    row = metrics._of_envs(Batch(0, 1, (0, 1), (*played, cut, failed)), ["demo/A-v0", "demo/B-v0", "demo/C-v0"])
    assert row == {
        "env/demo/A-v0/share": 0.5, "env/demo/A-v0/reward_mean": 1.0, "env/demo/A-v0/success": 1.0, "env/demo/A-v0/sequence_tokens_mean": 10.0,
        "env/demo/A-v0/truncated_share": 0.0, "env/demo/A-v0/invalid_share": 0.0,
        "env/demo/B-v0/share": 0.5, "env/demo/B-v0/reward_mean": 0.0, "env/demo/B-v0/success": 0.5, "env/demo/B-v0/sequence_tokens_mean": 82 / 3,
        "env/demo/B-v0/truncated_share": 0.5, "env/demo/B-v0/invalid_share": 1 / 3,
        "env/demo/C-v0/share": 0.0,
    }  # fmt: skip
