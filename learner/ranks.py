"""The ranks of a learner: W processes that hold one policy together, and what they tell one another.

Tensors of the policy are PyTorch's business. Everything else that ranks must agree on (is this the same batch, did anybody fail, must we stop) is small, and
crosses by one primitive, :meth:`Ranks.exchange`: every rank gives some bytes and gets those of all, in the order of the ranks, so that all of them decide
alike. With one rank it gives back what it was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..errors import ConfigError, RankFailed, RollstreamError, describe

if TYPE_CHECKING:
    from .meeting import Meeting

_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out waiting", "socket timeout", "application timeout")
"""What a collective says whose other end is gone."""


class Ranks:
    """One process that learns alone, and the interface of several that learn together: ``rank`` of ``num``."""

    rank = 0
    num = 1
    joined = False
    """Whether torch.distributed joins them; also a single rank may be."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which speaks for the learner."""
        return self.rank == 0

    def exchange(self, data: bytes) -> list[bytes]:
        """Gives ``data`` to every rank; returns what each gave, in the order of the ranks. Every rank calls it."""
        return [data]

    def largest(self, values: list[int]) -> list[int]:
        """The largest of each value over the ranks."""
        given = [msgspec.msgpack.decode(data, type=list[int]) for data in self.exchange(msgspec.msgpack.encode([int(value) for value in values]))]
        return [max(column) for column in zip(*given, strict=True)]

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """``values`` ``[n]`` of every rank, in float64 on the device they came from; ``n`` may differ."""
        sent = values.detach().to("cpu", torch.float64).contiguous()
        return [torch.frombuffer(bytearray(data), dtype=torch.float64).to(values.device) if data else sent[:0] for data in self.exchange(_bytes_of(sent))]

    def add(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sum of ``values`` over the ranks, added in their order."""
        return np.sum([part.numpy() for part in self.gather(torch.from_numpy(values))], axis=0)

    def check(self, error: Exception | None) -> None:
        """Raises on every rank where any has an ``error``: its own, or :class:`RankFailed` with that of the first rank that has one."""
        told = [] if error is None else [describe(error), getattr(error, "exit_code", 1), getattr(error, "waits_for_space", False)]
        given = [msgspec.msgpack.decode(data) for data in self.exchange(msgspec.msgpack.encode(told))]
        if error is not None:
            raise error
        for rank, failure in enumerate(given):
            if failure:
                raise failed(rank, *failure)

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """What is done inside ends well on every rank or raises on every rank. Nothing inside may wait for another rank after a failure of its own."""
        error: Exception | None = None
        try:
            yield
        except Exception as failure:  # noqa: BLE001 - told to the others, then raised
            error = failure
        self.check(error)

    def ask_to_stop(self) -> None:
        """Tells the other ranks that this one was asked to stop, for those that wait elsewhere."""

    @property
    def asked_to_stop(self) -> bool:
        """Whether a rank was asked to stop."""
        return False

    def close(self) -> None:
        """Leaves the others."""


def failed(rank: int, message: str, exit_code: int, waits_for_space: bool = False) -> RankFailed:
    """The failure of another rank, as this one raises it."""
    error = RankFailed(f"rank {rank} of the learner: {message}")
    error.exit_code, error.waits_for_space = exit_code, waits_for_space
    return error


class Joined(Ranks):
    """One of several ranks, joined through torch.distributed after their ``meeting``."""

    def __init__(self, rank: int, num: int, meeting: Meeting) -> None:
        self.rank, self.num, self.joined = rank, num, True
        self._meeting = meeting

    def exchange(self, data: bytes) -> list[bytes]:  # noqa: D102 - as Ranks
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        longest = max(int(length) for length in lengths)
        if longest == 0:
            return [b""] * self.num
        given = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.num)]
        dist.all_gather(found, given)
        return [bytes(part.numpy())[: int(length)] for part, length in zip(found, lengths, strict=True)]

    def ask_to_stop(self) -> None:  # noqa: D102 - as Ranks
        self._meeting.ask_to_stop()

    @property
    def asked_to_stop(self) -> bool:  # noqa: D102 - as Ranks
        return self._meeting.asked_to_stop

    def close(self) -> None:  # noqa: D102 - as Ranks
        if dist.is_initialized():
            dist.destroy_process_group()
        self._meeting.close()


def _bytes_of(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


@contextlib.contextmanager
def naming_the_lost(ranks: Ranks) -> Generator[None]:
    """Raises :class:`RankFailed` where a collective inside failed because another rank is gone: that one's own error says why."""
    try:
        yield
    except RollstreamError:
        raise
    except RuntimeError as error:
        gone = isinstance(error, dist.DistError) or any(words in str(error).lower() for words in _LOST)
        if ranks.num == 1 or not gone:
            raise
        raise RankFailed(f"another rank of the learner is gone, rank {ranks.rank} cannot go on without it ({' '.join(str(error).split())[:200]})") from error


def refuse_a_lonely_rank(rank: int, num: int) -> None:
    """Raises :class:`ConfigError` for a rank the configuration does not have."""
    if not 0 <= rank < num:
        raise ConfigError(f"--rank {rank}: the learner has {num} {'ranks' if num > 1 else 'rank'} (learner.policy.ranks), counted from 0")
