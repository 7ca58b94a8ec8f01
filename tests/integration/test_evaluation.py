"""A whole run with the real sampler that evaluates while it trains, whose evaluator is stopped for a while; then one of its checkpoints is scored again."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollstream.buffer.audit import audit
from rollstream.buffer.inspect import Filter, Inspector

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = (
    *("actors.slots=8", "learner.batch_groups=2", "learner.group_size=4", "learner.checkpoint.every=4", "learner.checkpoint.keep_last=10"),
    *("warmup.steps=2", "warmup.demonstrations_per_step=8", "learner.versions=20"),
    "model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}",
    "evaluation={every: 4, tasks: 6, samples: 2, k: [1, 2], sampling: {temperature: 0.7}}",
)


def rows_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for(job: subprocess.Popen[str], condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 300
    while not (found := condition()):
        assert job.poll() is None, f"the run ended before {what}"
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.1)
    return found


def evaluator_of(job: subprocess.Popen[str]) -> psutil.Process | None:
    for child in psutil.Process(job.pid).children():
        if "evaluator-0" in child.cmdline():
            return child
    return None


def test_versions_are_scored_exactly_while_training_goes_on_and_a_checkpoint_scored_again_gives_the_same(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart"
    train = [sys.executable, "-m", "rollstream", "train", "quickstart", "--quiet", *SMALL]
    job = subprocess.Popen(train, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(job, lambda: rows_of(run / "evaluations.jsonl"), "the first evaluation")
        evaluator = wait_for(job, lambda: evaluator_of(job), "the evaluator")
        evaluator.send_signal(signal.SIGSTOP)
        begun = len(rows_of(run / "metrics.jsonl"))
        wait_for(job, lambda: len(rows_of(run / "metrics.jsonl")) >= min(begun + 9, 19), "nine versions without the evaluator")
        evaluator.send_signal(signal.SIGCONT)
        out, err = job.communicate(timeout=400)
    finally:
        for child in psutil.Process(job.pid).children(recursive=True) if job.poll() is None else ():
            child.kill()
        if job.poll() is None:
            job.kill()
            job.communicate()
    assert job.returncode == 0, err
    assert "evaluated v20" in out

    told = {row["version"]: row for row in rows_of(run / "evaluations.jsonl")}
    assert sorted(told) == [0, 4, 8, 12, 16, 20], "each of them exactly once"
    assert {row["state"] for row in told.values()} == {"done", "skipped"}, "what found the room taken is said to be skipped"
    assert told[0]["state"] == told[20]["state"] == "done", "the run waits for its last version"
    assert all({"eval/pass_at_1", "eval/pass_at_2", "eval/success", "eval/reward_mean"} <= set(row) for row in told.values() if row["state"] == "done")
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("eval/reward_mean")] == [version for version in told if told[version]["state"] == "done"]
    done = [version for version, row in sorted(told.items()) if row["state"] == "done"]

    with Inspector(run) as inspector:
        for version in done:
            played = inspector.listed(Filter(version=version, purpose="eval"))
            assert len(played) == 12
            assert {(one.min_version, one.max_version) for one in played} == {(version, version)}
            _, trajectory = inspector.trajectory(played[0].group_id, played[0].member)
            assert (trajectory.purpose, trajectory.temperature, trajectory.segments[0].version_values.tolist()) == ("eval", 0.7, [version])
        assert inspector.count(Filter(purpose="train")) == 20 * 2 * 4
    report = audit(run)
    assert (report.closes, report.problems, report.num_evaluated) == (True, [], 12 * len(done))

    command = [sys.executable, "-m", "rollstream", "evaluate", str(run), "--version", str(done[-2]), "--json"]
    scored = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert scored.returncode == 0, scored.stderr
    again = json.loads(scored.stdout)
    for name in ("eval/reward_mean", "eval/success", "eval/pass_at_2", "eval/sequence_tokens_mean"):
        assert again[name] == pytest.approx(told[done[-2]][name], abs=1e-6), "the same tasks, the same random numbers, the same weights"

    database = sqlite3.connect(run / "ledger.sqlite")
    with database:
        database.execute("UPDATE evaluation_members SET success = 0.5 WHERE member = 1")
        database.execute("UPDATE evaluation_groups SET seed = seed + 1")
    database.close()
    problems = " | ".join(audit(run).problems)
    assert "evaluation group 0 member 1 has success 0.5, its rows say " in problems
    assert "evaluation group 0 has seed " in problems
