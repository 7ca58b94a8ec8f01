"""Checkpoints: complete or absent, checked byte by byte, and pruned."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rollstream import models
from rollstream.errors import CheckpointError
from rollstream.learner.checkpoint import Keep, clear_leftovers, damaged_checkpoints, newest_checkpoint, read_checkpoint
from rollstream.learner.optimizer import adamw
from rollstream.learner.policy import Policy
from rollstream.learner.saving import restore_training, write_checkpoint
from rollstream.learner.tracker import cut_rows


class Saver:
    """A small model in training, and how to checkpoint it."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=264, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16
        )
        self.model: Any = Qwen3ForCausalLM(config)
        self.policy = Policy(self.model)
        self.tokenizer = models.build_tiny_tokenizer(64)
        self.optimizer = adamw(self.model.named_parameters(), [], rate=0.01)
        self.folder = folder

    def step(self) -> None:
        self.model(input_ids=torch.randint(0, 264, (1, 5))).logits.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(
        self, version: int, sync: Callable[[], object] = lambda: None, keep_last: int = 2, keep_first: bool = False, keep_every: int | None = None
    ) -> Path:
        return write_checkpoint(
            self.folder, version=version, lineage=1, policy=self.policy, tokenizer=self.tokenizer, optimizer=self.optimizer, settings={"rate": 0.01},
            progress={"skipped": 3}, keep=Keep(keep_last, keep_first, keep_every), sync=sync,
        )  # fmt: skip


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return Saver(tmp_path / "checkpoints")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back(saver: Saver) -> None:
    saver.step()
    saver.save(7)
    found = newest_checkpoint(saver.folder)
    assert found is not None
    assert (found.version, found.lineage, found.settings, found.progress) == (7, 1, {"rate": 0.01}, {"skipped": 3})


def test_the_model_folder_is_one_that_transformers_loads(saver: Saver) -> None:
    folder = saver.save(7) / "model"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in saver.model.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|user|>x<|end|>"
    assert models.check_model_folder(folder) == folder


def test_training_goes_on_bit_for_bit_random_numbers_included(saver: Saver, tmp_path: Path) -> None:
    saver.step()
    folder = saver.save(1)
    saver.step()
    expected = {name: tensor.clone() for name, tensor in saver.model.state_dict().items()}
    other = Saver(tmp_path / "other")
    other.model = models.load_policy(folder / "model")
    other.optimizer = adamw(other.model.named_parameters(), [], rate=0.5)
    restore_training(read_checkpoint(folder), Policy(other.model), other.optimizer)
    other.step()
    assert all(torch.equal(tensor, other.model.state_dict()[name]) for name, tensor in expected.items())


def test_the_newest_stay_and_version_0_where_it_is_the_reference(saver: Saver) -> None:
    for version in (0, 5, 10, 15):
        saver.save(version, keep_first=True)
    assert names(saver.folder) == ["v000000", "v000010", "v000015"]
    saver.save(20, keep_last=1)
    assert names(saver.folder) == ["v000020"]


def test_every_so_many_versions_one_stays_for_good(saver: Saver) -> None:
    for version in range(0, 40, 5):
        saver.save(version, keep_last=1, keep_every=15)
    assert names(saver.folder) == ["v000015", "v000030", "v000035"], "version 0 is no milestone"


def test_log_and_ledger_are_durable_before_the_checkpoint_has_its_name(saver: Saver) -> None:
    saver.save(1, sync=lambda: names(saver.folder) == [".v000001.tmp"] or pytest.fail("named too early"))


def test_a_failure_halfway_leaves_what_was_there_and_nothing_that_looks_complete(saver: Saver) -> None:
    saver.save(1)

    def broken() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"v000002 was not written: .*No space left.*last good one is v000001: it is untouched"):
        saver.save(2, sync=broken)
    found = newest_checkpoint(saver.folder)
    assert found is not None
    assert found.version == 1
    clear_leftovers(saver.folder)
    assert names(saver.folder) == ["v000001"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model/model.safetensors", flip, r"model/model\.safetensors has \d+ bytes with xxh3"),
        ("training.pt", cut, r"training\.pt has"),
        ("model/config.json", Path.unlink, r"config\.json is missing"),
        ("manifest.json", cut, r"manifest\.json cannot be read"),
        ("manifest.json", Path.unlink, r"manifest\.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_last_good_one(saver: Saver, name: str, damage: Callable[[Path], None], message: str) -> None:
    saver.save(1)
    damage(saver.save(2) / name)
    with pytest.raises(CheckpointError, match=rf"v000002 is damaged \({message}.*\); the last good one is v000001: move v000002 away"):
        newest_checkpoint(saver.folder)
    shutil.rmtree(saver.folder / "v000001")
    with pytest.raises(CheckpointError, match="there is no other good one"):
        newest_checkpoint(saver.folder)


def test_every_damaged_checkpoint_is_listed(saver: Saver) -> None:
    for version in (1, 2, 3):
        saver.save(version, keep_last=3)
    assert damaged_checkpoints(saver.folder) == []
    (saver.folder / "v000002" / "training.pt").write_bytes(b"other")
    (saver.folder / "v000003" / "model" / "config.json").unlink()
    found = damaged_checkpoints(saver.folder)
    assert [line.split(":")[0] for line in found] == ["checkpoint v000002 is damaged", "checkpoint v000003 is damaged"]
    assert "training.pt has 5 bytes" in found[0]
    assert "config.json is missing" in found[1]
    assert damaged_checkpoints(saver.folder / "nowhere") == []


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None


def test_rows_after_the_version_go_and_so_does_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"version": 1, "a": 1}\n{"version": 2, "a": 2}\n{"version": 3, "a": 3}\n{"version": 4, "a"')
    assert cut_rows(path, 2) == {"version": 2, "a": 2}
    assert path.read_text() == '{"version": 1, "a": 1}\n{"version": 2, "a": 2}\n'
    assert cut_rows(path, 0) == {}
    assert path.read_text() == ""
