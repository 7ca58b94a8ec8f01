"""Packing: what is fed, what is scored, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.configs.learner_schema import Advantage, Loss
from rollstream.errors import DataRefused
from rollstream.learner.attention import layout_of
from rollstream.learner.collate import MicroBatch, bins_of, flatten, pack
from rollstream.learner.plan import plan


def segment(tokens: list[int], mask: list[int], *, versions: dict[int, int] | None = None) -> Segment:
    versions = versions or {0: 4}
    return Segment(
        token_ids=np.array(tokens, np.int32),
        loss_mask=np.array(mask, np.uint8),
        behaviour_logprobs=np.where(np.array(mask), -np.array(tokens) / 100, 0).astype(np.float32),
        version_starts=np.array(list(versions), np.int32),
        version_values=np.array(list(versions.values()), np.int32),
        turn_starts=np.array([0], np.int32),
        turn_roles=("assistant",),
        turn_rewards=(None,),
    )


def trajectory(*segments: Segment, group: int = 0, member: int = 0, reward: float | None = 0.0) -> Trajectory:
    return Trajectory(TrajectoryKey(0, group, member, 0), "env", 0, 0, "train", segments, reward, "terminated", "terminated")


def batch(*trajectories: Trajectory, version: int = 5) -> Batch:
    return Batch(0, version, (0,), trajectories)


TWO_TURNS = segment([10, 11, 12, 13, 14, 15, 16, 17], [0, 0, 1, 1, 0, 0, 1, 0])
ONE_TURN = segment([20, 21, 22], [0, 1, 1])
PAIR = batch(trajectory(TWO_TURNS, reward=1.0), trajectory(ONE_TURN, member=1))


def packed(recorded: Batch, budget: int = 100, degenerate: str = "keep", max_lag: int = 4) -> list[MicroBatch]:
    flat = flatten(recorded, max_lag)
    return pack(flat, plan(flat.rows, Loss(agg="token_mean"), Advantage(mode="mean"), degenerate), budget)  # type: ignore[arg-type]


def test_each_trained_token_is_scored_by_the_one_before_it() -> None:
    (one,) = packed(PAIR)
    ids = one.input_ids[0]
    assert list(zip(ids[one.source].tolist(), one.targets.tolist(), strict=True)) == [(11, 12), (12, 13), (15, 16), (20, 21), (21, 22)]
    assert one.tokens.mu is not None
    assert one.tokens.mu.tolist() == pytest.approx([-0.12, -0.13, -0.16, -0.21, -0.22])
    assert one.tokens.row.tolist() == [0, 0, 0, 1, 1]
    assert one.tokens.adv.tolist() == pytest.approx([0.5] * 3 + [-0.5] * 2)


def test_nothing_is_fed_that_no_trained_token_needs() -> None:
    (one,) = packed(PAIR)
    assert one.input_ids.tolist() == [[10, 11, 12, 13, 14, 15, 20, 21]]
    assert one.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    assert (one.cu_seqlens.tolist(), one.max_length) == ([0, 6, 8], 6)


def test_a_trajectory_without_a_trained_token_is_not_fed() -> None:
    withheld = replace(PAIR, withheld=frozenset({(0, 0)}))
    (one,) = packed(withheld)
    assert one.input_ids.tolist() == [[20, 21]]
    assert one.tokens.adv.tolist() == pytest.approx([-0.5] * 2), "it stays in the baseline"
    assert one.tokens.agg.tolist() == pytest.approx([0.5] * 2), "and leaves the denominator"
    assert packed(replace(PAIR, withheld=frozenset({(0, 0), (0, 1)}))) == []


def test_weights_are_global_however_the_batch_is_split() -> None:
    whole, split = packed(PAIR), packed(PAIR, budget=6)
    assert (len(whole), len(split)) == (1, 2)
    assert sorted(weight for one in split for weight in one.tokens.agg.tolist()) == sorted(whole[0].tokens.agg.tolist()) == pytest.approx([0.2] * 5)


def test_segments_of_one_trajectory_are_rows_of_their_own() -> None:
    (one,) = packed(batch(trajectory(TWO_TURNS, ONE_TURN, reward=1.0), trajectory(ONE_TURN, member=1)))
    assert one.tokens.num_rows == 3
    assert one.tokens.row_trajectory is not None
    assert one.tokens.row_trajectory.tolist() == [0, 0, 1]
    assert one.tokens.names == ["group 0 member 0", "group 0 member 0", "group 0 member 1"]


def test_lag_counts_from_the_version_the_learner_holds() -> None:
    old = segment([1, 2, 3, 4], [0, 1, 0, 1], versions={0: 1, 2: 0, 3: 3})
    flat = flatten(batch(trajectory(old)), max_lag=4)
    decided = plan(flat.rows, Loss(), Advantage(), "keep")
    assert decided.staleness is not None
    assert (decided.staleness.max, decided.staleness.mean) == (3, 2), "version 4 is held; token 2, of version 0, was not sampled"


def test_a_token_beyond_the_bound_never_trains() -> None:
    old = trajectory(segment([1, 2, 3], [0, 1, 1], versions={0: 0}), member=2)
    (one,) = packed(replace(PAIR, trajectories=(*PAIR.trajectories, old)), max_lag=3)
    assert one.tokens.num_rows == 2


def test_bins_hold_the_budget_and_every_row_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 60, rng.integers(1, 80))
        bins = bins_of(lengths, 64)
        assert sorted(np.concatenate(bins).tolist()) == list(range(len(lengths)))
        assert all(lengths[rows].sum() <= 64 for rows in bins)
        assert sum(lengths[rows].sum() <= 32 for rows in bins) <= 1, "two half-empty bins would have been one"


def test_a_row_above_the_budget_gets_a_bin_of_its_own() -> None:
    assert [rows.tolist() for rows in bins_of(np.array([5, 200, 6]), 64)] == [[1], [0, 2]]


def test_rectangles_hold_every_token_once_and_little_padding() -> None:
    lengths = np.random.default_rng(1).integers(1, 300, 200)
    layout = layout_of(lengths)
    cells = sum(rows * width for rows, width in layout.rectangles)
    assert len(layout.gather) == cells <= lengths.sum() * 1.25
    assert layout.gather[layout.inverse].tolist() == list(range(lengths.sum()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.7}, r"group 0 member 1 was sampled at temperature 0\.7, others of its batch at 1"),
        ({"top_p": 0.9}, r"group 0 member 1 was sampled with top_p 0\.9"),
        ({"top_k": 3}, r"group 0 member 1 .* top_k 3"),
        ({"segments": (segment([1, 2], [1, 1]),)}, r"group 0 member 1 trains on the first token"),
        ({"segments": (replace(ONE_TURN, behaviour_logprobs=np.array([0, np.nan, -1], np.float32)),)}, r"group 0 member 1 .* nan at token 1"),
        ({"segments": (replace(ONE_TURN, behaviour_logprobs=np.array([0, -1, 0.5], np.float32)),)}, r"log-probability 0\.5 at token 2"),
        ({"reward": float("inf")}, r"group 0 member 1"),
        ({"segments": (segment([1, 2], [0, 1], versions={0: 5}),)}, r"newer than the learner at 4"),
    ],
)  # fmt: skip
def test_what_must_not_train_is_refused_by_name(change: dict[str, object], message: str) -> None:
    first, second = PAIR.trajectories
    with pytest.raises(DataRefused, match=message):
        packed(replace(PAIR, trajectories=(first, replace(second, **change))))  # type: ignore[arg-type]


def test_an_unscored_trajectory_is_in_no_baseline_and_does_not_train() -> None:
    third = trajectory(ONE_TURN, member=2, reward=None)
    (one,) = packed(replace(PAIR, trajectories=(*PAIR.trajectories, third)))
    assert one.tokens.num_rows == 2
    assert one.tokens.adv.tolist() == pytest.approx([0.5] * 3 + [-0.5] * 2)
