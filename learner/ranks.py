"""The ranks of a learner: W processes that hold one policy together, and what they tell one another.

Tensors of the policy are PyTorch's business. Everything else that ranks must agree on (is this the same batch, did anybody fail, must we stop) is small, and
crosses by one primitive, :meth:`Ranks.exchange`: every rank gives some bytes and gets those of all, in the order of the ranks, so that all of them decide
alike. With one rank it gives back what it was given.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import time
import uuid
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..errors import ConfigError, DeadlineExceeded, RankFailed, RollstreamError, RunFolderError, describe

logger = logging.getLogger(__name__)

_dist: Any = dist
_SILENT_S = 1800.0
"""How long a rank waits for the others in the middle of a run: a checkpoint on a slow disk takes minutes. The death of a process is noticed at once."""
_LOOK_EVERY_S = 0.05
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
        told = [] if error is None else [describe(error), getattr(error, "exit_code", 1)]
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


def failed(rank: int, message: str, exit_code: int) -> RankFailed:
    """The failure of another rank, as this one raises it."""
    error = RankFailed(f"rank {rank} of the learner: {message}")
    error.exit_code = exit_code
    return error


class Joined(Ranks):
    """One of several ranks, joined through torch.distributed. ``place`` is the file they met at; ``lock`` is what rank 0 holds while it lives."""

    def __init__(self, rank: int, num: int, place: Path, lock: int | None) -> None:
        self.rank, self.num, self.joined = rank, num, True
        self._stop_flag, self._lock = place.with_suffix(".stop"), lock

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
        with contextlib.suppress(OSError):  # the folder went with the buffer: then everybody is told to stop
            self._stop_flag.touch(mode=0o600)

    @property
    def asked_to_stop(self) -> bool:  # noqa: D102 - as Ranks
        return self._stop_flag.exists()

    def close(self) -> None:  # noqa: D102 - as Ranks
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._lock is not None:
            os.close(self._lock)


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


# --- where ranks meet ---------------------------------------------------------------------------------------------------------------


def join(folder: Path, rank: int, num: int, *, device: str, timeout_s: float) -> Joined:
    """Waits until all ``num`` ranks are there, and joins them: gloo for what lies on the CPU, nccl for what lies on a GPU.

    They meet through a file in ``folder``, private to this user (and the run), and then talk over the loopback interface. Rank 0 makes a new file for each
    start and holds a lock while it lives, so that nobody joins what a killed learner left behind.

    Raises :class:`DeadlineExceeded` naming the ranks that did not come within ``timeout_s``; :class:`RunFolderError` where another rank 0 lives, or the folder
    is not ours.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunFolderError(f"{folder} is not a private folder of user {os.getuid()}: remove it, somebody else made it")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)
    lock = _lead(folder) if rank == 0 else None
    place, store = _meet(folder, rank, num, time.monotonic() + timeout_s, timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num, timeout=timedelta(seconds=_SILENT_S))
    logger.info("event=ranks_joined rank=%d ranks=%d backend=%s", rank, num, backend)
    return Joined(rank, num, place, lock)


def _lead(folder: Path) -> int:
    """Takes the lock of rank 0 and names a new meeting place."""
    lock = os.open(folder / "ranks.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    for _ in range(20):  # the others try this lock too, for an instant, to see whether rank 0 lives
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(_LOOK_EVERY_S)
    else:
        os.close(lock)
        raise RunFolderError("rank 0 of this run's learner lives already: stop it first")
    for path in folder.glob("ranks-*"):
        path.unlink(missing_ok=True)
    temporary = folder / "ranks.tmp"
    temporary.write_text(f"ranks-{uuid.uuid4().hex}", encoding="utf-8")
    temporary.replace(folder / "ranks")
    return lock


def _named(folder: Path) -> str | None:
    """The meeting place that a living rank 0 named; None where there is none."""
    try:
        lock = os.open(folder / "ranks.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(FileNotFoundError):
            return (folder / "ranks").read_text(encoding="utf-8")
        return None
    finally:
        os.close(lock)
    return None


def _meet(folder: Path, rank: int, num: int, deadline: float, timeout_s: float) -> tuple[Path, Any]:
    """The file at which all ranks found one another, and the store in it."""
    name: str | None = None
    store: Any = None
    while True:
        current = _named(folder) if rank else (folder / "ranks").read_text(encoding="utf-8")
        if current is not None and current != name:
            name, store = current, _dist.FileStore(str(folder / current), num)
            store.set(f"here-{rank}", str(os.getpid()))
        missing = [other for other in range(num) if store is None or (other != rank and not store.check([f"here-{other}"]))]
        if not missing and name is not None:
            return folder / name, store
        if time.monotonic() > deadline:
            who = "rank 0" if store is None else f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))}"
            raise DeadlineExceeded(
                f"{who} of the learner did not come within {timeout_s:g} s (learner.policy.start_timeout_s), rank {rank} of {num} waited: "
                "see the logs of those that are missing, or start them with rollstream learner RUN --rank R"
            )
        time.sleep(_LOOK_EVERY_S)


def refuse_a_lonely_rank(rank: int, num: int) -> None:
    """Raises :class:`ConfigError` for a rank the configuration does not have."""
    if not 0 <= rank < num:
        raise ConfigError(f"--rank {rank}: the learner has {num} {'ranks' if num > 1 else 'rank'} (learner.policy.ranks), counted from 0")
