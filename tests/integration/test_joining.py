"""Actors that join a live run and leave it, and runs whose roles are all started by hand."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.buffer.audit import audit
from rollstream.buffer.client import ActorClient, SupervisorClient
from rollstream.buffer.curve import client_keys
from rollstream.buffer.wire import PeerStatus
from rollstream.configs.loader import load_run
from rollstream.errors import Refused
from streams import free_port
from whole_runs import FOR_EVER, SMALL, PatientJob

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPTED = "actors.sampler={kind: scripted, token_delay_s: 0.004}"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A run that other machines could take part in: TCP with keys, weights in files."""
    folder = tmp_path_factory.mktemp("live")
    job = PatientJob(folder, FOR_EVER, SCRIPTED, "weights.channel=files", f"buffer.endpoint=tcp://0.0.0.0:{free_port()}")
    job.wait_for_version(2)
    yield job
    job.finish()


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command as a user of another machine would: nothing is shared but the run's folder."""
    started: list[subprocess.Popen[str]] = []
    elsewhere = os.environ | {"TMPDIR": str(tmp_path)}

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rollstream", *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=elsewhere, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def peers(job: Any) -> dict[str, PeerStatus]:
    run = load_run(job.run_folder)
    with SupervisorClient(run.endpoint, run.run_id, "test", keys=client_keys(run)) as client:
        status = client.status(10.0)
    assert status is not None
    return {peer.peer_id: peer for peer in status.peers}


def joined(job: Any) -> str | None:
    """The name of an actor that plays and that the supervisor did not start."""
    return next((name for name, peer in peers(job).items() if peer.role == "actor" and name != "actor-0" and peer.counters.get("episodes", 0) > 0), None)


def test_an_actor_joins_under_a_name_of_its_own_plays_at_once_and_gives_its_leases_back_on_ctrl_c(live: Any, call: Callable[..., Any]) -> None:
    actor = call("actor", "--join", live.run_folder)
    name = live.wait_for(lambda: joined(live), "episodes of the actor that joined")
    assert re.fullmatch(r"actor-[A-Za-z0-9-]+-[0-9a-f]{6}", name)
    live.wait_for(lambda: peers(live)[name].num_leases > 0, "leases of the actor that joined")
    actor.send_signal(signal.SIGINT)
    _, err = actor.communicate(timeout=60)
    assert actor.returncode == 0, err
    assert name not in peers(live)
    live.wait_for_version(live.version() + 3)
    assert live.process.poll() is None
    assert "died" not in live.logs()
    assert audit(live.run_folder).problems == []


def test_an_actor_that_joined_and_is_killed_costs_only_what_it_had_not_finished(live: Any, call: Callable[..., Any]) -> None:
    actor = call("actor", "--join", live.run_folder)
    name = live.wait_for(lambda: joined(live), "episodes of the actor that joined")
    live.wait_for(lambda: peers(live)[name].num_leases > 0, "leases of the actor that joined")
    actor.kill()
    actor.wait()
    live.wait_for(lambda: name not in peers(live), "its loss to be noticed")
    live.wait_for_version(live.version() + 6)
    report = audit(live.run_folder)
    assert (report.closes, report.problems, report.duplicates, report.num_age_drops) == (True, [], 0, 0)


@pytest.mark.parametrize("name", ["actor-0", "actor-1", "learner"])
def test_a_name_that_is_taken_is_refused_in_one_line(live: Any, call: Callable[..., Any], name: str) -> None:
    if name == "actor-1":  # not one of the supervisor's: free
        actor = call("actor", "--join", live.run_folder, "--id", name)
        live.wait_for(lambda: name in peers(live), "the actor of that name")
    second = call("actor", "--join", live.run_folder, "--id", name)
    _, err = second.communicate(timeout=120)
    assert second.returncode == 2
    assert err.startswith(f"error: --id {name} is taken in this run (")
    assert err.count("\n") == 1
    if name == "actor-1":
        actor.terminate()
        assert actor.wait(60) == 0


def test_what_is_no_live_run_is_refused_in_one_line(live: Any, call: Callable[..., Any], tmp_path: Path) -> None:
    config = (live.run_folder / "config.yaml").read_text()
    (dead := tmp_path / "dead").mkdir()
    (dead / "config.yaml").write_text(re.sub(r"endpoint: .*", "endpoint: ipc", config))
    (wrong := tmp_path / "wrong").mkdir()
    (wrong / "config.yaml").write_text(re.sub(r"run_id: .*", f"run_id: {'ab' * 16}", config))
    (wrong / "keys").symlink_to(live.run_folder / "keys")
    refused = [call("actor", "--join", tmp_path), call("actor", "--join", dead), call("actor", "--join", wrong), call("stop", dead)]
    for process, reason in zip(refused, ("is not a run folder", "is not live: no buffer answered", "another run answers at", "is not live"), strict=True):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert err.startswith("error: ")
        assert reason in err
        assert err.count("\n") == 1


async def test_of_two_processes_under_one_name_the_later_stays_and_the_earlier_is_told(live: Any) -> None:
    run = load_run(live.run_folder)
    earlier, later = (ActorClient(run.endpoint, run.run_id, "actor-twin", keys=client_keys(run)) for _ in range(2))

    async def live_together() -> None:
        async with earlier:
            await asyncio.sleep(1.0)
            async with later:
                await asyncio.sleep(60)

    with pytest.raises(Refused, match="another process is actor-twin by now"):
        await live_together()
    assert later.stop_reason is None


def test_a_run_that_is_stopped_from_elsewhere_ends_in_order_and_with_it_the_actors_that_joined(live: Any, call: Callable[..., Any]) -> None:
    actor = call("actor", "--join", live.run_folder)
    live.wait_for(lambda: joined(live), "episodes of the actor that joined")
    live.note_roles()
    stopped = call("stop", live.run_folder)
    assert stopped.wait(120) == 0
    code, _, err = live.end()
    assert code == 1
    assert "was told to stop at version" in err
    _, err = actor.communicate(timeout=60)
    assert actor.returncode == 0, err
    assert live.leftovers() == []
    assert audit(live.run_folder).problems == []
    assert (live.run_folder / "checkpoints" / f"v{live.version():06d}").is_dir()


def test_roles_started_by_hand_in_shells_of_their_own_make_a_whole_run(call: Callable[..., Any], tmp_path: Path) -> None:
    prepared = call("prepare", "quickstart", *SMALL, "learner.versions=4", "name=hand", SCRIPTED)
    out, err = prepared.communicate(timeout=120)
    assert (prepared.returncode, out) == (0, "runs/hand\n"), err
    folder = tmp_path / "runs" / "hand"
    again = call("prepare", "quickstart", "name=hand")
    assert again.wait(120) == 2
    buffer, learner, actor = call("buffer", folder), call("learner", folder), call("actor", folder)
    _, err = learner.communicate(timeout=150)
    assert learner.returncode == 0, err
    assert call("stop", folder).wait(120) == 0
    for role in (buffer, actor):
        _, err = role.communicate(timeout=60)
        assert role.returncode == 0, err
    report = audit(folder)
    assert (report.closes, report.problems, report.num_trained) == (True, [], 32)
