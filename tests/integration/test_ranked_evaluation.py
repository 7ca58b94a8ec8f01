"""A whole run of two ranks that trains adapters and is evaluated meanwhile; a checkpoint scored again gives the same, and the run forks into one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = (
    *("actors.slots=8", "learner.batch_groups=2", "learner.group_size=4", "learner.checkpoint.every=2", "learner.checkpoint.keep_last=10"),
    *("warmup.steps=2", "warmup.demonstrations_per_step=8", "learner.alarms.ess_stop=0", "learner.policy.lora={rank: 4, alpha: 8}"),
    "model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}",
    "evaluation={every: 2, tasks: 3, samples: 2, k: [1, 2], sampling: {temperature: 0.7}}",
)
RANKED = ("learner.policy.kind=fsdp", "learner.policy.ranks=2")


def rollstream(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "rollstream", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(path: Path) -> dict[int, dict[str, Any]]:
    return {row["version"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_a_sharded_policy_with_adapters_is_evaluated_scored_again_replayed_and_forked(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart"
    rollstream(tmp_path, "train", "quickstart", "--quiet", *SMALL, *RANKED, "learner.versions=4")
    told = rows_of(run / "evaluations.jsonl")
    assert sorted(told) == [0, 2, 4]
    assert told[0]["state"] == told[4]["state"] == "done"
    again = json.loads(rollstream(tmp_path, "evaluate", str(run), "--version", "4", "--json"))
    for name in ("eval/reward_mean", "eval/success", "eval/pass_at_2", "eval/sequence_tokens_mean"):
        assert again[name] == pytest.approx(told[4][name], abs=1e-6), "the same tasks, the same random numbers, the same weights"
    assert "figures agree" in rollstream(tmp_path, "replay", str(run), "--version", "3")
    rollstream(tmp_path, "train", "quickstart", "--quiet", *SMALL, "learner.versions=6", "learner.policy.kind=single", "--resume", "--fork")
    assert sorted(rows_of(run / "metrics.jsonl")) == [1, 2, 3, 4, 5, 6]
    assert "clean" in rollstream(tmp_path, "audit", str(run))
