"""A value head and adapters in a real run: the value loss falls, and samplers with merged weights are on policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(400)]


def test_gae_with_adapters_trains_on_policy_at_depth_0_and_its_value_loss_falls(tmp_path: Path) -> None:
    settings = ["learner.preset=ppo", "learner.value.learning_rate=0.003", "learner.policy.lora={rank: 8}", "learner.versions=4", "learner.batch_groups=4"]
    synchronous = ["buffer.depth=0", "buffer.max_lag=0", "warmup.steps=5"]
    command = [sys.executable, "-m", "rollstream", "train", "quickstart", *settings, *synchronous]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=380)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = [json.loads(line) for line in (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["loss/is_max"] == pytest.approx(1, abs=1e-4)
        assert row["loss/is_min"] == pytest.approx(1, abs=1e-4)
        assert row["optim/grad_norm"] > 0
        assert row["value/grad_norm"] > 0
    assert min(rows[2]["value/loss"], rows[3]["value/loss"]) < 0.9 * rows[0]["value/loss"]
