"""A whole run whose learner is two processes: one of them is killed, the run says so, and goes on with another number of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollstream.configs.loader import load_run

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(280)]

SMALL = (
    *("actors.slots=8", "learner.batch_groups=2", "learner.group_size=4", "learner.checkpoint.every=2", "warmup.steps=2"),
    *("warmup.demonstrations_per_step=8", "model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}"),
)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rollstream", *arguments]


def rank_process(parent: int, name: str) -> psutil.Process:
    for child in psutil.Process(parent).children():
        line = child.cmdline()
        if "--id" in line and line[line.index("--id") + 1] == name:
            return child
    pytest.fail(f"{name} is not running")


def version(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    return json.loads(lines[-1])["version"] if lines else 0


def test_the_death_of_a_rank_ends_the_run_with_its_error_and_a_resume_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart"
    ranked = ("learner.policy.kind=fsdp", "learner.policy.ranks=2")
    job = subprocess.Popen(
        command("train", "quickstart", *SMALL, *ranked, "learner.versions=1000000", "--quiet"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 150
        while version(run) < 3 and time.monotonic() < deadline and job.poll() is None:
            time.sleep(0.2)
        assert version(run) >= 3, job.communicate(timeout=40) if job.poll() is not None else "no version 3 in time"
        others = psutil.Process(job.pid).children()
        rank_process(job.pid, "learner-1").send_signal(signal.SIGKILL)
        _, error = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            job.kill()
    assert (job.returncode, error.splitlines()[-1].split(";")[0]) == (1, "error: learner-1: killed by signal 9 (SIGKILL)")
    assert not [other for other in others if other.is_running() and other.status() != psutil.STATUS_ZOMBIE]
    wanted = version(run) + 2
    done = subprocess.run(
        command("train", "quickstart", *SMALL, "learner.policy.kind=fsdp", "learner.policy.ranks=1", f"learner.versions={wanted}", "--resume", "--quiet"),
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert version(run) == wanted
    audited = subprocess.run(command("audit", str(run)), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert audited.returncode == 0, audited.stdout
    record = load_run(run)
    assert not [path for path in (record.weights_folder, record.socket_folder) if path.exists()]
