"""Every family of models the learner is meant for: packing changes nothing, a step trains, and a sampler can hold what is published."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from families import FAMILIES, SHAPE, folder_of
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

pytestmark = pytest.mark.usefixtures("one_thread")


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
