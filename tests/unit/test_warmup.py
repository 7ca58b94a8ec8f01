"""The warm-up: from noise to a policy that speaks the environment's language."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream import models
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config
from rollstream.learner.collate import pack
from rollstream.learner.policy import Policy
from rollstream.learner.warmup import supervised, warm_up

pytestmark = pytest.mark.usefixtures("one_thread")


def build(folder: Path, **warmup: Any) -> tuple[Policy, Any, Config]:
    config = Config.model_validate({
        "name": "warm", "seed": 5, "env": {"id": "rollstream/KeyValue-v0"},
        "model": {"kind": "tiny", "num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1},
        "warmup": {"steps": 12, "demonstrations_per_step": 16, "learning_rate": 0.01, **warmup},
        "learner": {"versions": 1, "batch_groups": 1, "group_size": 2, "tokens_per_micro_batch": 256},
    })  # fmt: skip
    folder.mkdir()
    model = models.prepare_model(Run(folder, config, "warm"))
    return Policy(models.load_policy(model)), models.load_tokenizer(model), config


def test_the_same_seed_gives_the_same_policy_and_a_better_one(tmp_path: Path) -> None:
    runs = [build(tmp_path / name) for name in ("a", "b")]
    losses = [warm_up(policy, tokenizer, config, threading.Event()) for policy, tokenizer, config in runs]
    assert losses[0] == losses[1] < 3.0, "it began at ln 264 = 5.6 and above"
    for one, other in zip(runs[0][0].model.parameters(), runs[1][0].model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_warm_up_that_is_asked_to_stop_stops_at_once(tmp_path: Path) -> None:
    policy, tokenizer, config = build(tmp_path / "a", steps=1_000_000)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    warm_up(policy, tokenizer, config, stop)


def test_only_the_assistants_tokens_are_learned_each_with_the_same_weight() -> None:
    flat, plan = supervised([([1, 2, 3, 4], [0, 0, 1, 1]), ([5, 6, 7], [0, 1, 0])])
    (one,) = pack(flat, plan, 100)
    assert one.targets.tolist() == [3, 4, 6]
    assert one.tokens.agg.tolist() == pytest.approx([1 / 3] * 3)
