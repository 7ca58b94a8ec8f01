"""The first run as a newcomer makes it, shortened: the policy learns, the books close, and nothing stale is trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def rollstream(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "rollstream", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=380)
    logs = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in folder.glob("runs/*/logs/*"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    return done.stdout


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def test_a_short_quickstart_learns_within_its_bounds_and_its_books_close(tmp_path: Path) -> None:
    out = rollstream(tmp_path, "train", "quickstart", "learner.versions=30")
    run = tmp_path / "runs" / "quickstart"
    rows = rows_of(run)
    assert [row["version"] for row in rows] == list(range(1, 31))
    assert mean(rows[-5:], "train/reward_mean") > mean(rows[:5], "train/reward_mean") + 0.05
    assert max(row["train/lag_max"] for row in rows) <= 4
    assert sum(row["train/age_drops"] for row in rows) == 0
    assert sum(row["train/invalid_episodes"] for row in rows) == 0
    assert {row["train/episodes"] for row in rows} == {96}
    assert "version 30 of 30" in out
    audit = rollstream(tmp_path, "audit", str(run))
    assert "360" in audit  # 30 batches of 12 groups, each trained once
    assert list((run / "tensorboard").iterdir())
    assert (run / "checkpoints" / "v000030" / "model" / "config.json").is_file()


def test_depth_0_is_synchronous_training_on_policy(tmp_path: Path) -> None:
    rollstream(tmp_path, "train", "quickstart", "learner.versions=4", "buffer.depth=0", "buffer.max_lag=0", "warmup.steps=20", "learner.batch_groups=4")
    for row in rows_of(tmp_path / "runs" / "quickstart"):
        assert row["train/lag_max"] == 0
        assert row["loss/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert row["loss/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert row["loss/trust_masked_frac"] == 0
