"""The policy and one step on it: packing changes nothing, order and split change nothing, fresh data have ratio 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.configs.schema import Config
from rollstream.errors import ConfigError
from rollstream.learner.collate import MicroBatch
from rollstream.learner.logprobs import distribution_logprobs
from rollstream.learner.optimizer import adamw, clip, learning_rate
from rollstream.learner.policy import Policy
from rollstream.learner.step import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "mistral with a sliding window": (MistralForCausalLM, MistralConfig, {"sliding_window": 6}),
    "granite, which scales its logits": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 3.0}),
}
GROUPS, MEMBERS = 4, 4


def build(name: str) -> Any:
    model, config, extra = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model._from_config(config(**SHAPE | extra), attn_implementation="sdpa")


def trajectory(group: int, member: int, scores: dict[tuple[int, int], list[float]]) -> Trajectory:
    """Random tokens; ``scores`` are their log-probabilities, drawn too where a member has none."""
    rng = np.random.default_rng([group, member])
    length = int(rng.integers(4, 30))
    mask = (rng.random(length) < 0.6).astype(np.uint8)
    mask[0], mask[2] = 0, 1
    logprobs = np.array(scores.get((group, member), rng.normal(-4, 0.3, length)), np.float32)
    segment = Segment(
        token_ids=rng.integers(0, 64, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, np.minimum(logprobs, 0), 0).astype(np.float32),
        version_starts=np.zeros(1, np.int32),
        version_values=np.zeros(1, np.int32),
        turn_starts=np.zeros(1, np.int32),
        turn_roles=("assistant",),
        turn_rewards=(None,),
    )
    return Trajectory(TrajectoryKey(0, group, member, 0), "env", 0, 0, "train", (segment,), float(rng.random()), "terminated", "terminated", temperature=0.8)


def batch(scores: dict[tuple[int, int], list[float]] | None = None) -> Batch:
    members = [(group, member) for group in range(GROUPS) for member in range(MEMBERS)]
    return Batch(0, 1, tuple(range(GROUPS)), tuple(trajectory(group, member, scores or {}) for group, member in members))


def stepper(model: Any, **learner: Any) -> Stepper:
    config = Config.model_validate({
        "name": "x", "env": {"id": "x"},
        "learner": {"versions": 1, "batch_groups": GROUPS, "group_size": MEMBERS, **learner},
    })  # fmt: skip
    return Stepper(Policy(model), adamw(model.named_parameters(), [], rate=1e-3), config)


def gradients(model: Any, recorded: Batch, **learner: Any) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics and all gradients, flat."""
    model.zero_grad()
    one = stepper(model, **learner)
    measured = one.differentiate(one.prepare(recorded)).metrics
    return measured, torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def unpacked(model: Any, one: Trajectory) -> torch.Tensor:
    """Log-probabilities of every token of a trajectory by the model's own forward, alone and unpacked."""
    ids = torch.from_numpy(one.segments[0].token_ids.astype(np.int64))
    return distribution_logprobs(model(input_ids=ids[None]).logits[0], ids, one.temperature)[0]


def packed(policy: Policy, micro_batches: list[MicroBatch]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in micro_batches:
        x, entropy = policy.logprobs(one, 0.8)
        assert bool((entropy >= 0).all())
        for row, value in zip(one.tokens.row.tolist(), x.tolist(), strict=True):
            assert one.tokens.names is not None
            found.setdefault(one.tokens.names[row], []).append(value)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_score_as_each_row_does_alone(name: str) -> None:
    reference, model, recorded = build(name), build(name), batch()
    one = stepper(model, tokens_per_micro_batch=100)
    found = packed(Policy(model), one.prepare(recorded).micro_batches)
    for played in recorded.trajectories:
        expected = unpacked(reference, played)[played.segments[0].loss_mask.astype(bool)]
        assert found[f"group {played.key.group_id} member {played.key.member}"] == pytest.approx(expected.tolist(), abs=5e-6)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_packed_gradients_are_those_of_each_row_alone(name: str) -> None:
    reference, model, recorded = build(name), build(name), batch()
    loss: dict[str, Any] = {"loss": {"kind": "pg", "old": "cur", "agg": "token_mean"}, "advantage": {"mode": "mean"}}
    _, found = gradients(model, recorded, **loss)
    rewards = np.array([played.reward for played in recorded.trajectories]).reshape(GROUPS, MEMBERS)
    advantages = (rewards - rewards.mean(1, keepdims=True)).ravel()
    total = sum(played.num_trained_tokens for played in recorded.trajectories)
    for played, advantage in zip(recorded.trajectories, advantages, strict=True):
        mask = torch.from_numpy(played.segments[0].loss_mask.astype(bool))
        (-(unpacked(reference, played)[mask]).sum() * float(advantage) / total).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    assert float((found - expected).norm() / expected.norm()) < 2e-6


OBJECTIVES: dict[str, dict[str, Any]] = {
    "dppo_tv": {
        "loss": {"kind": "dppo_tv", "old": "mu", "mu_sq_coef": 0.001, "agg": "group_mean_token_mean", "entropy_coef": 0.01},
        "advantage": {"mode": "batch_std"},
    },
    "gspo": {"loss": {"kind": "gspo", "agg": "seq_mean_token_mean"}},
    "m2po, which needs the whole batch": {"loss": {"kind": "m2po", "old": "mu"}},
    "self-normalised weights per trajectory": {
        "loss": {
            "kind": "ppo",
            "correction": [{"level": "geometric", "mode": "clip", "low": 0.5, "high": 2.0}],
            "correction_unit": "trajectory",
            "self_normalise": True,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTIVES)
def test_row_order_and_micro_batch_split_do_not_change_a_step(name: str) -> None:
    model, recorded = build("qwen3"), batch()
    shuffled = np.random.default_rng(0).permutation(len(recorded.trajectories))
    other_order = Batch(0, 1, recorded.groups, tuple(recorded.trajectories[index] for index in shuffled))
    metrics, expected = gradients(model, recorded, **OBJECTIVES[name])
    for played, budget in ((other_order, 16384), (recorded, 40), (other_order, 64)):
        again, found = gradients(model, played, tokens_per_micro_batch=budget, **OBJECTIVES[name])
        assert float((found - expected).norm() / expected.norm()) < 1e-6
        assert again == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["dppo_tv", "gspo"])
def test_fresh_data_have_ratio_1(name: str) -> None:
    reference = build("qwen3")
    scores = {(played.key.group_id, played.key.member): unpacked(reference, played).tolist() for played in batch().trajectories}
    metrics, _ = gradients(build("qwen3"), batch(scores), **OBJECTIVES[name])
    for ratio in ("ratio_mean", "ratio_max", "ratio_ess", "is_mean", "drift_mu_ess"):
        assert metrics[ratio] == pytest.approx(1.0, abs=1e-5), ratio
    assert metrics["drift_mu_k3"] == pytest.approx(0.0, abs=1e-9)


def test_scaled_logits_are_noticed_and_scored_through_the_models_own_forward() -> None:
    assert Policy(build("granite, which scales its logits")).full_logits
    assert not Policy(build("llama")).full_logits


def test_soft_capped_attention_is_refused() -> None:
    model = Gemma2ForCausalLM._from_config(Gemma2Config(**SHAPE | {"attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 8}), attn_implementation="sdpa")
    with pytest.raises(ConfigError, match="softcap"):
        Policy(model)


def test_dropout_is_off() -> None:
    model = build("qwen3").train()
    assert not Policy(model).model.training


def test_only_matrices_decay_and_embeddings_do_not() -> None:
    model = build("llama")
    optimizer = adamw(model.named_parameters(), [model.get_input_embeddings().weight, model.get_output_embeddings().weight], rate=0.1, weight_decay=0.5)
    decaying = {id(parameter) for group in optimizer.param_groups if group["weight_decay"] for parameter in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decaying}
    assert names == {name for name, _ in model.named_parameters() if "proj" in name}


def test_clipping_reports_the_norm_before_it() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip([parameter], 1.0) == pytest.approx(5.0)
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)
    parameter.grad = torch.tensor([float("inf"), 1.0])
    assert clip([parameter], 1.0) == float("inf")
    assert parameter.grad.tolist() == [float("inf"), 1.0]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]), ("cosine", [0.5, 1, 1, 0.8535534, 0.5, 0.1464466])],
)
def test_the_rate_warms_up_then_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    config = Config.model_validate({
        "name": "x", "env": {"id": "x"},
        "learner": {"versions": 6, "batch_groups": 1, "group_size": 2, "optimizer": {"learning_rate": 1.0, "schedule": schedule, "warmup_versions": 2}},
    }).learner.optimizer  # fmt: skip
    assert [learning_rate(config, version, 6) for version in range(1, 7)] == pytest.approx(expected)
