"""LoRA: only adapters learn, what leaves the learner is merged, checkpoints hold adapters on a named base, and a resume is exact."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file

import recorded_run
from families import folder_of
from rollstream import models
from rollstream.buffer.ledger import Ledger
from rollstream.configs.checks import check_config
from rollstream.configs.learner_schema import Lora
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.errors import CheckpointError, ConfigError
from rollstream.evaluate_command import policy_folder
from rollstream.learner import lora
from rollstream.learner.attention import layout_of
from rollstream.learner.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint
from rollstream.learner.loop import learn_from, start
from rollstream.learner.policy import Policy
from rollstream.learner.publisher import digest_of, published_tensors
from rollstream.learner.replay import replay
from rollstream.learner.scorer import scored_checkpoint
from rollstream.pretrained import export

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTERS = "learner.policy.lora={rank: 4, alpha: 8}"
IDS = torch.arange(40, 60)[None]


def train(folder: Path, *overrides: str, versions: int = 4, until: int = 99) -> Run:
    """``versions`` versions; stopped after ``until`` and started again."""
    run: Run = recorded_run.make_run(folder, ADAPTERS, "learner.checkpoint={every: 2, keep_last: 2}", f"learner.versions={versions}", *overrides)
    for last in (until, versions) if until < versions else (versions,):
        stop = threading.Event()
        stream = recorded_run.Stream(run)
        trained = stream.trained

        def counted(version: int, last: int = last, stop: threading.Event = stop, trained: Any = trained) -> None:
            trained(version)
            if version >= last:
                stop.set()

        stream.trained = counted
        learn_from(run, stream, stop)
        stream.close()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    return train(tmp_path_factory.mktemp("lora"), "learner.loss={kl: k2, kl_coef: 0.01}", "learner.policy.lora.dropout=0.1")


def rows(run: Run) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith(("loss/", "optim/", "train/"))} for row in found]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_only_adapters_learn_and_only_they_are_kept(run: Run) -> None:
    kept = sorted(path.name for path in run.checkpoints_folder.iterdir())
    assert kept == ["v000000", "v000002", "v000004"]
    assert [sorted(path.name for path in (run.checkpoints_folder / name).iterdir()) for name in kept] == [
        ["adapter", "manifest.json", "model", "training.pt"], *[["adapter", "manifest.json", "training.pt"]] * 2,
    ]  # fmt: skip
    newest = newest_checkpoint(run.checkpoints_folder)
    assert newest is not None
    state = torch.load(newest.folder / "training.pt", weights_only=True)["optimizer"]
    adapters = load_file(run.checkpoints_folder / "v000004" / "adapter" / lora.WEIGHTS)
    assert sum(entry["exp_avg"].numel() for entry in state["state"].values()) == sum(tensor.numel() for tensor in adapters.values())
    first = load_file(run.checkpoints_folder / "v000000" / "adapter" / lora.WEIGHTS)
    assert all(bool(tensor.any()) == (".lora_A." in name) for name, tensor in first.items())
    assert all(not torch.equal(tensor, first[name]) for name, tensor in adapters.items())
    assert all(row["optim/grad_norm"] > 0 for row in rows(run))


def test_the_reference_is_the_base_without_a_second_copy(run: Run) -> None:
    assert rows(run)[0]["loss/kl_ref"] == pytest.approx(0.0, abs=1e-3), "version 1 trains on version 0, but for the dropout"
    assert rows(run)[-1]["loss/kl_ref"] > 0


def test_what_is_published_is_merged_and_scores_as_the_learner_does(run: Run) -> None:
    held = start(run, threading.Event())
    assert held.version == 4
    assert held.saved is not None
    ledger = Ledger(run.ledger_path, run.run_id)
    (digest,) = [found for version, found in ledger.rows("SELECT version, digest FROM versions") if version == 4]
    ledger.close()
    assert digest_of(held.policy.model, newest_model(run)) == digest
    plain = models.load_policy(newest_model(run))
    before = logits(plain)
    plain.load_state_dict(lora.plain_state(held.policy.model)[0])
    assert not torch.allclose(logits(plain), before, atol=1e-3)
    assert torch.allclose(logits(plain), logits(held.policy.model), atol=1e-5)


def newest_model(run: Run) -> Path:
    newest = newest_checkpoint(run.checkpoints_folder)
    assert newest is not None
    return newest.model_folder


def test_a_resume_is_bit_exact_with_dropout_several_updates_and_a_value_head(tmp_path: Path) -> None:
    settings = ("learner.preset=ppo", "learner.updates={mini_batches: 2, epochs: 1}", "learner.policy.lora.dropout=0.2")
    whole, stopped = train(tmp_path / "whole", *settings), train(tmp_path / "stopped", *settings, until=3)
    assert rows(whole) == rows(stopped)
    for name in ("v000000", "v000004"):
        one, other = (load_file(run.checkpoints_folder / name / "adapter" / lora.WEIGHTS) for run in (whole, stopped))
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_a_replay_gives_the_recorded_figures_and_digest(run: Run) -> None:
    found = replay(run, 3)
    assert found.differing == []
    assert "weights/digest" in found.names


def test_an_export_is_a_plain_folder_of_the_merged_policy_and_an_adapter_one_that_peft_loads(run: Run, tmp_path: Path) -> None:
    export(run.checkpoints_folder, None, tmp_path / "plain")
    export(run.checkpoints_folder, None, tmp_path / "adapter", adapter=True)
    live = logits(start(run, threading.Event()).policy.model)
    plain = models.load_policy(models.check_model_folder(tmp_path / "plain"))
    assert not lora.adapted(plain)
    assert torch.allclose(logits(plain), live, atol=1e-5)
    base = models.load_policy(newest_model(run))
    assert torch.allclose(logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter")), live, atol=1e-6)


def test_an_evaluation_scores_the_merged_policy(run: Run) -> None:
    folder = policy_folder(run, run.checkpoints_folder / "v000004")
    assert policy_folder(run, run.checkpoints_folder / "v000004") == folder
    assert scored_checkpoint(folder).folder == run.checkpoints_folder / "v000004"
    assert torch.allclose(logits(models.load_policy(models.check_model_folder(folder))), logits(start(run, threading.Event()).policy.model), atol=1e-5)


def test_adapters_are_asked_of_a_run_that_has_none_in_vain(tmp_path: Path) -> None:
    run: Run = recorded_run.make_run(tmp_path, "learner.versions=1")
    stream = recorded_run.Stream(run)
    learn_from(run, stream, threading.Event())
    stream.close()
    with pytest.raises(ConfigError, match=r"v000001 holds no adapters: the run had no learner\.policy\.lora; leave --adapter out"):
        export(run.checkpoints_folder, None, tmp_path / "out", adapter=True)


def test_another_base_under_the_adapters_is_refused(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoints"
    shutil.copytree(run.checkpoints_folder, copy)
    manifest = copy / "v000000" / "manifest.json"
    (copy / "v000000" / "model" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"v000004 is damaged \(its base v000000 is damaged: config\.json is missing\)"):
        read_checkpoint(copy / "v000004")
    values = json.loads(manifest.read_text())
    del values["files"]["model/config.json"]
    manifest.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"its base v000000 is another model than its adapters were trained on"):
        read_checkpoint(copy / "v000004")


def test_adapters_that_a_fork_put_aside_find_their_base(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoints"
    shutil.copytree(run.checkpoints_folder, copy)
    aside = copy / "abandoned" / "lineage-000" / "v000004"
    aside.parent.mkdir(parents=True)
    (copy / "v000004").rename(aside)
    assert read_checkpoint(aside).model_folder == copy / "v000000" / "model"


@pytest.mark.parametrize(("held", "wanted"), [("null", "{rank: 4}"), ("{rank: 4}", "null")])
def test_adapters_begin_and_end_with_a_run(tmp_path: Path, held: str, wanted: str) -> None:
    folder = tmp_path / "v000002"
    (folder / ("model" if held == "null" else "adapter")).mkdir(parents=True)
    settings = None if wanted == "null" else Lora(rank=4)
    with pytest.raises(ConfigError, match=r"v000002 was trained with(out)? adapters and learner\.policy\.lora is (set|null): go on as it was, or export it"):
        lora.check_saved(settings, Checkpoint(folder, 2, 0, {}, {}))


def test_targets_choose_layers_and_what_matches_nothing_is_told_what_there_is(tmp_path: Path) -> None:
    folder = models.prepare_model(recorded_run.make_run(tmp_path))
    model = models.load_policy(folder)
    lora.add_adapters(model, Lora(rank=2, target_modules=("q_proj", "mlp.down_proj")))
    assert sorted({name.rpartition(".")[2] for name in lora.adapted(model)}) == ["down_proj", "q_proj"]
    assert {name.rpartition("lora_")[2][0] for name, parameter in model.named_parameters() if parameter.requires_grad} == {"A", "B"}
    for wanted in (("q_proj", "wq"), ("lm_head",)):
        with pytest.raises(
            ConfigError, match=rf"target_modules: {wanted[-1]} matches no linear layer of Qwen3ForCausalLM before its output; there are down_proj, .*q_proj"
        ):
            lora.add_adapters(models.load_policy(folder), Lora(target_modules=wanted))


def test_dropout_with_checkpointed_activations_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora\.dropout 0\.1 with learner\.policy\.activation_checkpointing.*set dropout 0"):
        check_config(load_config("quickstart", ["learner.policy={lora: {dropout: 0.1}, activation_checkpointing: true}"]))


@pytest.mark.parametrize("settings", ["{activation_checkpointing: true, lora: {rank: 4}}", "{compute_dtype: bfloat16, lora: {rank: 4}}"])
def test_adapters_get_the_gradient_of_the_merged_weights(tmp_path: Path, settings: str) -> None:
    """d loss / d B = alpha / rank · d loss / d W · A^T at B = 0, whatever the layers keep and compute in."""
    config = recorded_run.make_run(tmp_path, f"learner.policy={settings}").config.learner
    folder = models.prepare_model(recorded_run.make_run(tmp_path / "other"))
    full, model = models.load_policy(folder), models.load_policy(folder)
    lora.add_adapters(model, Lora(rank=4, alpha=8.0))
    lora.fill_adapters(model, 0, None)
    Policy(model, config.policy)
    with torch.autocast("cpu", torch.bfloat16, enabled=config.policy.compute_dtype == "bfloat16"):
        full(IDS).logits.float().square().mean().backward()
        model(IDS).logits.float().square().mean().backward()
    weights = dict(full.named_parameters())
    tolerance = 1e-4 if config.policy.compute_dtype == "float32" else 0.1
    for name, layer in lora.adapted(model).items():
        gradient = weights[f"{name}.weight"].grad
        assert gradient is not None
        expected = 2.0 * gradient @ layer.lora_A["default"].weight.detach().T
        found = layer.lora_B["default"].weight.grad
        assert float((found - expected).norm()) <= tolerance * float(expected.norm()), name
        assert layer.base_layer.weight.grad is None


@pytest.mark.parametrize("family", ["Qwen2.5", "Qwen3-MoE", "Llama", "Gemma 3, sliding windows", "DeepSeek-V3, latent attention and experts"])
def test_merged_weights_of_every_architecture_go_out_under_the_names_a_sampler_holds(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "model")
    model = models.load_policy(folder)
    policy = Policy(model)
    lora.add_adapters(model, Lora(rank=2, alpha=8.0))
    lora.fill_adapters(model, 0, None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(0.0, 0.3)
    tensors = published_tensors(model, folder, lora.plain_state(model)[0])
    plain = models.load_policy(folder)
    missing, unexpected = plain.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all(name in tensors or "lm_head" in name or "embed" in name for name in missing), "only tied ones are left out"
    plain.tie_weights()
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        positions = torch.arange(18)[None]
        merged = plain(ids).logits
        with lora.without_adapters(model):
            base = policy.model(input_ids=ids, position_ids=positions, packed_layout=layout_of(np.array([18]), "cpu"), use_cache=False).logits
        found = policy.model(input_ids=ids, position_ids=positions, packed_layout=layout_of(np.array([18]), "cpu"), use_cache=False).logits
    assert float((found - base).abs().max()) > 0.05
    assert torch.allclose(found, merged, atol=2e-4)
