"""What the ranks of a learner pull from a real buffer: one header for all, every row once, also when the buffer dies between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streams
from rollstream.buffer.client import LearnerClient
from rollstream.buffer.header import digest_of, header_of
from rollstream.buffer.types import Batch
from rollstream.errors import Refused


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return streams.run_in(tmp_path)


@pytest.fixture
def process(run: Any) -> Iterator[Any]:
    made = streams.ServerProcess(run)
    yield made
    made.kill()


def client(run: Any, rank: int, ranks: int) -> LearnerClient:
    return LearnerClient(run.endpoint, run.run_id, f"learner-{rank}" if rank else "learner", rank=rank, ranks=ranks)


def keys(batch: Batch) -> list[tuple[int, int]]:
    return [(one.key.group_id, one.key.member) for one in batch.trajectories]


def together(shares: list[Batch]) -> list[tuple[int, int]]:
    return sorted(key for share in shares for key in keys(share))


def test_every_rank_gets_the_header_of_the_whole_batch_and_every_row_goes_to_one(run: Any, process: Any) -> None:
    with streams.acting(run), client(run, 0, 1) as alone, client(run, 0, 2) as first, client(run, 1, 2) as second:
        first.hello(0)
        second.hello(None)
        alone.hello(0)
        shares = [streams.pull(first, 1), streams.pull(second, 1)]
        whole = streams.pull(alone, 1)
        assert [header_of(share) == whole.header for share in shares] == [True, True]
        assert len({digest_of(batch) for batch in (whole, *shares)}) == 1
        assert together(shares) == sorted(keys(whole))
        assert abs(len(shares[0].trajectories) - len(shares[1].trajectories)) <= 1, "all are of one length here"
        assert keys(streams.pull(second, 1)) == keys(shares[1]), "pulled again, the same rows"
        by_three = [streams.pull(client_of_three, 1) for client_of_three in _entered(run, 3)]
        assert together(by_three) == sorted(keys(whole)), "the split is computed at the pull"
        with client(run, 2, 2) as third:
            third.hello(None)
            with pytest.raises(Refused, match="rank 2 of 2 asks for its rows"):
                streams.pull(third, 1)


def _entered(run: Any, ranks: int) -> Iterator[LearnerClient]:
    for rank in range(ranks):
        with client(run, rank, ranks) as made:
            made.hello(None)
            yield made


def test_a_batch_assigned_to_rank_0_before_the_buffer_was_killed_is_the_same_for_rank_1_after_it(run: Any, process: Any) -> None:
    with streams.acting(run), client(run, 0, 2) as first, client(run, 1, 2) as second:
        first.hello(0)
        second.hello(None)
        share = streams.pull(first, 1)
        process.kill()
        process.start()
        rest = streams.pull(second, 1)
        assert rest.recorded
        assert digest_of(rest) == digest_of(share)
        assert not set(keys(rest)) & set(keys(share))
        assert len(together([share, rest])) == 2 * streams.GROUP_SIZE
        first.trained(1)
        assert digest_of(streams.pull(second, 2)) == digest_of(streams.pull(first, 2)), "and so is the next one, whoever asks first"
