"""What the ray launcher says of places and of room, before any Ray is asked."""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading
from pathlib import Path

import pytest

from rollstream.configs.checks import check_config
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import RayLauncher as Settings
from rollstream.errors import ConfigError, MissingExtra
from rollstream.processes import Role, roles_of
from rollstream.ray_keeper import place_of

pytest.importorskip("ray", reason="needs ray: pip install 'rollstream[ray]'")

from rollstream.ray_launcher import load_ray
from rollstream.ray_places import Places
from rollstream.ray_session import Session
from rollstream.run import check

BUFFER, LEARNER, OTHER_RANK, ACTOR = Role("buffer", "buffer"), Role("learner", "learner"), Role("learner", "learner-1", rank=1), Role("actor", "actor-0")
FAR = ("buffer.endpoint=tcp://0.0.0.0:5600", "weights.channel=files")
TWO = ("learner.policy.kind=fsdp", "learner.policy.ranks=2")


def places(tmp_path: Path, *overrides: str) -> Places:
    run = Run(tmp_path, load_config("quickstart", ["launcher.kind=ray", *overrides]), "0" * 32)
    assert isinstance(run.config.launcher, Settings)
    return Places(load_ray(), run, run.config.launcher, roles_of(run.config))


def test_a_role_may_live_where_memory_sockets_and_network_are_ours(tmp_path: Path) -> None:
    made = places(tmp_path)
    assert made.refusal(ACTOR, place_of(made.run)) is None


@pytest.mark.parametrize(
    ("differs", "overrides", "remedy"),
    [
        ("sockets", (), "use buffer.endpoint=tcp://0.0.0.0:PORT"),
        ("network", ("buffer.endpoint=tcp://127.0.0.1:5600", "weights.channel=files"), "use buffer.endpoint=tcp://0.0.0.0:PORT"),
        ("memory", FAR[:1], "use weights.channel=files"),
    ],
)
def test_a_node_that_does_not_share_what_the_settings_need_is_refused_with_the_key_to_set(
    tmp_path: Path, differs: str, overrides: tuple[str, ...], remedy: str
) -> None:
    made = places(tmp_path, *overrides)
    elsewhere = dataclasses.replace(made.here, host="node-7", **{differs: "another"})
    refusal = made.refusal(ACTOR, elsewhere)
    assert refusal is not None
    assert refusal.startswith("node node-7 ")
    assert remedy in refusal


def test_a_node_that_shares_only_the_file_system_is_fit_for_tcp_with_keys_and_weights_in_files(tmp_path: Path) -> None:
    made = places(tmp_path, *FAR)
    assert made.refusal(ACTOR, dataclasses.replace(made.here, sockets="x", network="x", memory="x")) is None


def test_the_others_hear_where_a_buffer_is_that_listens_everywhere_and_it_must_stay_there(tmp_path: Path) -> None:
    made = places(tmp_path, *FAR)
    assert made.reach() is None
    assert made.placed(ACTOR, "10.0.0.9", made.here) is None
    assert not made.ready_for(ACTOR)
    assert made.placed(BUFFER, "10.0.0.5", made.here) is None
    assert made.ready_for(ACTOR)
    reached = made.reach()
    assert reached is not None
    assert reached.endpoint == "tcp://10.0.0.5:5600"
    assert made.placed(BUFFER, "10.0.0.5", made.here) is None
    refusal = made.placed(BUFFER, "10.0.0.6", made.here)
    assert refusal is not None
    assert "tcp://10.0.0.6:5600" in refusal


def test_ranks_wait_for_one_another_and_meet_on_loopback_where_they_share_it_else_at_the_node_of_rank_0(tmp_path: Path) -> None:
    made, elsewhere = places(tmp_path, *FAR, *TWO), places(tmp_path, *FAR, *TWO)
    for found in (made, elsewhere):
        found.placed(BUFFER, "10.0.0.5", found.here)
        found.placed(LEARNER, "fd00::7", dataclasses.replace(found.here, meeting_port=4711))
        assert not found.ready_for(LEARNER), "rank 1 has no place yet"
        assert found.ready_for(ACTOR)
    made.placed(OTHER_RANK, "fd00::7", made.here)
    elsewhere.placed(OTHER_RANK, "10.0.0.8", dataclasses.replace(made.here, network="another"))
    assert made.ready_for(LEARNER)
    assert made.meeting() == "127.0.0.1:4711"
    assert elsewhere.meeting() == "[fd00::7]:4711"
    alone = places(tmp_path)
    alone.placed(LEARNER, "10.0.0.7", alone.here)
    assert alone.ready_for(LEARNER)
    assert alone.meeting() is None


def test_a_rank_that_publishes_nothing_needs_no_shared_memory(tmp_path: Path) -> None:
    made = places(tmp_path, FAR[0], *TWO)
    elsewhere = dataclasses.replace(made.here, memory="another")
    assert made.refusal(OTHER_RANK, elsewhere) is None
    assert made.refusal(LEARNER, elsewhere) is not None


def test_a_device_that_ray_would_hide_is_refused(tmp_path: Path) -> None:
    settings = ["launcher.kind=ray", "learner.device=cuda", "actors.device=cuda:0", "launcher.learner.gpus=1"]
    with pytest.raises(ConfigError, match=r"actors\.device cuda:0 with launcher\.actor\.gpus 0") as caught:
        check_config(load_config("quickstart", settings))
    assert "learner.device" not in str(caught.value)
    check_config(load_config("quickstart", [*settings, "launcher.actor.gpus=0.5"]))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("launcher.actor.gpus=1.5", r"launcher\.actor\.gpus 1\.5: above 1 Ray grants whole GPUs only; use 1 or 2"),
        ("launcher.actor={custom: {CPU: 2}}", r"launcher\.actor\.custom\.CPU: use launcher\.actor\.cpus"),
        ("launcher.address=10.0.0.5:99999", r"port 99999 is not between 1 and 65535"),
    ],
)
def test_what_ray_would_not_take_is_refused_before_anything_starts(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(load_config("quickstart", ["launcher.kind=ray", setting]))


def test_ranks_that_would_share_a_gpu_are_refused_under_ray() -> None:
    shared = ["launcher.kind=ray", *TWO, "learner.device=cuda", "launcher.learner.gpus=0.5"]
    with pytest.raises(ConfigError, match=r"launcher\.learner\.gpus 0\.5 with learner\.policy\.ranks 2"):
        check_config(load_config("quickstart", shared))
    check_config(load_config("quickstart", [*shared, "launcher.learner.gpus=1"]))


@pytest.mark.parametrize("answers", [b"HTTP/1.0 400 Bad request\r\n", b""], ids=["speaks something else", "says nothing and leaves"])
def test_an_address_where_somebody_else_listens_is_refused_at_once(answers: bytes) -> None:
    def answer(listening: socket.socket) -> None:
        door, _ = listening.accept()
        with door:
            door.recv(100)
            door.sendall(answers)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        settings = Settings(kind="ray", address=f"127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"no Ray cluster can be joined there \(.*\); start one \(ray start --head\)"):
            Session(load_ray(), settings, "0" * 32).open([])
        thread.join()


def test_one_machine_alone_is_never_a_node_for_each_role() -> None:
    with pytest.raises(ConfigError, match="STRICT_SPREAD wants a node for each of 3 roles"):
        Session(load_ray(), Settings(kind="ray", strategy="STRICT_SPREAD"), "0" * 32).open([{"CPU": 1.0}] * 3)


def test_without_ray_the_run_is_refused_with_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"launcher\.kind ray needs ray: pip install 'rollstream\[ray\]', on every node") as caught:
        check(load_config("quickstart", ["launcher.kind=ray", f"folder={tmp_path}"]))
    assert caught.value.exit_code == 2


def test_a_launcher_nobody_knows_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="kind must be local or ray"):
        load_config("quickstart", ["launcher.kind=slurm"])
