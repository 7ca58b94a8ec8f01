"""``launcher.kind: ray``: the same run on a Ray cluster of several nodes, which come and go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.buffer.audit import audit
from whole_runs import PatientJob

pytest.importorskip("ray", reason="needs ray: pip install 'rollstream[ray]'")

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
ON_HEAD = "{cpus: 0, custom: {head: 1}}"
CLUSTER = ("launcher.kind=ray", f"launcher.buffer={ON_HEAD}", f"launcher.learner={ON_HEAD}", "launcher.actor={cpus: 0, custom: {player: 1}}")
RANKED = (*CLUSTER[:2], "launcher.learner={cpus: 0, custom: {rank: 1}}", f"launcher.actor={ON_HEAD}")
PLAYED = ("actors.sampler={kind: scripted, token_delay_s: 0.004}", "actors.slots=8")
FOR_EVER = "learner.versions=1000000"
WITHOUT = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rollstream":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
"""
"""A Python in which the package is not installed."""


class Cluster:
    """``ray_cluster.py`` at the other end of two pipes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "ray_cluster.py"), '{"head": 3}'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._line()

    def add(self, environment: dict[str, str] | None = None, **resources: float) -> int:
        """Process id of the new node's raylet, which is the parent of all that runs there."""
        return int(self._command({"add": resources, "env": environment or {}}))

    def remove(self, raylet: int) -> None:
        assert self._command({"remove": raylet}) == "removed"

    def _command(self, command: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, f"the cluster is gone, exit code {self._process.wait(60)}: its own errors stand above"
        return line

    def close(self) -> None:
        self._process.communicate(timeout=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Callable[..., int]]:
    """Adds a node; those a test leaves go with it."""
    added: list[int] = []

    def add(environment: dict[str, str] | None = None, **resources: float) -> int:
        added.append(cluster.add(environment, **resources))
        return added[-1]

    yield add
    for raylet in added:
        if psutil.pid_exists(raylet):
            cluster.remove(raylet)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    jobs: list[Any] = []

    def start_job(*arguments: str) -> Any:
        jobs.append(PatientJob(tmp_path, *arguments))
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


def keeper_of(process: psutil.Process) -> psutil.Process:
    keeper = process.parent()
    assert keeper is not None
    return keeper


def node_of(process: psutil.Process) -> int:
    return keeper_of(process).ppid()


def rows_of(job: Any, query: str, *values: str) -> set[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(f"{(job.run_folder / 'ledger.sqlite').as_uri()}?mode=ro", uri=True, timeout=10)) as ledger:
        return set(ledger.execute(query, values))


def committed(job: Any) -> set[tuple[int, ...]]:
    """Every finished member: group, member, attempt, append."""
    return rows_of(job, "SELECT group_id, member, attempt, append_id FROM members")


def held_by(job: Any, actor: str) -> set[int]:
    return {row[0] for row in rows_of(job, "SELECT group_id FROM groups WHERE holder = ?", actor)}


def held_while_frozen(job: Any, actor: psutil.Process) -> set[int]:
    """What an actor plays that finishes nothing any more: as soon as it is dead the buffer gives it to others. Where it plays nothing it goes on."""
    actor.suspend()
    time.sleep(1.0)  # what it sent before has arrived
    held = held_by(job, "actor-1")
    if not held:
        actor.resume()
    return held


def log_of(job: Any, name: str) -> str:
    path = job.run_folder / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def num_hellos(job: Any, actor: str) -> int:
    return log_of(job, "buffer").count(f"event=hello role=actor peer={actor} ")


def lose(cluster: Cluster, process: psutil.Process) -> None:
    """The node of a role is gone from one instant to the next, with every process on it."""
    keeper, raylet = keeper_of(process), node_of(process)
    keeper.suspend()  # it must not get to tell anything
    os.killpg(process.pid, signal.SIGKILL)
    cluster.remove(raylet)


def stop(job: Any) -> None:
    job.process.send_signal(signal.SIGINT)
    code, out, err = job.end()
    assert code == 130, out + err + job.logs()
    assert "ended by force" not in out


def assert_books_close(job: Any) -> None:
    report = audit(job.run_folder)
    assert (report.closes, report.problems, report.duplicates, report.num_age_drops) == (True, [], 0, 0)
    assert job.leftovers() == []


def test_a_node_that_disappears_costs_only_its_unfinished_members_and_one_that_comes_is_used(
    cluster: Cluster, nodes: Callable[..., int], start: Callable[..., Any]
) -> None:
    first = [nodes(player=1) for _ in range(2)]
    job = start(*CLUSTER, *PLAYED, f"launcher.address={cluster.address}", "actors.num=2", FOR_EVER)
    job.wait_for_version(4)
    victim = process_of(job, "actor-1")
    assert node_of(victim) in first
    unfinished = job.wait_for(lambda: held_while_frozen(job, victim), "groups that the victim plays")
    lose(cluster, victim)
    before = committed(job)
    version = job.version()
    job.wait_for(lambda: "actor-1 died: its node" in log_of(job, "supervisor"), "the loss to be noticed")
    job.wait_for_version(version + 5)
    third = nodes(player=1)
    assert node_of(process_of(job, "actor-1")) == third
    job.wait_for(lambda: num_hellos(job, "actor-1") == 2, "the hello of the actor's successor")
    version = job.version()
    job.wait_for_version(version + 3)
    stop(job)
    after = committed(job)
    assert before <= after, "a finished member was played again"
    again_played = {(group, member) for group, member, attempt, _ in after if attempt > 0}
    assert {group for group, _ in again_played} <= unfinished
    assert_books_close(job)


def test_a_process_and_a_keeper_that_die_are_each_one_restart_and_an_actor_may_join_and_leave(
    cluster: Cluster, nodes: Callable[..., int], start: Callable[..., Any]
) -> None:
    nodes(player=1)
    job = start(*CLUSTER, *PLAYED, f"launcher.address={cluster.address}", FOR_EVER)
    job.wait_for_version(2)
    first = process_of(job, "actor-0")
    first.kill()
    job.wait_for(lambda: "actor-0 died: killed by signal 9" in log_of(job, "supervisor"), "the death to be noticed")
    first.wait(20)
    second = process_of(job, "actor-0")
    job.wait_for(lambda: num_hellos(job, "actor-0") == 2, "the second actor's hello")
    keeper_of(second).kill()
    job.wait_for(lambda: "actor-0 died: its keeper on node" in log_of(job, "supervisor"), "the keeper's death to be noticed")
    job.wait_for(lambda: num_hellos(job, "actor-0") == 3, "the third actor's hello")
    assert not second.is_running() or second.status() == psutil.STATUS_ZOMBIE, "two of one name must not live"
    process_of(job, "actor-0")
    joined = subprocess.Popen([sys.executable, "-m", "rollstream", "actor", "--join", str(job.run_folder), "--id", "guest"], stderr=subprocess.PIPE, text=True)
    job.wait_for(lambda: rows_of(job, "SELECT group_id FROM groups WHERE holder = 'guest'"), "the guest to play")
    joined.send_signal(signal.SIGINT)
    _, err = joined.communicate(timeout=60)
    assert joined.returncode == 0, err
    job.wait_for_version(job.version() + 2)
    job.process.send_signal(signal.SIGINT)
    code, out, err = job.end()
    assert code == 130, out + err + job.logs()
    assert "2 restarts" in out, out
    assert_books_close(job)


def test_ranks_of_a_learner_live_on_nodes_and_the_loss_of_one_ends_the_run_with_its_error_on_top(
    cluster: Cluster, nodes: Callable[..., int], start: Callable[..., Any]
) -> None:
    homes = {nodes(rank=1) for _ in range(2)}
    ranked = (*RANKED, *PLAYED, f"launcher.address={cluster.address}", "learner.policy={kind: fsdp, ranks: 2}")
    job = start(*ranked, FOR_EVER)
    job.wait_for_version(3)
    ranks = [process_of(job, name) for name in ("learner", "learner-1")]
    assert {node_of(rank) for rank in ranks} == homes
    met = [line[line.index("--meet") + 1] for line in (rank.cmdline() for rank in ranks)]
    assert met[0] == met[1]
    assert met[0].startswith("127.0.0.1:"), "nodes that share a loopback keep to it"
    ranks[1].kill()
    code, _, err = job.end()
    assert (code, err.splitlines()[-1].split(";")[0]) == (1, "error: learner-1: killed by signal 9 (SIGKILL)")
    assert job.leftovers() == []
    job = start(*ranked, FOR_EVER, "--resume")
    job.wait_for_version(job.version() + 3)
    lose(cluster, process_of(job, "learner-1"))
    code, out, err = job.end()
    assert code == 1, out + err + job.logs()
    assert err.splitlines()[-1].startswith("error: learner-1: its node "), err
    assert job.leftovers() == []
    job = start(*ranked[:-1], "learner.policy={kind: fsdp, ranks: 1}", f"learner.versions={job.version() + 2}", "--resume")
    code, out, err = job.end()
    assert code == 0, out + err + job.logs()
    assert_books_close(job)


def test_the_death_of_the_learners_keeper_ends_the_run_and_its_process_does_not_outlive_it(cluster: Cluster, start: Callable[..., Any]) -> None:
    job = start(*RANKED[:2], f"launcher.learner={ON_HEAD}", f"launcher.actor={ON_HEAD}", *PLAYED, f"launcher.address={cluster.address}", FOR_EVER)
    job.wait_for_version(2)
    learner = process_of(job, "learner")
    keeper_of(learner).kill()
    code, out, err = job.end()
    assert code == 1, out + err + job.logs()
    assert err.splitlines()[-1].startswith("error: learner: its keeper on node "), err
    assert job.leftovers() == []


def test_a_run_that_finds_no_room_is_refused_with_what_it_needs_and_what_there_is(cluster: Cluster, start: Callable[..., Any], tmp_path: Path) -> None:
    short = ("launcher.placement_timeout_s=2", f"launcher.address={cluster.address}", "launcher.actor={cpus: 0.5, gpus: 1, custom: {telescope: 2}}")
    code, _, err = start(*CLUSTER[:3], *PLAYED, *short, "learner.versions=3").end()
    assert code == 2
    assert "no room in the cluster within launcher.placement_timeout_s 2" in err
    assert "actor-0: CPU 0.5, GPU 1, telescope 2" in err
    assert "head 3" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "a refused run leaves no folder"


def test_a_run_that_waits_for_room_says_what_is_missing_and_can_be_stopped(cluster: Cluster, start: Callable[..., Any]) -> None:
    job = start(*CLUSTER, *PLAYED, f"launcher.address={cluster.address}", FOR_EVER)  # no node has the resource player
    words = "the roles wait for room in the cluster up to launcher.placement_timeout_s 120; needed, PACK: buffer, learner: head 1 each; actor-0: player 1"
    job.wait_for(lambda: words in log_of(job, "supervisor"), "the wait to be told")
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    code, out, err = job.end()
    assert code == 130, out + err
    assert time.monotonic() - began < 20
    assert job.leftovers() == []


def test_a_node_with_another_rollstream_or_none_is_refused_by_name(
    cluster: Cluster, nodes: Callable[..., int], start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    old, none = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("none")
    (old / "sitecustomize.py").write_text("import rollstream\nrollstream.__version__ = '0.0.9'\n")
    (none / "sitecustomize.py").write_text(WITHOUT)
    expected = {
        "old": (old, "has rollstream 0.0.9, the run was started by 0.1.0"),
        "none": (none, "No module named 'rollstream"),
    }
    for name, (folder, words) in expected.items():
        nodes({"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}, **{name: 1})
        code, out, err = start(
            *CLUSTER[:3], f"launcher.actor={{cpus: 0, custom: {{{name}: 1}}}}", *PLAYED, f"launcher.address={cluster.address}", FOR_EVER
        ).end()
        assert code == 2, out + err
        assert words in err
        assert err.count("\n") == 1


def test_ray_on_this_machine_runs_to_the_last_version_and_leaves_nothing_behind(start: Callable[..., Any]) -> None:
    job = start("launcher.kind=ray", *PLAYED, "learner.versions=3")
    for name in ("buffer", "learner", "actor-0"):
        process_of(job, name)
    children = psutil.Process(job.process.pid).children(recursive=True)
    code, out, err = job.end()
    assert code == 0, out + err + job.logs()
    assert err == ""
    assert [row["version"] for row in job.rows()] == [1, 2, 3]
    assert [child for child in psutil.wait_procs(children, timeout=20)[1] if child.status() != psutil.STATUS_ZOMBIE] == []
    assert_books_close(job)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=["told to end", "terminal gone", "Ctrl-C"])
def test_a_ray_of_the_runs_own_leaves_signals_to_the_supervisor(start: Callable[..., Any], number: signal.Signals) -> None:
    job = start("launcher.kind=ray", *PLAYED, FOR_EVER)
    job.wait_for_version(1)
    children = psutil.Process(job.process.pid).children(recursive=True)
    for process in children if number != signal.SIGTERM else []:  # as a terminal does to all that was started from it
        if os.getsid(process.pid) == os.getsid(job.process.pid):
            process.send_signal(number)
    job.process.send_signal(number)
    code, out, err = job.end()
    assert code == 128 + number, out + err + job.logs()
    assert "ended by force" not in out
    assert [child for child in psutil.wait_procs(children, timeout=20)[1] if child.status() != psutil.STATUS_ZOMBIE] == []
    assert_books_close(job)
