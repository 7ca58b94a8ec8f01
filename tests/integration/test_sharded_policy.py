"""A sharded policy from its files on: each rank reads its share alone, adapters are sharded with their base, and what leaves is what one process has."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

import families
import rank_nursery
import ranked
from rollstream import models
from rollstream.configs.learner_schema import FsdpPolicy
from rollstream.configs.run_folder import ForkPoint, Run
from rollstream.learner import lora
from rollstream.learner.checkpoint import read_checkpoint
from rollstream.learner.fsdp import ShardedPolicy
from rollstream.learner.loop import learn_from
from rollstream.learner.meeting import join
from rollstream.learner.optimizer import optimizer_of
from rollstream.learner.publisher import digest_of
from rollstream.learner.ranks import Ranks, naming_the_lost
from rollstream.learner.start import load
from rollstream.learner.step import Stepper
from rollstream.pretrained import export

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BOTH = ("Qwen3", "Llama", "Gemma 3, sliding windows", "Qwen3-MoE", "DeepSeek-V3, latent attention and experts")
THREE = ("Gemma", "Qwen3-MoE")
"""Also by three ranks: four experts, 32 rows."""
LARGE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 20, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
ADAPTERS: dict[str, Any] = {"rank": 4, "alpha": 8.0}
TRAINED: dict[str, Any] = {
    "versions": 3, "checkpoint": {"every": 2, "keep_last": 9}, "tokens_per_micro_batch": 60, "updates": {"mini_batches": 2},
    "loss": {"kind": "ppo", "old": "prox", "kl": "k2", "kl_coef": 0.01},
}  # fmt: skip


def run_in(folder: Path, num: int, forked: int | None = None, **learner: Any) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    policy = {"lora": ADAPTERS} | ({"kind": "fsdp", "ranks": num} if num else {})
    fork = None if forked is None else ForkPoint("f" * 32, 1, forked, "changed learner.policy.kind")
    return Run(folder, ranked.config(policy=policy, **TRAINED | learner), f"test-{folder}", fork=fork)


# --- what runs in the rank processes ------------------------------------------------------------------------------------------------


def sharded(folder: Path, ranks: Ranks) -> tuple[Any, ShardedPolicy]:
    model: Any = models.sketch_policy(folder)
    policy = ShardedPolicy(model, FsdpPolicy(kind="fsdp", ranks=ranks.num), ranks, "cpu", None, lambda: models.fill_policy(model, folder, device="cpu"))
    policy.settle()
    return model, policy


def differences(folder: Path, ranks: Ranks) -> list[str]:
    """What is not to the last bit as where the whole model is loaded."""
    found, whole = sharded(folder, ranks)[0], models.load_policy(folder)
    states: list[dict[str, Any]] = [model.state_dict() | dict(model.named_buffers()) for model in (found, whole)]
    values = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in states[0].items()}
    shared = [[name for name, _ in model.named_parameters()] for model in (found, whole)]
    odd = sorted(values.keys() ^ states[1].keys()) + (["tied tensors"] if shared[0] != shared[1] else [])
    return odd + [name for name, tensor in states[1].items() if values[name].dtype != tensor.dtype or not torch.equal(values[name], tensor)]


def peak_growth(folder: Path, ranks: Ranks) -> int:
    """Bytes of its own (no page of a file) by which this process grew at most while it loaded the policy."""

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    before, peak, done = own(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, own() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = sharded(folder, ranks)
    peak = max(peak, own() - before)
    done.set()
    watcher.join()
    del kept
    return peak


def adapter_gradients(folder: Path, ranks: Ranks) -> torch.Tensor:
    """Of one step's loss, from the checkpoint in ``folder``, whose B is not zero any more."""
    run = run_in(folder / f"run-{ranks.num}", ranks.num if ranks.joined else 0, loss=ranked.PLAIN, updates={})
    saved = read_checkpoint(folder / "single/checkpoints/v000003")
    policy = load(saved.model_folder, run, ranks, saved=saved)
    stepper = Stepper(policy, optimizer_of(policy, run.config.learner), run.config)
    stepper.differentiate(stepper.prepare(ranked.batch(4, ranks.rank, ranks.num)))
    named = [(name, parameter) for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert named
    assert all(".lora_" in name for name, _ in named)
    assert all(parameter.grad is None for parameter in policy.model.parameters() if not parameter.requires_grad)
    return torch.cat([(part.full_tensor() if hasattr(part := parameter.grad, "full_tensor") else part).flatten() for _, parameter in named])


def train(folder: Path, ranks: Ranks, forked: int | None = None) -> None:
    source = ranked.Source(ranks)
    learn_from(run_in(folder, ranks.num if ranks.joined else 0, forked), source, threading.Event(), ranks)
    (folder / f"told-{ranks.rank}.json").write_text(json.dumps(source.digests))


def refused_by_disk(folder: Path, ranks: Ranks) -> str:
    """What a checkpoint comes to that rank 1 has no room for."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_up(version: int) -> None:
        if version == 3 and ranks.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))

    found = ranked.caught(lambda: learn_from(run_in(folder, ranks.num), ranked.Source(ranks, fill_up), threading.Event(), ranks))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found


def job_two(folder: Path, ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {"differences": {family: differences(folder / family, ranks) for family in BOTH}}
    found["growth"] = peak_growth(folder / "large", ranks)
    found["faults"] = {name: ranked.caught(lambda name=name: sharded(folder / name, ranks)) for name in ("lacking", "other shape", "damaged", "quantised")}
    gradients = adapter_gradients(folder, ranks)
    if ranks.leads:
        torch.save(gradients, folder / "gradients.pt")
    train(folder / "sharded", ranks)
    train(folder / "forked", ranks, 2)
    return found | {"disk": refused_by_disk(folder / "full", ranks)}


def job_three(folder: Path, ranks: Ranks) -> dict[str, Any]:
    return {"differences": {family: differences(folder / family, ranks) for family in THREE}}


def main(job: str, folder: Path, rank: int, num: int) -> None:
    torch.set_num_threads(1)
    ranks = join(folder / f"meeting-{num}", rank, num, device="cpu", timeout_s=60)
    with naming_the_lost(ranks):
        found = {"two": job_two, "three": job_three}[job](folder, ranks)
        (folder / f"{job}-{rank}.json").write_text(json.dumps(found))
    ranks.close()


# --- the tests ----------------------------------------------------------------------------------------------------------------------


def save_in_parts(model: Any, folder: Path, size: str) -> None:
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=size)


def damage(folder: Path, whole: Path) -> None:
    """Copies of ``whole`` that no policy can be loaded from."""
    for name in ("lacking", "other shape", "damaged", "quantised"):
        shutil.copytree(whole, folder / name)
    tensors = load_file(whole / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "lacking/model.safetensors")
    save_file(tensors | {"model.norm.weight": norm[:-1].clone()}, folder / "other shape/model.safetensors")
    os.truncate(folder / "damaged/model.safetensors", 5000)
    config = json.loads((whole / "config.json").read_text())
    (folder / "quantised/config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    nurse = rank_nursery.Nursery(__file__, MALLOC_MMAP_THRESHOLD_="65536")  # what is freed goes back at once, so that memory can be measured
    made = tmp_path_factory.mktemp("sharded")
    for family in {*BOTH, *THREE}:
        families.folder_of(family, made / "plain" / family)
        save_in_parts(models.load_policy(made / "plain" / family), made / family, "20KB")
    assert len(list((made / "Llama").glob("model-*.safetensors"))) > 1
    damage(made, made / "plain/Llama")
    save_in_parts(Qwen3ForCausalLM(Qwen3Config(**LARGE)), made / "large", "20MB")
    train(made / "single", Ranks())
    shutil.copytree(made / "single", made / "forked", ignore=shutil.ignore_patterns("v000003"))
    done = [nurse.run(job, made, num) for job, num in (("two", 2), ("three", 3))]
    nurse.close()
    for codes, errors in done:
        assert not any(codes), "\n".join(errors)
    return made


def told(folder: Path, job: str, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{job}-{rank}.json").read_text())


@pytest.mark.parametrize(("job", "num"), [("two", 2), ("three", 3)])
def test_ranks_that_read_their_shares_hold_what_one_process_loads_to_the_last_bit(folder: Path, job: str, num: int) -> None:
    for rank in range(num):
        found = told(folder, job, rank)["differences"]
        assert found
        assert not any(found.values()), found


@pytest.mark.parametrize("family", ["Gemma", "Qwen3-MoE", "DeepSeek-V3, latent attention and experts"])
def test_a_policy_saved_file_by_file_is_the_folder_its_makers_would_write(folder: Path, tmp_path: Path, family: str) -> None:
    model = models.load_policy(folder / family)
    models.save_policy(model, models.saved_state(model).items(), tmp_path / "parts", part_bytes=20_000)
    model.save_pretrained(tmp_path / "whole")
    parts = [load_file(path) for path in sorted((tmp_path / "parts").glob("model-*.safetensors"))]
    assert len(parts) > 1
    found = {name: tensor for part in parts for name, tensor in part.items()}
    expected = load_file(tmp_path / "whole/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    again = models.load_policy(tmp_path / "parts")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert json.loads((tmp_path / "parts/config.json").read_text()) == json.loads((tmp_path / "whole/config.json").read_text())


def test_a_rank_never_holds_much_more_than_its_share(folder: Path) -> None:
    size = 4 * sum(tensor.numel() for path in (folder / "large").glob("*.safetensors") for tensor in load_file(path).values())
    for rank in (0, 1):
        assert 0.45 * size < told(folder, "two", rank)["growth"] < 0.8 * size, "one share of two, and a layer at a time for a forward pass"


def test_files_that_no_policy_can_be_loaded_from_are_named_on_every_rank(folder: Path) -> None:
    for rank in (0, 1):
        found = told(folder, "two", rank)["faults"]
        assert found["lacking"].startswith(f"ConfigError: model.path: {folder}/lacking has no model.norm.weight")
        assert "has model.norm.weight with shape [31], its config.json asks for [32]; copy the model again" in found["other shape"]
        assert found["damaged"].startswith(f"ConfigError: model.path: {folder}/damaged has weights that cannot be read (")
        assert "quantised holds quantised weights, which cannot be trained sharded" in found["quantised"]


def test_adapters_of_two_ranks_get_the_gradient_of_one_process_and_nothing_else_gets_any(folder: Path) -> None:
    expected, found = adapter_gradients(folder, Ranks()), torch.load(folder / "gradients.pt", weights_only=True)
    assert expected.norm() > 0
    assert float((found - expected).norm() / expected.norm()) < 5e-6


def test_a_checkpoint_that_one_rank_has_no_room_for_is_refused_on_all_and_names_the_last_good_one(folder: Path) -> None:
    for rank in (0, 1):
        found = told(folder, "two", rank)["disk"]
        assert found.startswith("CheckpointError: checkpoint ")
        assert "v000003 was not written: rank 1: " in found
        assert found.endswith("the last good one is v000002: it is untouched")
    assert not (folder / "full/checkpoints/v000003").exists()


def adapters(folder: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/v{version:06d}/adapter" / lora.WEIGHTS)


def test_adapters_trained_by_two_ranks_are_those_of_one_process_within_noise(folder: Path) -> None:
    whole, found = ranked.followed(folder / "single"), ranked.followed(folder / "sharded")
    assert len(found) == 3
    for one, other in zip(found, whole, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert all(torch.equal(tensor, adapters(folder / "single", 0)[name]) for name, tensor in adapters(folder / "sharded", 0).items()), "drawn alike"
    for name in ("sharded", "forked"):
        last = adapters(folder / name, 3)
        assert last.keys() == adapters(folder / "single", 3).keys()
        assert all(torch.allclose(tensor, adapters(folder / "single", 3)[key], atol=1e-5) for key, tensor in last.items())
    assert {path.name for path in (folder / "sharded/checkpoints/v000003").iterdir()} == {"adapter", "manifest.json", "shards", "training.pt"}
    moments = [tensor for path in (folder / "sharded/checkpoints/v000003/shards").glob("*.safetensors") for tensor in load_file(path).values()]
    assert sum(tensor.numel() for tensor in moments) == 2 * sum(tensor.numel() for tensor in adapters(folder / "single", 3).values())


def test_what_ranks_publish_of_adapters_is_what_one_process_merges_to_the_last_bit(folder: Path, tmp_path: Path) -> None:
    digests = json.loads((folder / "sharded/told-0.json").read_text())
    assert digests["0"] == json.loads((folder / "single/told-0.json").read_text())["0"]
    assert json.loads((folder / "sharded/told-1.json").read_text()) == {}
    export(folder / "sharded/checkpoints", None, tmp_path / "merged")
    merged = models.load_policy(tmp_path / "merged")
    assert not lora.adapted(merged)
    assert digests["3"] == digest_of(merged, tmp_path / "merged")


def test_a_fork_into_one_process_goes_on_from_the_adapters_that_ranks_saved(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "sharded", tmp_path / "run", ignore=shutil.ignore_patterns("v000003"))
    train(tmp_path / "run", Ranks(), 2)
    last = adapters(tmp_path / "run", 3)
    assert all(torch.allclose(tensor, last[name], atol=1e-5) for name, tensor in adapters(folder / "sharded", 3).items())


if __name__ == "__main__":
    rank_nursery.serve(main)
