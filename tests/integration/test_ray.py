"""``launcher.kind: ray``: the same run on a Ray cluster of several nodes, which come and go."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.buffer.audit import audit

pytest.importorskip("ray", reason="needs ray: pip install 'rollstream[ray]'")

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
CLUSTER = (
    "launcher.kind=ray",
    "launcher.buffer={cpus: 0.5, custom: {head: 1}}",
    "launcher.learner={cpus: 0.5, custom: {head: 1}}",
    "launcher.actor={cpus: 0.5, custom: {player: 1}}",
)
PLAYED = ("actors.sampler={kind: scripted, token_delay_s: 0.004}", "actors.slots=8")


def supervisor_tests() -> Any:
    spec = importlib.util.spec_from_file_location("ray_supervisor", HERE / "test_supervisor.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)

    class Patient(module.Job):
        """A run among many processes: it may take its time on a busy machine."""

        def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 200.0) -> Any:
            return super().wait_for(condition, what, timeout_s)

    module.Job = Patient
    return module


class Cluster:
    """``ray_cluster.py`` at the other end of two pipes."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "ray_cluster.py"), '{"CPU": 1, "head": 2}']
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.address = self._line()

    def add(self, **resources: float) -> int:
        """Process id of the new node's raylet, which is the parent of all that runs there."""
        return int(self._command({"add": resources}))

    def remove(self, raylet: int) -> None:
        assert self._command({"remove": raylet}) == "removed"

    def _command(self, command: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate(timeout=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    jobs: list[Any] = []

    def start_job(*arguments: str) -> Any:
        jobs.append(supervisor_tests().Job(tmp_path, *arguments))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.finish()


def process_of(job: Any, name: str) -> psutil.Process:
    """The live process of a role, wherever it was started."""

    def find() -> psutil.Process | None:
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if str(job.run_folder) in line and "--id" in line and line[line.index("--id") + 1] == name and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    found = job.wait_for(find, f"process {name}")
    job.roles[found.pid] = found
    return found


def committed(job: Any) -> set[tuple[int, ...]]:
    """Every finished member: group, member, attempt, append."""
    with contextlib.closing(sqlite3.connect(f"{(job.run_folder / 'ledger.sqlite').as_uri()}?mode=ro", uri=True, timeout=10)) as ledger:
        return set(ledger.execute("SELECT group_id, member, attempt, append_id FROM members"))


def held_by(job: Any, actor: str) -> set[int]:
    with contextlib.closing(sqlite3.connect(f"{(job.run_folder / 'ledger.sqlite').as_uri()}?mode=ro", uri=True, timeout=10)) as ledger:
        return {row[0] for row in ledger.execute("SELECT group_id FROM groups WHERE holder = ?", (actor,))}


def log_of(job: Any, name: str) -> str:
    path = job.run_folder / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def lose(cluster: Cluster, process: psutil.Process) -> None:
    """The node of a role is gone from one instant to the next, with every process on it."""
    keeper = process.parent()
    assert keeper is not None
    raylet = keeper.ppid()
    keeper.suspend()  # it must not get to tell anything
    os.killpg(process.pid, signal.SIGKILL)
    cluster.remove(raylet)
    with contextlib.suppress(psutil.NoSuchProcess):
        keeper.kill()


def node_of(process: psutil.Process) -> int:
    keeper = process.parent()
    assert keeper is not None
    return keeper.ppid()


def test_a_node_that_disappears_costs_only_its_unfinished_members_and_one_that_comes_is_used(cluster: Cluster, start: Callable[..., Any]) -> None:
    nodes = [cluster.add(CPU=1, player=1) for _ in range(2)]
    job = start(*CLUSTER, *PLAYED, f"launcher.address={cluster.address}", "actors.num=2", "learner.versions=1000000")
    job.wait_for_version(4)
    victim = process_of(job, "actor-1")
    held = job.wait_for(lambda: held_by(job, "actor-1"), "groups that the victim plays")
    assert node_of(victim) in nodes
    lose(cluster, victim)
    before, unfinished = committed(job), held | held_by(job, "actor-1")
    version = job.version()
    job.wait_for(lambda: "actor-1 died: its node" in log_of(job, "supervisor"), "the loss to be noticed")
    job.wait_for_version(version + 5)
    third = cluster.add(CPU=1, player=1)
    assert node_of(process_of(job, "actor-1")) == third
    job.wait_for(lambda: log_of(job, "buffer").count("event=hello role=actor peer=actor-1") == 2, "the hello of the actor's successor")
    version = job.version()
    job.wait_for_version(version + 3)
    job.process.send_signal(signal.SIGINT)
    code, out, err = job.end()
    assert code == 130, out + err + job.logs()
    assert "ended by force" not in out
    after = committed(job)
    assert before <= after, "a finished member was played again"
    again_played = {(group, member) for group, member, attempt, _ in after if attempt > 0}
    assert {group for group, _ in again_played} <= unfinished
    report = audit(job.run_folder)
    assert (report.closes, report.problems, report.duplicates, report.num_age_drops) == (True, [], 0, 0)
    assert job.leftovers() == []


def test_a_run_that_finds_no_room_is_refused_with_what_it_needs_and_what_there_is(cluster: Cluster, start: Callable[..., Any], tmp_path: Path) -> None:
    short = ("launcher.placement_timeout_s=2", f"launcher.address={cluster.address}", "launcher.actor={cpus: 0.5, gpus: 1, custom: {telescope: 2}}")
    code, _, err = start(*CLUSTER[:3], *PLAYED, *short, "learner.versions=3").end(200)
    assert code == 2
    assert "no room in the cluster within launcher.placement_timeout_s 2" in err
    assert "actor-0: CPU 0.5, GPU 1, telescope 2" in err
    assert "head 2" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "a refused run leaves no folder"


def test_ray_on_this_machine_runs_to_the_last_version_and_leaves_nothing_behind(start: Callable[..., Any]) -> None:
    job = start("launcher.kind=ray", *PLAYED, "learner.versions=3")
    for name in ("buffer", "learner", "actor-0"):
        process_of(job, name)
    children = psutil.Process(job.process.pid).children(recursive=True)
    code, out, err = job.end(200)
    assert code == 0, out + err + job.logs()
    assert err == ""
    assert [row["version"] for row in job.rows()] == [1, 2, 3]
    assert job.leftovers() == []
    assert [child for child in psutil.wait_procs(children, timeout=20)[1] if child.status() != psutil.STATUS_ZOMBIE] == []
    assert audit(job.run_folder).problems == []
