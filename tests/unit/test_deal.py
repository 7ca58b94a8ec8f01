"""The header of a batch, and how its rows are split over ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rollstream.buffer.columns import Rows, encode
from rollstream.buffer.deal import costs, deal
from rollstream.buffer.header import assemble, digest_of, entries, header_of
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.configs.learner_schema import Advantage


def segment(length: int, sampled: str, starts: tuple[int, ...] = (0,), versions: tuple[int, ...] = (3,)) -> Segment:
    mask = np.array([int(flag) for flag in sampled], np.uint8)
    assert len(mask) == length
    return Segment(
        np.arange(length, dtype=np.int32), mask, np.where(mask, -1.0, 0.0).astype(np.float32), np.array(starts, np.int32), np.array(versions, np.int32),
        np.zeros(1, np.int32), ("assistant",), (None,),
    )  # fmt: skip


def trajectory(group: int, member: int, *segments: Segment, **changes: Any) -> Trajectory:
    made = Trajectory(TrajectoryKey(0, group, member, 0), "env", 0, 0, "train", segments, 1.0, "terminated", "terminated", env_metrics={"success": 1.0})
    return msgspec.structs.replace(made, **changes)


TWO_RUNS = segment(6, "011011", (0, 3), (2, 5))
PLAIN = segment(4, "0011")
BATCH = Batch(
    0,
    4,
    (7, 3),
    (
        trajectory(7, 0, TWO_RUNS, PLAIN),
        trajectory(7, 1, PLAIN, reward=None, status="failed", stop_reason="env"),
        trajectory(3, 0, segment(3, "000"), PLAIN, reward=0.0),
        trajectory(3, 1, segment(5, "01111"), reward=0.0, status="truncated", stop_reason="length"),
    ),
    frozenset({(3, 0)}),
)


def test_a_header_counts_what_was_sampled_in_each_run_of_each_segment() -> None:
    header = header_of(BATCH)
    assert list(zip(header.group_ids, header.members, strict=True)) == [(7, 0), (7, 1), (3, 0), (3, 1)], "in the order of the batch"
    assert header.segment_counts == [2, 1, 2, 1]
    assert header.segment_tokens == [6, 4, 4, 3, 4, 5]
    assert (header.run_counts, header.run_versions, header.run_sampled) == ([2, 1, 1, 1, 1, 1], [2, 5, 3, 3, 3, 3, 3], [2, 2, 2, 2, 0, 2, 4])
    assert header.rewards == [1.0, None, 0.0, 0.0]
    assert header.env_metrics[0] == {"success": 1.0}


def test_a_header_does_not_depend_on_the_order_of_rows_in_the_log() -> None:
    backwards = entries(Rows(encode(BATCH.trajectories[::-1])))
    assert assemble(backwards, BATCH.groups) == header_of(BATCH)


def test_the_digest_tells_batches_apart_by_anything_that_decides_the_step() -> None:
    same = msgspec.structs.replace(BATCH, trajectories=BATCH.trajectories[:1], header=header_of(BATCH))
    assert digest_of(same) == digest_of(BATCH), "whatever rows a rank holds"
    others = (msgspec.structs.replace(BATCH, withheld=frozenset()), msgspec.structs.replace(BATCH, lineage=1), msgspec.structs.replace(BATCH, version=5))
    assert len({digest_of(batch) for batch in (BATCH, *others)}) == 4


def test_trajectories_cost_what_the_model_computes_for_them() -> None:
    header = header_of(BATCH)
    assert costs(header, BATCH.withheld, Advantage(), "keep") == [10, 0, 0, 5]
    assert costs(header, frozenset(), Advantage(), "keep") == [10, 0, 4, 5], "a segment in which nothing was sampled is not computed"
    assert costs(header, frozenset(), Advantage(truncated="mask"), "keep") == [10, 0, 4, 0]
    assert costs(header, frozenset(), Advantage(), "mask") == [0, 0, 0, 0], "one scored member, and equal rewards"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_get_every_trajectory_once_and_about_as_many_tokens(ranks: int) -> None:
    tokens = [int(length) for length in np.random.default_rng(0).integers(0, 5000, 200)]
    shares = deal(tokens, ranks)
    assert sorted(index for share in shares for index in share) == list(range(200))
    loads = [sum(tokens[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens)
    assert deal(tokens, ranks) == shares


def test_trajectories_that_cost_nothing_are_spread_too() -> None:
    assert deal([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]
    assert deal([5], 2) == [[0], []], "more ranks than trajectories leave one with nothing"
