"""Several updates per batch, and the presets, on recorded batches."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollstream import models
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.buffer.wire import Evaluations, Retained, StatusReply, Welcome
from rollstream.configs.checks import check_config
from rollstream.configs.learner_schema import Alarms, Learner
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config
from rollstream.errors import ConfigError
from rollstream.learner.loop import learn_from
from rollstream.learner.optimizer import adamw
from rollstream.learner.policy import Policy
from rollstream.learner.step import Gradients, Stepper, Work
from rollstream.learner.updates import split, train_batch

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS, MEMBERS = 4, 3


def config_of(*overrides: str) -> Config:
    small = ["warmup=", "model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}", f"learner.batch_groups={GROUPS}"]
    return load_config("quickstart", [*small, f"learner.group_size={MEMBERS}", "learner.alarms.ess_stop=0", "learner.versions=3", *overrides])


def trajectory(version: int, group: int, member: int) -> Trajectory:
    rng = np.random.default_rng([version, group, member])
    length = int(rng.integers(6, 20))
    mask = (rng.random(length) < 0.5).astype(np.uint8)
    mask[0], mask[-1] = 0, 1
    segment = Segment(
        token_ids=rng.integers(0, 200, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, rng.normal(-5.6, 0.2, length), 0.0).astype(np.float32),
        version_starts=np.zeros(1, np.int32),
        version_values=np.array([max(version - 2, 0)], np.int32),
        turn_starts=np.zeros(1, np.int32),
        turn_roles=("assistant",),
        turn_rewards=(None,),
    )
    return Trajectory(TrajectoryKey(0, group, member, 0), "env", 0, 0, "train", (segment,), float(rng.random()), "terminated", "terminated")


def batch(version: int) -> Batch:
    groups = tuple(range(version * GROUPS, version * GROUPS + GROUPS))
    return Batch(0, version, groups, tuple(trajectory(version, group, member) for group in groups for member in range(MEMBERS)))


class Recording:
    """Recorded batches in the place of the buffer; pulling after ``last`` finds the run stopped."""

    def __init__(self, last: int = 10**9) -> None:
        self.last, self.version = last, 0

    def hello(self, version: int, lineage: int, vocabulary: int) -> Welcome:
        return Welcome(0, version)

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
        return batch(version) if version <= self.last else None

    def trained(self, version: int) -> None:
        self.version = version

    def published(self, version: int, digest: str) -> str:
        return ""

    def sync(self) -> None:
        return

    def retained(self, statement: Retained) -> Evaluations:
        raise AssertionError("this run evaluates nothing")

    def status(self) -> StatusReply:
        return StatusReply(0, self.version, {}, {}, [], "")


def train(folder: Path, *overrides: str, last: int = 10**9) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, config_of(*overrides), f"test-{folder}")
    learn_from(run, Recording(last), threading.Event())
    newest = max(run.checkpoints_folder.iterdir())
    return [json.loads(line) for line in run.metrics_path.read_text().splitlines()], load_file(newest / "model" / "model.safetensors")


def made(folder: Path, *overrides: str) -> tuple[Stepper, Work]:
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, config_of(*overrides), f"test-{folder}")
    model = models.load_policy(models.prepare_model(run))
    stepper = Stepper(Policy(model), adamw(model.named_parameters(), [], rate=1e-2), run.config)
    return stepper, stepper.prepare(batch(1))


@pytest.mark.parametrize("preset", get_args(Learner.model_fields["preset"].annotation))
@pytest.mark.parametrize("updates", ["{}", "{mini_batches: 2, epochs: 2}"])
def test_every_preset_trains_the_quickstart_with_one_and_with_several_updates(tmp_path: Path, preset: str, updates: str) -> None:
    rows, weights = train(tmp_path / "run", f"learner.preset={preset}", f"learner.updates={updates}", "learner.versions=2")
    assert [row["optim/updates"] for row in rows] == ([1, 1] if updates == "{}" else [4, 4])
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_a_resume_with_several_updates_is_bit_exact(tmp_path: Path) -> None:
    several = ("learner.preset=grpo", "learner.updates={mini_batches: 3, epochs: 2}")
    expected, expected_weights = train(tmp_path / "whole", *several)
    train(tmp_path / "stopped", *several, last=1)
    rows, weights = train(tmp_path / "stopped", *several)

    def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in row.items() if name.startswith(("loss/", "optim/", "train/"))} for row in rows]

    assert numbers(rows) == numbers(expected)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in expected_weights.items())


def test_updates_share_what_the_batch_decided_and_count_their_own_tokens(tmp_path: Path) -> None:
    stepper, work = made(tmp_path, "learner.preset=grpo", "learner.updates={mini_batches: 3, epochs: 2}")
    shares = split(stepper, work, (0, 1))
    assert len(shares) == 6
    for epoch in (shares[:3], shares[3:]):
        assert (sum(share.plan.mask.astype(int) for share in epoch) == work.plan.mask).all(), "each token once an epoch"
    groups = work.flat.rows.groups[work.flat.rows.row_trajectory]
    for share in shares:
        live = share.plan.row_counts > 0
        assert set(groups[live]).isdisjoint(groups[~live]), "whole groups"
        assert (share.plan.row_advantage == work.plan.row_advantage).all()
        assert (share.plan.row_weight * share.plan.row_counts).sum() == pytest.approx(1.0), "token_mean over the mini-batch's own tokens"
    assert any((one.plan.mask != other.plan.mask).any() for one, other in zip(shares[:3], shares[3:], strict=True)), "dealt anew"


def test_proximal_logprobs_are_of_the_weights_the_batch_started_with(tmp_path: Path) -> None:
    stepper, work = made(tmp_path, "learner.preset=grpo", "learner.updates={mini_batches: 2, epochs: 2}")
    with torch.no_grad():
        before = {int(at): float(x) for one in work.micro_batches for at, x in zip(one.scored, stepper.policy.logprobs(one, 1.0)[0], strict=True)}
    seen: list[Gradients] = []
    differentiate = stepper.differentiate

    def watched(share: Work) -> Gradients:
        for one in share.micro_batches:
            assert one.tokens.prox is not None
            assert one.tokens.prox.tolist() == pytest.approx([before[int(at)] for at in one.scored], abs=1e-6)
        seen.append(differentiate(share))
        return seen[-1]

    stepper.differentiate = watched  # type: ignore[method-assign]
    done = train_batch(stepper, work, 1, Alarms(ess_stop=0.0), lambda: None)
    assert done.num_updates == 4
    assert seen[0].metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5), "nothing moved before the first update"
    assert all(later.metrics["ratio_max"] > 1.001 for later in seen[1:])
    assert done.gradients.metrics["active_tokens"] == 2 * work.plan.active_tokens
    assert len({later.metrics["is_mean"] for later in seen}) > 1
    assert done.gradients.metrics["ratio_mean"] == pytest.approx(
        sum(one.metrics["ratio_mean"] * one.metrics["active_tokens"] for one in seen) / done.gradients.metrics["active_tokens"]
    )


def test_one_update_is_the_step_without_any_splitting(tmp_path: Path) -> None:
    stepper, work = made(tmp_path / "one", "learner.preset=grpo")
    other, same = made(tmp_path / "other", "learner.preset=grpo")
    done = train_batch(stepper, work, 1, Alarms(ess_stop=0.0), lambda: None)
    gradients = other.differentiate(same)
    update = other.update(1, gradients)
    assert done.gradients.metrics == gradients.metrics
    assert done.update.grad_norm == update.grad_norm
    pairs = zip(stepper.policy.model.parameters(), other.policy.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_a_batch_without_signal_makes_one_skipped_update(tmp_path: Path) -> None:
    stepper, work = made(tmp_path, "learner.updates={mini_batches: 2, epochs: 2}")
    nothing = dataclasses.replace(work.plan, mask=np.zeros_like(work.plan.mask), row_counts=np.zeros_like(work.plan.row_counts), skip=True)
    done = train_batch(stepper, stepper.pack(work.flat, nothing), 1, Alarms(), lambda: None)
    assert (done.num_updates, done.update.stepped, done.gradients.skip) == (0, False, True)


def test_milestones_that_no_checkpoint_would_meet_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep_every 70 is not a multiple of learner\.checkpoint\.every 50.*use 100"):
        check_config(config_of("learner.checkpoint.keep_every=70"))


def test_more_mini_batches_than_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mini_batches 9 is larger than learner\.batch_groups 4"):
        check_config(config_of("learner.updates.mini_batches=9"))


@pytest.mark.parametrize("preset", ["async", "grpo"])
def test_bfloat16_with_checkpointed_activations_trains_and_resumes_bit_for_bit(tmp_path: Path, preset: str) -> None:
    settings = (f"learner.preset={preset}", "learner.policy={compute_dtype: bfloat16, activation_checkpointing: true}")
    rows, expected = train(tmp_path / "whole", *settings)
    train(tmp_path / "stopped", *settings, last=2)
    _, weights = train(tmp_path / "stopped", *settings)
    assert [row["optim/updates"] for row in rows] == [1, 1, 1]
    assert all(tensor.dtype == torch.float32 for tensor in expected.values()), "what is saved and published are the master weights"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in expected.items())
