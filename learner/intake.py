"""Taking a batch in: every rank pulls its rows, and all agree before the first forward pass that they hold the same batch.

After its pull and its plan each rank says what it has: the digest of the batch (identity, withheld members and the whole header), how many micro-batches its
rows make, or why it has none. All get all answers and so decide alike: train; stop, where somebody was told to; pull again, where a pull failed or the ranks
hold different batches (the buffer gives the same one each time); or fail together, with the reason and the rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ..buffer.header import digest_of
from ..buffer.types import Batch
from ..errors import Corrupt, DeadlineExceeded, Refused, RoleFailed, StreamError, describe
from .ranks import failed
from .step import Stepper, Work

logger = logging.getLogger(__name__)

MAX_PULLS = 3
"""How often ranks pull a batch that does not come whole to all of them."""


class Pulls(Protocol):
    """What a batch is pulled from."""

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None: ...  # noqa: D102 - as LearnerClient


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch that every rank holds and is ready to train."""

    batch: Batch
    work: Work
    wait_s: float
    prepare_s: float


class Vote(msgspec.Struct, frozen=True):
    """What a rank says after its pull: ``digest`` is empty where it has no batch, ``error`` where nothing failed; pulling again can cure only ``again``."""

    digest: str = ""
    num_micro_batches: int = 0
    error: str = ""
    exit_code: int = 1
    again: bool = False


def take(source: Pulls, stepper: Stepper, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Taken | None:
    """The batch that makes ``version``, agreed by all ranks; None where any of them was told to stop.

    Raises what this rank's pull or plan raised; on the others :class:`RankFailed` naming it; :class:`RoleFailed` where the ranks never held the same batch.
    """
    ranks = stepper.policy.ranks

    def waiting(reason: str) -> None:
        on_wait(reason)
        if ranks.asked_to_stop:
            stop.set()

    for attempt in range(1, MAX_PULLS + 1):
        began = time.perf_counter()
        batch: Batch | None = None
        work: Work | None = None
        error: Exception | None = None
        pulled = began
        try:
            batch = source.pull(version, waiting, stop)
            pulled = time.perf_counter()
            if batch is not None:
                work = stepper.plan(batch)
        except Exception as failure:  # noqa: BLE001 - the other ranks hear of it, then it is raised
            error = failure
        if batch is None and error is None:
            ranks.ask_to_stop()
        votes = [msgspec.msgpack.decode(data, type=Vote) for data in ranks.exchange(msgspec.msgpack.encode(_vote(batch, work, error)))]
        if _settled(votes, error, version, last=attempt == MAX_PULLS):
            if batch is None or work is None or not all(vote.digest for vote in votes):
                return None
            work = stepper.even_out(work, max(vote.num_micro_batches for vote in votes))
            return Taken(batch, work, pulled - began, time.perf_counter() - pulled)
        logger.warning("version=%d attempt=%d of=%d pulling_again=%s", version, attempt, MAX_PULLS, "; ".join(_differences(votes)))
    raise AssertionError("the last attempt settles")


def _vote(batch: Batch | None, work: Work | None, error: Exception | None) -> Vote:
    if error is not None:
        again = isinstance(error, Corrupt) or (isinstance(error, StreamError) and not isinstance(error, DeadlineExceeded | Refused))
        return Vote(error=describe(error), exit_code=getattr(error, "exit_code", 1), again=again)
    return Vote() if batch is None or work is None else Vote(digest_of(batch), len(work.micro_batches))


def _settled(votes: list[Vote], error: Exception | None, version: int, *, last: bool) -> bool:
    """Whether there is nothing to pull again: all hold the same batch, or somebody stops. Raises where going on makes no sense."""
    final = any(vote.error and not vote.again for vote in votes)
    if any(vote.error for vote in votes) and (final or last):
        if error is not None:
            raise error
        rank = next(rank for rank, vote in enumerate(votes) if vote.error and (vote.again is not final))
        raise failed(rank, votes[rank].error, votes[rank].exit_code)
    if any(vote.error for vote in votes):
        return False
    held = {vote.digest for vote in votes if vote.digest}
    if len(held) <= 1 or not all(vote.digest for vote in votes):
        return True
    if last:
        raise RoleFailed(f"the ranks hold different batches for version {version}, pulled {MAX_PULLS} times ({'; '.join(_differences(votes))}): report this")
    return False


def _differences(votes: list[Vote]) -> list[str]:
    return [f"rank {rank} {vote.error or vote.digest[:12]}" for rank, vote in enumerate(votes)]
