"""A whole run with real processes: it ends where it should, survives what it should, tells what went wrong, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rollstream.configs.loader import load_run
from whole_runs import FOR_EVER, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPTED = "actors.sampler={kind: scripted}"
"""For tests in which it does not matter who samples: this one starts in a moment."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start_job(*arguments: str) -> Job:
        jobs.append(Job(tmp_path, *arguments))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.finish()


def audit(job: Job) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rollstream", "audit", str(job.run_folder)], capture_output=True, text=True, check=False)


def assert_books_close(job: Job) -> None:
    done = audit(job)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_reaches_its_last_version_exits_with_0_and_leaves_nothing_behind(start: Callable[..., Job]) -> None:
    job = start("learner.versions=8")
    job.note_roles()
    code, out, err = job.end()
    assert code == 0, out + err + job.logs()
    assert err == ""
    assert [row["version"] for row in job.rows()] == list(range(1, 9))
    assert job.leftovers() == []
    for word in ("version 8 of 8", "CPU seconds", "success", "lag trained", "rollstream audit runs/quickstart", "tensorboard --logdir"):
        assert word in out, word
    assert (job.run_folder / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert not list((job.run_folder / "logs").glob("*.error.json"))
    assert_books_close(job)


@pytest.mark.long
def test_an_actor_and_a_buffer_that_are_killed_are_started_again_and_nothing_is_lost(start: Callable[..., Job]) -> None:
    job = start("learner.versions=40")
    for name, version in (("actor-0", 3), ("buffer", 10)):
        job.wait_for_version(version)
        first = job.role(name)
        first.kill()
        job.wait_for(lambda name=name, first=first: job.role(name).pid != first.pid, f"another {name}")
    code, out, err = job.end(150)
    assert code == 0, out + err + job.logs()
    assert "actor-0 died: killed by signal 9 (SIGKILL)" in out
    assert "buffer died: killed by signal 9 (SIGKILL)" in out
    assert "2 restarts" in out
    assert [row["version"] for row in job.rows()] == list(range(1, 41))
    assert_books_close(job)
    assert job.leftovers() == []


@pytest.mark.long
def test_the_learners_death_ends_the_run_with_its_error_and_resume_goes_on(start: Callable[..., Job]) -> None:
    job = start("learner.versions=12", SCRIPTED)
    job.note_roles()
    job.wait_for_version(6)
    job.role("learner").kill()
    code, _, err = job.end()
    assert code == 1
    assert err.startswith("error: learner: killed by signal 9 (SIGKILL); out of memory?; see ")
    assert err.count("\n") == 1
    assert job.leftovers() == []

    again = start("learner.versions=12", "--resume")
    code, out, err = again.end()
    assert code == 0, out + err + again.logs()
    assert [row["version"] for row in again.rows()] == list(range(1, 13))
    assert_books_close(again)


def test_ctrl_c_writes_a_checkpoint_exits_with_130_and_resume_goes_on(start: Callable[..., Job]) -> None:
    job = start(FOR_EVER, SCRIPTED)
    job.note_roles()
    job.wait_for_version(2)
    began = time.monotonic()
    for _ in range(2):  # as who signals a process and its group does: one wish
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    code, out, err = job.end(40)
    assert code == 130, out + err + job.logs()
    assert err == ""
    assert time.monotonic() - began < 30
    assert job.leftovers() == []
    last = job.version()
    assert (job.run_folder / "checkpoints" / f"v{last:06d}").is_dir()
    assert "ended by force" not in out
    assert "--resume" in out
    assert_books_close(job)

    again = start(f"learner.versions={last + 3}", "--resume")
    code, out, err = again.end()
    assert code == 0, out + err + again.logs()
    assert [row["version"] for row in again.rows()] == list(range(1, last + 4))
    assert_books_close(again)


@pytest.mark.long
def test_a_second_ctrl_c_ends_everything_at_once(start: Callable[..., Job]) -> None:
    job = start(FOR_EVER, SCRIPTED)
    job.note_roles()
    job.wait_for_version(1)
    learner = job.role("learner")
    learner.suspend()  # it cannot finish its step, so the first Ctrl-C alone would have to wait
    job.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert job.process.poll() is None
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    code, out, _ = job.end(20)
    assert code == 130
    assert time.monotonic() - began < 10
    assert "ended by force: learner" in out
    assert job.leftovers() == []


def test_roles_end_and_tidy_up_when_the_supervisor_is_killed(start: Callable[..., Job]) -> None:
    job = start(FOR_EVER, SCRIPTED)
    job.note_roles()
    job.wait_for_version(1)
    run = load_run(job.run_folder)
    for private in (run.weights_folder, run.socket_folder):
        assert private.stat().st_mode & 0o077 == 0
    job.process.kill()
    job.process.communicate()
    _, alive = psutil.wait_procs(list(job.roles.values()), timeout=25)
    assert alive == [], job.logs()
    assert "ended_by_force" not in job.logs()
    assert not run.weights_folder.exists()
    assert not run.socket_folder.exists()
    assert_books_close(job)


def test_a_resume_right_after_the_supervisor_was_killed_waits_for_its_roles(start: Callable[..., Job]) -> None:
    job = start(FOR_EVER, SCRIPTED)
    job.note_roles()
    job.wait_for_version(1)
    buffer = job.role("buffer")
    buffer.suspend()  # it cannot notice yet
    job.process.kill()
    job.process.communicate()
    again = start("learner.versions=2000", SCRIPTED, "--resume")
    time.sleep(3.0)
    assert again.process.poll() is None
    buffer.resume()
    again.wait_for_version(job.version() + 1)
    again.process.send_signal(signal.SIGINT)
    code, _, err = again.end()
    assert (code, err.count("still ending: waiting for them")) == (130, 1), err
    assert_books_close(again)


def test_input_that_only_a_role_can_refuse_exits_with_2_and_leaves_no_folder(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("learner.versions=8", "learner.loss.kind=ppp")
    code, _, err = job.end()
    assert code == 2
    assert "ppp" in err
    assert err.startswith("error: learner: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_terminal_that_hangs_up_stops_the_run_in_order(start: Callable[..., Job]) -> None:
    job = start(FOR_EVER, SCRIPTED)
    job.note_roles()
    job.wait_for_version(1)
    job.process.send_signal(signal.SIGHUP)
    code, out, _ = job.end(40)
    assert code == 128 + signal.SIGHUP
    assert "ended by force" not in out
    assert job.leftovers() == []


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A run that goes on while several tests look at it."""
    job = Job(tmp_path_factory.mktemp("live"), FOR_EVER, SCRIPTED)
    job.wait_for_version(2)
    yield job
    job.finish()


@pytest.mark.long
def test_a_second_train_on_a_live_run_is_refused_and_the_first_goes_on(live: Job) -> None:
    second = Job(live.run_folder.parents[1], FOR_EVER, SCRIPTED, "--resume")
    code, _, err = second.end()
    assert code == 2
    assert f"process {live.process.pid}" in err
    live.wait_for_version(live.version() + 1)


@pytest.mark.long
def test_the_supervisor_loads_no_torch_and_takes_little_of_a_core(live: Job) -> None:
    supervisor = psutil.Process(live.process.pid)
    loaded = {Path(mapped.path).name for mapped in supervisor.memory_maps()}
    assert not [name for name in loaded if name.startswith("libtorch")]
    before, began = supervisor.cpu_times(), time.monotonic()
    time.sleep(6)
    after, passed_s = supervisor.cpu_times(), time.monotonic() - began
    used_s = after.user + after.system - before.user - before.system
    assert used_s / passed_s < 0.05


@pytest.mark.long
def test_the_books_of_a_live_run_close_too(live: Job) -> None:
    assert_books_close(live)


@pytest.mark.long
def test_an_actor_started_by_hand_joins_a_live_run_and_leaves_in_order(live: Job) -> None:
    command = [sys.executable, "-m", "rollstream", "actor", str(live.run_folder), "--id", "actor-by-hand"]
    actor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    buffer_log = live.run_folder / "logs" / "buffer.log"
    try:
        live.wait_for(lambda: "peer=actor-by-hand" in buffer_log.read_text(), "the actor's hello")
        live.wait_for_version(live.version() + 3)
    finally:
        actor.send_signal(signal.SIGTERM)
        out, _ = actor.communicate(timeout=30)
    assert actor.returncode == 0, out
    assert "event=ended stopped=True" in out
    assert "died" not in live.logs()
