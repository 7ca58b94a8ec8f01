"""Cross-checks of a configuration that need two keys, a model's files or this machine's numbers."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from rollstream.configs.checks import check_config, check_machine, weights_bytes
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.errors import ConfigError


def folder_model(folder: Path, *, positions: int, shapes: tuple[tuple[int, ...], ...]) -> str:
    """A model folder as far as the checks look: positions and the headers of its weights."""
    (folder / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": positions}}))
    header = {f"layer{index}": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for index, shape in enumerate(shapes)}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return f"model={{kind: folder, path: {folder}}}"


def test_the_quickstart_passes_every_check(tmp_path: Path) -> None:
    config = load_config("quickstart")
    check_config(config)
    check_machine(Run(tmp_path, config, "a" * 32))


def test_every_contradiction_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config("quickstart", ["buffer.depth=9", "learner.group_size=1", "actors.sampling.top_p=0.5"]))
    for key in ("buffer.depth 9", "learner.group_size 1", "actors.sampling.top_p 0.5"):
        assert key in str(caught.value)


def test_an_endpoint_needs_an_address_and_a_port_that_exist() -> None:
    for endpoint, said in (
        ("tcp://10.0.0.999:5555", "10.0.0.999 is no address"),
        ("tcp://[::1::]:5555", "is no address"),
        ("tcp://0.0.0.0:99999", "port 99999"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            check_config(load_config("quickstart", [f"buffer.endpoint='{endpoint}'"]))


def test_a_wait_shorter_than_an_episode_may_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"buffer\.stall_timeout_s 60 is not longer than actors\.episode_timeout_s 90: one slow episode would end the run"):
        check_config(load_config("quickstart", ["buffer.stall_timeout_s=60", "actors.episode_timeout_s=90"]))


def test_the_size_of_the_tiny_policy_is_that_of_the_model_that_is_built(tmp_path: Path) -> None:
    from rollstream.models import load_policy, prepare_model

    config = load_config("quickstart", ["model={kind: tiny, num_layers: 3, hidden_size: 96, num_heads: 6, num_kv_heads: 3}"])
    model = load_policy(prepare_model(Run(tmp_path, config, "a" * 32)))
    assert weights_bytes(config) == 4 * sum(parameter.numel() for parameter in model.parameters())


def test_the_size_of_a_model_folder_is_read_from_the_headers_of_its_files(tmp_path: Path) -> None:
    config = load_config("quickstart", [folder_model(tmp_path, positions=512, shapes=((10, 20), (7,), ()))])
    assert weights_bytes(config) == 4 * (200 + 7 + 1)
    (tmp_path / "second.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"second\.safetensors is not a readable"):
        weights_bytes(config)


def test_trajectories_longer_than_a_model_folder_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"160 is longer than the model's 128 positions; lower it"):
        check_config(load_config("quickstart", [folder_model(tmp_path, positions=128, shapes=())]))


def test_an_overlong_ramp_longer_than_its_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"overlong\.buffer 50 is larger than its max_len 40"):
        check_config(load_config("quickstart", ["learner.advantage.overlong={max_len: 40, buffer: 50}"]))


def test_groups_of_one_may_train_without_a_baseline() -> None:
    check_config(load_config("quickstart", ["learner.group_size=1", "learner.advantage.mode=whiten", "buffer.degenerate=keep"]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["learner.group_size=1", "learner.advantage.mode=none"], r"group_size 1 with learner\.advantage\.mode none.*use group_size >= 2"),
        (["learner.advantage.mode=gae", "buffer.degenerate=keep"], r"mode gae needs values and learner\.value is null; add learner\.value: \{\}"),
        (
            ["learner.advantage.mode=gae", "learner.value={}", "buffer.degenerate=refill"],
            r"buffer\.degenerate refill with learner\.advantage\.mode gae.*use buffer\.degenerate keep",
        ),
        (["learner.advantage.mode=grpo", "learner.value={}"], r"learner\.value is set and learner\.advantage\.mode grpo reads no values; leave it out"),
        (["learner.advantage.mode=vtrace", "learner.value={}", "buffer.degenerate=keep"], r"kind dppo_tv with old mu.*count twice; use kind pg or ppo"),
        (["learner.loss.kl_in=reward"], r"kl_in reward with kl null and kl_is false: it needs kl"),
        (["learner.loss={kl: k1, kl_in: reward, kl_is: true}"], r"kl_in reward with kl k1 and kl_is true.*kl_is false"),
    ],
)
def test_advantages_that_contradict_the_rest_are_refused_with_the_remedy(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(load_config("quickstart", overrides))
