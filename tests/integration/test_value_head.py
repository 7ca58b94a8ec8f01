"""The value head over whole runs on recorded batches: it learns, resumes exactly, warms up alone, and goes nowhere it has no business."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.buffer.wire import StatusReply, Welcome
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.errors import ConfigError
from rollstream.learner.checkpoint import newest_checkpoint
from rollstream.learner.loop import learn_from
from rollstream.learner.ranks import Ranks
from rollstream.learner.start import start
from rollstream.learner.tokens import Tokens
from rollstream.learner.value import value_loss

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS, MEMBERS = 4, 2
TINY = "model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}"


def trajectory(version: int, group: int, member: int) -> Trajectory:
    """Rewarded by what its prompt says, which a value can know from the first token on."""
    rng = np.random.default_rng([version, group, member])
    num = int(rng.integers(6, 20))
    mask = np.ones(num, np.uint8)
    mask[:3] = 0
    tokens = rng.integers(0, 200, num).astype(np.int32)
    good = bool(rng.integers(2))
    tokens[:3] = 7 if good else 150
    segment = Segment(
        token_ids=tokens,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, rng.normal(-5.6, 0.2, num), 0.0).astype(np.float32),
        version_starts=np.zeros(1, np.int32),
        version_values=np.array([max(version - 2, 0)], np.int32),
        turn_starts=np.array([0, 3], np.int32),
        turn_roles=("user", "assistant"),
        turn_rewards=(None, float(good)),
    )
    status: Any = "truncated" if member and group % GROUPS == 0 else "terminated"
    return Trajectory(TrajectoryKey(0, group, member, 0), "env", 0, 0, "train", (segment,), float(good), status, "terminated")


class Recording:
    """Recorded batches in the place of the buffer; pulling after ``last`` finds the run stopped."""

    def __init__(self, last: int) -> None:
        self.last, self.version = last, 0

    def hello(self, version: int, lineage: int, vocabulary: int) -> Welcome:
        return Welcome(0, version)

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
        groups = tuple(range(version * GROUPS, version * GROUPS + GROUPS))
        return Batch(0, version, groups, tuple(trajectory(version, group, m) for group in groups for m in range(MEMBERS))) if version <= self.last else None

    def trained(self, version: int) -> None:
        self.version = version

    def published(self, version: int, digest: str) -> str:
        return ""

    def sync(self) -> None:
        return

    def status(self) -> StatusReply:
        return StatusReply(0, self.version, {}, {}, [], "")


def run_of(folder: Path, *overrides: str) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    small = [TINY, "warmup=", f"learner.batch_groups={GROUPS}", f"learner.group_size={MEMBERS}", "learner.alarms.ess_stop=0", "learner.preset=ppo"]
    return Run(folder, load_config("quickstart", [*small, "learner.value.learning_rate=0.01", *overrides]), f"test-{folder}")


def train(folder: Path, *overrides: str, last: int = 10**9) -> tuple[Run, list[dict[str, Any]]]:
    run = run_of(folder, *overrides)
    learn_from(run, Recording(last), threading.Event())
    return run, [json.loads(line) for line in run.metrics_path.read_text().splitlines()]


def saved(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    newest = newest_checkpoint(run.checkpoints_folder)
    assert newest is not None
    return load_file(newest.model_folder / "model.safetensors"), torch.load(newest.folder / "training.pt", weights_only=True)


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name.startswith(("loss/", "optim/", "train/", "value/"))} for row in rows]


@pytest.mark.parametrize("preset", ["ppo", "impala"])
def test_the_value_loss_falls_and_values_come_to_explain_returns(tmp_path: Path, preset: str) -> None:
    run, rows = train(tmp_path, f"learner.preset={preset}", "learner.value.learning_rate=0.05", "learner.versions=16", "learner.checkpoint.every=16")
    first, last = rows[:4], rows[-4:]
    assert np.mean([row["value/loss"] for row in last]) < 0.8 * np.mean([row["value/loss"] for row in first])
    assert rows[0]["value/mean"] == 0
    assert np.mean([row["value/explained_variance"] for row in last]) > (0.2 if preset == "ppo" else 0.0)
    assert all(row["optim/grad_norm"] > 0 and row["value/grad_norm"] > 0 for row in rows)
    assert 0 < rows[-1]["train/advantage_std"] < (1.001 if preset == "ppo" else 10)
    weights, training = saved(run)
    assert not any("value" in name.split(".") or tuple(tensor.shape) == (1, 32) for name, tensor in weights.items()), "the model's folder holds no head"
    assert training["value_head"]["weight"].abs().max() > 0


@pytest.mark.parametrize(
    "settings",
    [
        ("learner.updates={mini_batches: 2, epochs: 2}", "learner.value.value_clip=0.001"),
        ("learner.preset=impala", "learner.policy={compute_dtype: bfloat16, activation_checkpointing: true}", "learner.value.warmup_versions=1"),
    ],
)
def test_a_resume_is_bit_exact_in_policy_head_and_optimiser(tmp_path: Path, settings: tuple[str, ...]) -> None:
    whole, expected = train(tmp_path / "whole", *settings, "learner.versions=4")
    train(tmp_path / "stopped", *settings, "learner.versions=4", last=2)
    stopped, rows = train(tmp_path / "stopped", *settings, "learner.versions=4")
    assert numbers(rows) == numbers(expected)
    (weights, training), (other_weights, other_training) = saved(whole), saved(stopped)
    assert all(torch.equal(tensor, other_weights[name]) for name, tensor in weights.items())
    assert all(torch.equal(tensor, other_training["value_head"][name]) for name, tensor in training["value_head"].items())
    for index, state in training["optimizer"]["state"].items():
        assert all(torch.equal(value, other_training["optimizer"]["state"][index][name]) for name, value in state.items())
    if "mini_batches" in settings[0]:
        assert any(row["value/clip_share"] > 0 for row in rows), "later updates of a batch meet the clip"


def test_the_head_warms_up_alone_and_the_policy_stays_as_it_is(tmp_path: Path) -> None:
    overrides = ("learner.value.warmup_versions=2", "learner.versions=3", "learner.checkpoint={every: 1, keep_last: 9}")
    run, rows = train(tmp_path, *overrides)
    first, second, third = (load_file(run.checkpoints_folder / f"v{version:06d}" / "model" / "model.safetensors") for version in (0, 2, 3))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, third[name]) for name, tensor in first.items())
    assert [row["optim/grad_norm"] > 0 for row in rows] == [False, False, True]
    assert all(row["value/grad_norm"] > 0 and row["optim/updates"] == 1 for row in rows)
    assert rows[1]["value/mean"] != 0


def test_a_checkpoint_of_a_run_without_a_head_is_refused_for_one_with(tmp_path: Path) -> None:
    train(tmp_path, "learner.preset=grpo", "learner.value=", "learner.versions=1")
    with pytest.raises(ConfigError, match=r"(advantage|value) is .*checkpoint v000001 was trained with"):
        start(run_of(tmp_path), threading.Event(), Ranks())


def test_the_clip_cuts_what_moved_far_towards_its_target_and_nothing_else() -> None:
    values = torch.tensor([0.5, -0.5, 0.05, 9.0], dtype=torch.float64, requires_grad=True)
    tokens = Tokens(
        row=torch.zeros(4, dtype=torch.int64), num_rows=1, mask=torch.tensor([True, True, True, False]), adv=torch.zeros(4), agg=torch.full((4,), 0.25),
        targets=torch.ones(4), values=torch.tensor([0.0, 0.0, 0.0, float("nan")]),
    )  # fmt: skip
    loss, stats = value_loss(values, tokens, 0.2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.125 * (0.8**2 + 1.5**2 + 0.95**2))  # moved towards: as at 0.2; moved away: as it is
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 0.25 * -1.5, 0.25 * -0.95, 0.0])
    assert (int(stats.clipped), stats.tokens) == (1, 3)
    free, _ = value_loss(values, tokens, None)
    assert float(free.detach()) == pytest.approx(0.125 * (0.5**2 + 1.5**2 + 0.95**2))
