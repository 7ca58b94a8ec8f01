"""What the ray launcher says of places and of room, before any Ray is asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rollstream.configs.checks import check_config
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import RayLauncher as Settings
from rollstream.errors import ConfigError
from rollstream.processes import Role
from rollstream.ray_keeper import place_of

pytest.importorskip("ray", reason="needs ray: pip install 'rollstream[ray]'")

from rollstream.ray_launcher import RayLauncher

ACTOR, BUFFER = Role("actor", "actor-0"), Role("buffer", "buffer")
FAR = ("buffer.endpoint=tcp://0.0.0.0:5600", "weights.channel=files")


def launcher(tmp_path: Path, *overrides: str) -> RayLauncher:
    run = Run(tmp_path, load_config("quickstart", ["launcher.kind=ray", *overrides]), "0" * 32)
    assert isinstance(run.config.launcher, Settings)
    return RayLauncher(run, run.config.launcher)


def test_a_role_may_live_where_memory_sockets_and_network_are_ours(tmp_path: Path) -> None:
    made = launcher(tmp_path)
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
    made = launcher(tmp_path, *overrides)
    elsewhere = dataclasses.replace(made.here, host="node-7", **{differs: "another"})
    refusal = made.refusal(ACTOR, elsewhere)
    assert refusal is not None
    assert refusal.startswith("node node-7 ")
    assert remedy in refusal


def test_a_node_that_shares_only_the_file_system_is_fit_for_tcp_with_keys_and_weights_in_files(tmp_path: Path) -> None:
    made = launcher(tmp_path, *FAR)
    assert made.refusal(ACTOR, dataclasses.replace(made.here, sockets="x", network="x", memory="x")) is None


def test_the_others_hear_where_a_buffer_is_that_listens_everywhere_and_it_must_stay_there(tmp_path: Path) -> None:
    made = launcher(tmp_path, *FAR)
    assert made.reach() is None
    assert made.placed(ACTOR, "10.0.0.9") is None
    assert made.reach() is None
    assert made.placed(BUFFER, "10.0.0.5") is None
    reached = made.reach()
    assert reached is not None
    assert reached.endpoint == "tcp://10.0.0.5:5600"
    assert made.placed(BUFFER, "10.0.0.5") is None
    refusal = made.placed(BUFFER, "10.0.0.6")
    assert refusal is not None
    assert "tcp://10.0.0.6:5600" in refusal


def test_a_device_that_ray_would_hide_is_refused(tmp_path: Path) -> None:
    settings = ["launcher.kind=ray", "learner.device=cuda", "actors.device=cuda:0", "launcher.learner.gpus=1"]
    with pytest.raises(ConfigError, match=r"actors\.device cuda:0 with launcher\.actor\.gpus 0") as caught:
        check_config(load_config("quickstart", settings))
    assert "learner.device" not in str(caught.value)
    check_config(load_config("quickstart", [*settings, "launcher.actor.gpus=0.5"]))


def test_a_launcher_nobody_knows_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="kind must be local or ray"):
        load_config("quickstart", ["launcher.kind=slurm"])
