"""Every family of models the learner is meant for: packing changes nothing, a step trains, and a sampler can hold what is published."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollstream.actors.torch_weights import copy_in, fingerprint, match
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.buffer.weights import WeightsReader, WeightsWriter
from rollstream.configs.schema import Config
from rollstream.errors import ConfigError
from rollstream.learner.logprobs import distribution_logprobs
from rollstream.learner.optimizer import adamw
from rollstream.learner.policy import Policy
from rollstream.learner.publisher import Publisher
from rollstream.learner.step import Stepper
from rollstream.models import load_policy

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
NINE_TO_THREE: dict[str, Any] = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "Qwen2.5": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "Qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "tie_word_embeddings": False}),
    "Qwen3-MoE": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"head_dim": 8, "num_experts": 4, "norm_topk_prob": True, **EXPERTS}),
    "Llama": (LlamaForCausalLM, LlamaConfig, {}),
    "SmolLM2, nine heads to three": (LlamaForCausalLM, LlamaConfig, NINE_TO_THREE),
    "Gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 8}),
    "Gemma 3, sliding windows": (Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}),
    "DeepSeek-V3, latent attention and experts": (DeepseekV3ForCausalLM, DeepseekV3Config, {**EXPERTS, **LATENT}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def folder_of(family: str, folder: Path) -> Path:
    """A tiny random model of the family, saved as its makers' checkpoints are."""
    model, config, extra = FAMILIES[family]
    torch.manual_seed(0)
    model._from_config(config(**SHAPE | extra)).save_pretrained(folder)
    return folder


def trajectory(group: int, member: int) -> Trajectory:
    rng = np.random.default_rng([group, member])
    length = int(rng.integers(4, 30))
    mask = (rng.random(length) < 0.6).astype(np.uint8)
    mask[0], mask[-1] = 0, 1
    segment = Segment(
        token_ids=rng.integers(0, 64, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, rng.normal(-4, 0.3, length), 0).astype(np.float32),
        version_starts=np.zeros(1, np.int32),
        version_values=np.zeros(1, np.int32),
        turn_starts=np.zeros(1, np.int32),
        turn_roles=("assistant",),
        turn_rewards=(None,),
    )
    return Trajectory(TrajectoryKey(0, group, member, 0), "env", 0, 0, "train", (segment,), float(rng.random()), "terminated", "terminated")


def stepper_of(model: Any, **policy: Any) -> Stepper:
    config = Config.model_validate({
        "name": "x", "env": {"id": "x"},
        "learner": {"versions": 1, "batch_groups": 2, "group_size": 3, "policy": policy, "optimizer": {"learning_rate": 0.01}},
    })  # fmt: skip
    return Stepper(Policy(model, config.learner.policy), adamw(model.named_parameters(), [], rate=1e-2), config)


def batch() -> Batch:
    return Batch(0, 1, (0, 1), tuple(trajectory(group, member) for group in range(2) for member in range(3)))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_score_as_the_models_own_forward_scores_each_alone(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path)
    plain, recorded = load_policy(folder), batch()
    stepper = stepper_of(load_policy(folder))
    work = stepper.prepare(recorded)
    (one,) = work.micro_batches
    found = torch.zeros(len(work.flat.token_ids))
    with torch.no_grad():
        found[one.scored] = stepper.policy.logprobs(one, 1.0)[0]
        alone: list[torch.Tensor] = []
        for played in recorded.trajectories:
            ids = torch.from_numpy(played.segments[0].token_ids.astype(np.int64))
            alone.append(distribution_logprobs(plain(input_ids=ids[None]).logits[0], ids)[0])
    expected = torch.where(torch.from_numpy(work.flat.trained(work.plan)), torch.cat(alone), 0.0)
    assert float((found - expected).abs().max()) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_trains_and_a_sampler_holds_what_is_published(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "model")
    learner, sampler = load_policy(folder), load_policy(folder)
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    stepper = stepper_of(learner, compute_dtype="bfloat16", activation_checkpointing=True)
    update = stepper.update(1, stepper.differentiate(stepper.prepare(batch())))
    assert update.stepped
    assert update.grad_norm > 0
    moved = [name for name, tensor in learner.state_dict().items() if not torch.equal(tensor, before[name])]
    assert len(moved) > len(before) // 2
    channel = tmp_path / "weights"
    publisher = Publisher(WeightsWriter(channel, 1), learner, folder)
    reader = WeightsReader(channel)
    publisher.publish(0, 1)
    publisher.fence()
    deadline = time.monotonic() + 10
    while (manifest := reader.poll()) is None:
        assert time.monotonic() < deadline
    live = match(sampler, manifest)
    with reader.open(manifest) as view, torch.no_grad():
        copy_in(live, manifest, view)
    assert fingerprint(live, manifest) == manifest.digest
    assert all(torch.equal(tensor, sampler.state_dict()[name]) for name, tensor in learner.state_dict().items())
    reader.close()
    publisher.close()


def test_soft_capped_attention_of_gemma_2_is_refused_by_name() -> None:
    model = Gemma2ForCausalLM._from_config(Gemma2Config(**SHAPE, head_dim=8, query_pre_attn_scalar=8))
    with pytest.raises(ConfigError, match="softcap"):
        Policy(model)
