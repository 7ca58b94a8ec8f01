"""Each alarm warns or stops as configured, on a real step, before a parameter changes; what was trained before it is checkpointed."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.buffer.wire import StatusReply, Welcome
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.errors import RoleFailed
from rollstream.learner.loop import learn_from

GROUPS, MEMBERS = 3, 4
LAST, SPOILT = 3, 2
"""Versions of a run, and the one whose batch is spoilt."""
OFF = "{ess_warn: null, ess_stop: null, kl_warn: null, kl_stop: null, trust_masked_warn: null, trust_masked_stop: null, invalid_warn: null, invalid_stop: null}"


def make_run(folder: Path, **alarms: float) -> Run:
    tiny = "model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}"
    sizes = (f"learner.batch_groups={GROUPS}", f"learner.group_size={MEMBERS}", f"learner.versions={LAST}", "learner.optimizer.learning_rate=1e-5")
    bounds = [f"learner.alarms.{name}={bound}" for name, bound in alarms.items()]
    folder.mkdir(parents=True, exist_ok=True)
    return Run(folder, load_config("quickstart", ["warmup=null", tiny, *sizes, f"learner.alarms={OFF}", *bounds]), f"test-{folder}")


def batch(version: int) -> Batch:
    def trajectory(group: int, member: int) -> Trajectory:
        rng = np.random.default_rng([version, group, member])
        length = int(rng.integers(8, 20))
        mask = (np.arange(length) >= 3).astype(np.uint8)
        segment = Segment(
            token_ids=rng.integers(0, 200, length).astype(np.int32),
            loss_mask=mask,
            behaviour_logprobs=np.where(mask, -5.6, 0.0).astype(np.float32),
            version_starts=np.zeros(1, np.int32),
            version_values=np.array([version - 1], np.int32),
            turn_starts=np.zeros(1, np.int32),
            turn_roles=("assistant",),
            turn_rewards=(None,),
        )
        return Trajectory(TrajectoryKey(0, group, member, 0), "env", 0, 0, "train", (segment,), float(member % 2), "terminated", "terminated")

    groups = tuple(range(version * GROUPS, version * GROUPS + GROUPS))
    return Batch(0, version, groups, tuple(trajectory(group, member) for group in groups for member in range(MEMBERS)))


def as_if_sampled_elsewhere(recorded: Batch) -> Batch:
    """Every other token was far more probable where it was sampled, the rest far less."""

    def far(trajectory: Trajectory) -> Trajectory:
        segment = trajectory.segments[0]
        spread = np.where(np.arange(segment.num_tokens) % 2, -0.4, -9.0)
        return replace(trajectory, segments=(replace(segment, behaviour_logprobs=np.where(segment.loss_mask, spread, 0.0).astype(np.float32)),))

    return replace(recorded, trajectories=tuple(far(trajectory) for trajectory in recorded.trajectories))


def mostly_failed(recorded: Batch) -> Batch:
    """Two members of each group never got a reward."""
    failed = [
        replace(trajectory, status="failed", stop_reason="env", reward=None, error="the tool is down") if trajectory.key.member < 2 else trajectory
        for trajectory in recorded.trajectories
    ]
    return replace(recorded, trajectories=tuple(failed))


class Recording:
    """Recorded batches in the place of the buffer; that of version ``SPOILT`` is changed."""

    def __init__(self, change: Callable[[Batch], Batch]) -> None:
        self.change = change
        self.trained_versions: list[int] = []

    def hello(self, version: int, lineage: int, vocabulary: int) -> Welcome:
        return Welcome(0, version)

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
        return self.change(batch(version)) if version == SPOILT else batch(version)

    def trained(self, version: int) -> None:
        self.trained_versions.append(version)

    def published(self, version: int, digest: str) -> str:
        return ""

    def sync(self) -> None:
        return

    def status(self) -> StatusReply:
        return StatusReply(0, 0, {}, {}, [], "")


ALARMS = [
    ("ess", 0.5, "loss/ratio_ess", as_if_sampled_elsewhere),
    ("kl", 0.5, "loss/kl_old_k3", as_if_sampled_elsewhere),
    ("trust_masked", 0.1, "loss/trust_masked_frac", as_if_sampled_elsewhere),
    ("invalid", 0.4, "train/invalid_share", mostly_failed),
]
each_alarm = pytest.mark.parametrize(("key", "bound", "figure", "spoil"), ALARMS, ids=[alarm[0] for alarm in ALARMS])


def weights(run: Run, version: int) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoints_folder / f"v{version:06d}" / "model" / "model.safetensors")


def versions(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics_path.read_text().splitlines()]


@each_alarm
def test_a_stop_ends_the_run_before_the_step_and_keeps_the_version_before(
    key: str, bound: float, figure: str, spoil: Callable[[Batch], Batch], tmp_path: Path
) -> None:
    run, source = make_run(tmp_path, **{f"{key}_stop": bound}), Recording(spoil)
    with pytest.raises(RoleFailed) as caught:
        learn_from(run, source, threading.Event())
    line = str(caught.value)
    assert line.startswith(f"version {SPOILT}: {figure} is ")
    assert f"bound learner.alarms.{key}_stop {bound:g}" in line
    assert "--resume" in line
    assert caught.value.exit_code == 1
    assert source.trained_versions == [1]
    assert [row["version"] for row in versions(run)] == [1]
    saved = weights(run, SPOILT - 1)

    resumed = Recording(lambda recorded: recorded)  # the same run, as if the data had been sound: it goes on from the version that was kept
    learn_from(run, resumed, threading.Event())
    assert resumed.trained_versions == [2, 3]
    whole = make_run(tmp_path / "whole")
    learn_from(whole, Recording(lambda recorded: recorded), threading.Event())
    assert all(torch.equal(tensor, weights(whole, LAST)[name]) for name, tensor in weights(run, LAST).items())
    assert any(not torch.equal(tensor, weights(run, LAST)[name]) for name, tensor in saved.items())


@each_alarm
def test_a_warning_names_the_figure_and_the_run_goes_on(
    key: str, bound: float, figure: str, spoil: Callable[[Batch], Batch], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, source = make_run(tmp_path, **{f"{key}_warn": bound}), Recording(spoil)
    with caplog.at_level(logging.WARNING, "rollstream"):
        learn_from(run, source, threading.Event())
    assert source.trained_versions == [1, 2, 3]
    alarms = [record.getMessage() for record in caplog.records if "alarm=" in record.getMessage()]
    assert len(alarms) == 1
    assert alarms[0].startswith(f"version={SPOILT} alarm={figure} value=")
    assert alarms[0].endswith(f"bound={bound:g}")
    value = versions(run)[SPOILT - 1][figure]
    assert f"value={value:.3g} " in alarms[0]


def test_alarms_that_are_off_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rollstream"):
        learn_from(make_run(tmp_path), Recording(lambda recorded: mostly_failed(as_if_sampled_elsewhere(recorded))), threading.Event())
    assert [record.getMessage() for record in caplog.records if "alarm=" in record.getMessage()] == []


def test_a_bound_that_is_met_exactly_is_not_passed(tmp_path: Path) -> None:
    source = Recording(mostly_failed)
    learn_from(make_run(tmp_path, invalid_stop=0.5), source, threading.Event())
    assert source.trained_versions == [1, 2, 3]
