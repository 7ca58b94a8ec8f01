"""Where the ranks of a learner find one another: at a file on one machine, or at an address of rank 0 on several.

Either way each says that it is there, all wait for all, and torch.distributed joins them through the store they met at.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import stat
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch.distributed as dist

from ..errors import ConfigError, DeadlineExceeded, RankFailed, RollstreamError, RunFolderError
from .ranks import Joined

logger = logging.getLogger(__name__)

_dist: Any = dist
_SILENT_S = 1800.0
"""How long a rank waits for the others in the middle of a run: a checkpoint on a slow disk takes minutes. The death of a process is noticed at once."""
_OWN_S = 30.0
"""How long rank 0 waits for its connection to itself."""
_LOOK_EVERY_S = 0.05
_ADDRESS = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})")
_STOP = "stop"


class Meeting(Protocol):
    """A place where ranks met: the store they share, and what tells all of them to stop."""

    store: Any

    def ask_to_stop(self) -> None:
        """Tells every rank to stop."""

    @property
    def asked_to_stop(self) -> bool:
        """Whether a rank was asked to."""
        ...

    def close(self) -> None:
        """Gives up what is held for it."""


def join(folder: Path, rank: int, num: int, *, device: str, timeout_s: float, meet: str | None = None, run_id: str = "") -> Joined:
    """Waits until all ``num`` ranks are there, and joins them: gloo for what lies on the CPU, nccl for what lies on a GPU.

    Without ``meet`` they meet through a file in ``folder``, private to this user (and the run), and then talk over the loopback interface. Rank 0 makes a new
    file for each start and holds a lock while it lives, so that nobody joins what a killed learner left behind. With ``meet``, ``HOST:PORT``, rank 0 listens
    at that address and nowhere else, and all talk over the interface that leads there; ranks of another ``run_id`` stay strangers.

    Raises :class:`DeadlineExceeded` naming the ranks that did not come within ``timeout_s``; :class:`RunFolderError` where another rank 0 lives, or the folder
    is not ours; :class:`ConfigError` where rank 0 cannot listen at ``meet``.
    """
    until = _Deadline(rank, num, time.monotonic() + timeout_s, timeout_s)
    meeting: Meeting = _AtFile(folder, until) if meet is None else _AtAddress(meet, run_id, until)
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=meeting.store, rank=rank, world_size=num, timeout=timedelta(seconds=_SILENT_S))
    logger.info("event=ranks_joined rank=%d ranks=%d backend=%s at=%s", rank, num, backend, meet or "file")
    return Joined(rank, num, meeting)


@dataclass(frozen=True, slots=True)
class _Deadline:
    """Until when ``rank`` of ``num`` waits for the others."""

    rank: int
    num: int
    at: float
    timeout_s: float

    @property
    def left_s(self) -> float:
        return max(0.01, self.at - time.monotonic())

    def wait(self, store: Callable[[], Any], place: str = "") -> None:
        """Returns once every rank is in the store that ``store`` gives, None while there is none."""
        while True:
            found = store()
            missing = [other for other in range(self.num) if found is None or (other != self.rank and not found.check([f"here-{other}"]))]
            if not missing:
                return
            if time.monotonic() > self.at:
                raise self.missed(missing if found is not None else [0], place)
            time.sleep(_LOOK_EVERY_S)

    def missed(self, missing: list[int], place: str = "") -> DeadlineExceeded:
        """The failure to meet, naming who is ``missing``."""
        who = f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))}"
        return DeadlineExceeded(
            f"{who} of the learner did not come within {self.timeout_s:g} s (learner.policy.start_timeout_s), rank {self.rank} of {self.num} waited{place}: "
            "see the logs of those that are missing, or start them with rollstream learner RUN --rank R"
        )


# --- on one machine -----------------------------------------------------------------------------------------------------------------


class _AtFile:
    """A file in ``folder``."""

    def __init__(self, folder: Path, until: _Deadline) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise RunFolderError(f"{folder} is not a private folder of user {os.getuid()}: remove it, somebody else made it")
        _talk_over(next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None))
        self.store: Any = None
        self._folder, self._until, self._name = folder, until, ""
        self._lock = _lead(folder) if until.rank == 0 else None
        until.wait(self._look)

    def _look(self) -> Any:
        """The store at the newest meeting place, with this rank in it; None while nobody named one."""
        current = _named(self._folder) if self._until.rank else (self._folder / "ranks").read_text(encoding="utf-8")
        if current is not None and current != self._name:
            self._name, self.store = current, _dist.FileStore(str(self._folder / current), self._until.num)
            self.store.set(f"here-{self._until.rank}", str(os.getpid()))
        return self.store

    @property
    def _stop_flag(self) -> Path:
        return (self._folder / self._name).with_suffix(".stop")

    def ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):  # the folder went with the buffer: then everybody is told to stop
            self._stop_flag.touch(mode=0o600)

    @property
    def asked_to_stop(self) -> bool:
        return self._stop_flag.exists()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)


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


# --- on several -----------------------------------------------------------------------------------------------------------------------


class _AtAddress:
    """A TCP store that rank 0 keeps at ``address``."""

    def __init__(self, address: str, run_id: str, until: _Deadline) -> None:
        host, port = host_and_port(address)
        place = f" at {address} (--meet)"
        lost: tuple[type[Exception], ...] = (dist.DistError, RuntimeError)
        timeout = timedelta(seconds=until.left_s)
        if until.rank == 0:
            listening = _listen(host, port)
            _talk_over(_interface_towards(host, port))
            patient = timedelta(seconds=max(until.left_s, _OWN_S))  # its connection to itself is not what it waits for
            server = _dist.TCPStore(host, port, None, True, patient, wait_for_workers=False, master_listen_fd=listening)
            server.set_timeout(timeout)
        else:
            try:
                server = _dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
            except lost:
                raise until.missed([0], place) from None
            _talk_over(_interface_towards(host, port))
        self.store: Any = _dist.PrefixStore(run_id, server)
        self._flag: Any = _dist.PrefixStore(run_id, server.clone())  # its own connection: the other one may be waiting
        try:
            self.store.set(f"here-{until.rank}", "")
            until.wait(lambda: self.store, place)
            server.set_timeout(timedelta(seconds=_SILENT_S))
        except RollstreamError:
            raise
        except lost as error:
            raise RankFailed(f"rank 0 of the learner went away while the ranks met{place} ({' '.join(str(error).split())[:200]})") from None

    def ask_to_stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 is gone: then everybody is told to stop
            self._flag.set(_STOP, "")

    @property
    def asked_to_stop(self) -> bool:
        try:
            return bool(self._flag.check([_STOP]))
        except RuntimeError:  # as above
            return False

    def close(self) -> None:
        pass


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of ``HOST:PORT``. Raises :class:`ConfigError` where it is not that."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise ConfigError(f"--meet {address} must be HOST:PORT, an address of rank 0's machine and a port that is free there, such as 10.0.0.5:5700")
    return found[1].strip("[]"), int(found[2])


def _listen(host: str, port: int) -> int:
    """A socket at that address alone, for the store to listen on."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(where)
            return made.detach()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--meet {host}:{port}: rank 0 cannot listen there ({reason}); give an address of its machine and a port that is free") from None


def _interface_towards(host: str, port: int) -> str | None:
    """The network interface by which this machine reaches ``host``; None where it has no name."""
    with contextlib.suppress(OSError):
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect(where)
            own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(found.address.partition("%")[0] == own for found in addresses):
                return name
    return None


def _talk_over(interface: str | None) -> None:
    """Has gloo and nccl use ``interface``, unless the environment says otherwise."""
    if interface is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)
