"""Families of models, trained for a few versions by two ranks and by one process: value head, reference, several updates; the same within noise."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import families
import rank_nursery
import ranked
from rollstream import models
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config
from rollstream.learner.loop import learn_from
from rollstream.learner.meeting import join
from rollstream.learner.ranks import Ranks, naming_the_lost

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

FAMILIES = ("Qwen2.5", "SmolLM2, nine heads to three", "Gemma 3, sliding windows", "Qwen3-MoE", "DeepSeek-V3, latent attention and experts")
LORA = {"rank": 4, "alpha": 8.0}
CASES: dict[str, dict[str, Any]] = {
    "values": ranked.VALUED,
    "a reference": {"versions": 2, "loss": {"kind": "ppo", "old": "prox", "kl": "k2", "kl_coef": 0.05}, "updates": {"mini_batches": 2, "epochs": 2}},
    "adapters": {"versions": 2, "loss": {"kind": "ppo", "old": "prox", "kl": "k2", "kl_coef": 0.05}, "updates": {"mini_batches": 2}, "policy": {"lora": LORA}},
    "kept in memory": {"versions": 2, "policy": {"reshard_after_forward": False, "reduce": "micro_batch", "activation_checkpointing": True}},
}  # fmt: skip


def run_in(folder: Path, family: str, case: str, num: int) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"tokens_per_micro_batch": 60, "optimizer": {"learning_rate": 3e-4}, **CASES[case]}
    policy: dict[str, Any] = settings.pop("policy", {})
    policy = {**policy, "kind": "fsdp", "ranks": num} if num else {name: policy[name] for name in policy.keys() & {"lora", "activation_checkpointing"}}
    values = ranked.config(policy=policy, **settings).model_dump()
    return Run(folder, Config.model_validate(values | {"model": {"kind": "folder", "path": str(folder.parents[1] / family)}}), f"test-{folder}")


def train(folder: Path, family: str, case: str, num: int, ranks: Ranks) -> None:
    source = ranked.Source(ranks)
    run = run_in(folder / ("ranked" if num else "single") / f"{family}, {case}", family, case, num)
    learn_from(run, source, threading.Event(), ranks)
    (run.folder / f"told-{ranks.rank}.json").write_text(json.dumps(source.digests))


def main(job: str, folder: Path, rank: int, num: int) -> None:
    torch.set_num_threads(1)
    ranks = join(folder / f"meeting-{job}", rank, num, device="cpu", timeout_s=60)
    with naming_the_lost(ranks):
        for case in CASES:
            train(folder, job, case, num, ranks)
    ranks.close()


@pytest.fixture(scope="module")
def nurse() -> Any:
    made = rank_nursery.Nursery(__file__)
    yield made
    made.close()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = [path for kind in ("model", "adapter") for path in (folder / "checkpoints/v000002" / kind).glob("*.safetensors")]
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_every_family_as_one_process_does(nurse: Any, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setitem(families.SHAPE, "vocab_size", 264)
    families.folder_of(family, tmp_path / family)
    models.build_tiny_tokenizer(64).save_pretrained(tmp_path / family)
    codes, errors = nurse.run(family, tmp_path, 2)
    assert codes == [0, 0], "\n".join(errors)
    for case in CASES:
        train(tmp_path, family, case, 0, Ranks())
        found, expected = (tmp_path / kind / f"{family}, {case}" for kind in ("ranked", "single"))
        assert len(ranked.followed(found)) == 2
        for one, other in zip(ranked.followed(found), ranked.followed(expected), strict=True):
            assert one == pytest.approx(other, rel=2e-3, abs=2e-5), case
        kept, wanted = weights(found), weights(expected)
        assert kept.keys() == wanted.keys() != set()
        assert all(torch.allclose(tensor, wanted[name], atol=2e-4) for name, tensor in kept.items()), case
        digests = [json.loads((folder / "told-0.json").read_text()) for folder in (found, expected)]
        assert digests[0]["0"] == digests[1]["0"], case


if __name__ == "__main__":
    rank_nursery.serve(main)
