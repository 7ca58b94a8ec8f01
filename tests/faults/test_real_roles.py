"""The real roles under ``rollstream train`` with a tiny model, killed at random instants; ``--resume`` goes on each time and the books close."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.buffer.audit import audit
from whole_runs import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAST = 36
ROUNDS = (("actor-0", "buffer", "actor-0", "learner"), ("buffer", "actor-0", "everything"))


@pytest.fixture
def jobs() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for job in started:
        job.finish()


def test_killed_actors_buffers_learners_and_whole_runs_cost_no_lease_and_no_version(tmp_path: Path, jobs: list[Any]) -> None:
    seed = int(os.environ.get("ROLLSTREAM_FAULT_SEED", time.time_ns() % 2**31))
    sys.stdout.write(f"ROLLSTREAM_FAULT_SEED={seed}\n")
    draw = random.Random(seed)
    arguments = (f"learner.versions={LAST}", "learner.checkpoint.every=3", "learner.checkpoint.keep_last=2")
    for victims in ROUNDS:
        jobs.append(Job(tmp_path, *arguments, *(["--resume"] if jobs else [])))
        job = jobs[-1]
        job.note_roles()
        job.wait_for_version(job.version() + 1)
        for victim in victims:
            job.wait_for_version(job.version() + draw.randint(1, 2))
            time.sleep(draw.random() * 0.3)
            if victim == "everything":
                job.note_roles()
                for process in (job.process, *job.roles.values()):
                    with contextlib.suppress(psutil.NoSuchProcess):  # those that were killed before
                        process.kill()
                job.process.communicate()
            elif victim == "learner":
                job.role(victim).kill()
                assert job.end()[0] == 1
            else:
                first = job.role(victim)
                first.kill()
                job.wait_for(lambda victim=victim, first=first, job=job: job.role(victim).pid != first.pid, f"another {victim}")
            assert (report := audit(job.run_folder)).problems == [], victim
            assert report.num_age_drops == 0
    jobs.append(Job(tmp_path, *arguments, "--resume"))
    code, out, err = jobs[-1].end(120)
    assert code == 0, out + err + jobs[-1].logs()
    assert [row["version"] for row in jobs[-1].rows()] == list(range(1, LAST + 1))
    report = audit(jobs[-1].run_folder)
    assert (report.closes, report.problems, report.duplicates, report.num_age_drops) == (True, [], 0, 0)
    assert report.counts["trained"] == report.num_leased - report.counts["dropped"] == 2 * LAST
    assert report.max_lag_trained <= report.lag_bound
    assert "not bit for bit" not in (jobs[-1].run_folder / "logs" / "learner.log").read_text()
    assert jobs[-1].leftovers() == []
