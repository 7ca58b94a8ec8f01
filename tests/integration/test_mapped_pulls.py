"""A learner beside the buffer reads the rows of a batch from the log's files: the same rows as one they are sent to, wherever they lie."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

import streams
from rollstream.buffer.client import ActorClient, LearnerClient
from rollstream.buffer.columns import SCHEMA_MESSAGE
from rollstream.buffer.log_files import RunFiles
from rollstream.buffer.types import Batch, Trajectory
from rollstream.errors import Refused


async def _play_together(run: Any) -> None:
    """Four groups whose appends hold members of several of them; a batch takes two."""
    async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
        client.credit(4)
        leases = [await client.next_lease() for _ in range(4)]
        for member in range(streams.GROUP_SIZE):
            made = [streams.play(lease, member, 30 + 7 * member) for lease in leases]
            await asyncio.gather(*(client.append(_in_two_segments(one) if member == 1 else one) for one in made))
        for lease in leases:
            client.finish(lease.group_id)


def _in_two_segments(trajectory: Trajectory) -> Trajectory:
    return msgspec.structs.replace(trajectory, segments=(*trajectory.segments, *trajectory.segments))


def _content(batch: Batch) -> Any:
    rows = [[(segment.token_ids.tolist(), segment.behaviour_logprobs.tolist()) for segment in one.segments] for one in batch.trajectories]
    plain = [msgspec.structs.replace(one, segments=()) for one in batch.trajectories]
    return batch.groups, batch.header, plain, rows


def _pulled(run: Any, folder: Path | None, *, rank: int = 0, ranks: int = 1, version: int = 1) -> Any:
    with LearnerClient(
        run.endpoint, run.run_id, f"learner-{rank}", rank=rank, ranks=ranks, files=None if folder is None else RunFiles(folder, run.blobs_folder)
    ) as learner:
        learner.hello(None)
        return _content(streams.pull(learner, version))


def test_rows_read_from_the_log_are_those_that_would_be_sent(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path, depth=3, max_lag=3)
    with streams.serving(run):
        asyncio.run(_play_together(run))
        with LearnerClient(run.endpoint, run.run_id) as learner:
            learner.hello(0)
            assert _content(streams.pull(learner, 1)) == _pulled(run, run.stream_folder)
            for rank in range(3):
                assert _pulled(run, run.stream_folder, rank=rank, ranks=3) == _pulled(run, None, rank=rank, ranks=3)
            learner.trained(1)
        assert _pulled(run, run.stream_folder, version=2) == _pulled(run, None, version=2)


def test_a_header_made_while_rows_came_is_the_one_made_from_rows_read_back(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path, depth=3, max_lag=3)
    with streams.serving(run):
        asyncio.run(_play_together(run))
        fresh = _pulled(run, run.stream_folder)
    with streams.serving(run):
        assert _pulled(run, run.stream_folder) == fresh, "this buffer knows the rows from its log alone"


def test_a_learner_that_does_not_find_the_files_is_sent_the_rows(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path, depth=3, max_lag=3)
    with streams.serving(run):
        asyncio.run(_play_together(run))
        assert _pulled(run, tmp_path / "elsewhere") == _pulled(run, None)


def test_rows_damaged_in_the_log_are_refused_and_never_trained(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path, depth=3, max_lag=3)
    with streams.serving(run):
        asyncio.run(_play_together(run))
        (segment,) = run.stream_folder.glob("*.arrows")
        data = bytearray(segment.read_bytes())
        for place in range(len(SCHEMA_MESSAGE) + 300, len(data), 500):
            data[place] ^= 1
        with segment.open("r+b") as file:  # in place, as a failing disk would
            file.write(data)
        with pytest.raises(Refused, match="checksum"):
            _pulled(run, run.stream_folder)
