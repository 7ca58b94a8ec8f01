"""Ray as a run uses it: the cluster it joins, or the Ray that is started on this machine for it alone and ended with it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from typing import Any

from .configs.schema import RayLauncher as Settings
from .errors import ConfigError, RoleFailed

_OBJECTS_BYTES = 100_000_000
"""Of a Ray that is started for the run alone: nothing goes through its object store."""
_STARTS = 2
"""Ray gives up on a node whose helpers take more than 15 s to start, as they may on a busy machine."""
_KNOCK_S = 5.0
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How every HTTP/2 connection begins (RFC 9113, 3.4), and so gRPC, which Ray speaks: the preface and an empty SETTINGS frame, answered by another."""
_SETTINGS = 4


class Session:
    """A connection to Ray, from :meth:`open` to :meth:`close`."""

    def __init__(self, ray: Any, settings: Settings, run_id: str) -> None:
        self.ray, self._settings = ray, settings
        self._quiet = {"log_to_driver": False, "logging_level": "ERROR", "namespace": f"rollstream-{run_id}"}
        self._own: Path | None = None
        self._connected = False

    def open(self, needs: Sequence[dict[str, float]]) -> None:
        """Joins the cluster that the settings name, or starts a Ray with as much declared as the roles' ``needs`` add up to.

        Raises :class:`ConfigError` where no cluster can be joined, or this machine can never have room; :class:`RoleFailed` where Ray does not start.
        """
        if self.ray.is_initialized():  # the caller's own, and its to end
            return
        with _signals_kept():
            if self._settings.address is None:
                self._start(needs)
            else:
                self._join(self._settings.address)
        self._connected = True

    def close(self) -> None:
        """Leaves the cluster as it was, or ends the Ray that was started."""
        if self._connected:
            with suppress(Exception):  # the cluster may be gone
                self.ray.shutdown()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def _join(self, address: str) -> None:
        try:
            _knock(address)
            self.ray.init(address=address, **self._quiet)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            remedy = "start one (ray start --head), or leave the address out"
            if "ersion mismatch" in reason:
                remedy = "run the very Python and Ray of the cluster here, and on every node"
            elif "Failed to connect to Ray cluster" in reason:  # and yet it answered the knock
                remedy = (
                    "if it asks for a token, as one does that was started where ray get-auth-token prints one, set RAY_AUTH_MODE=token here and on every node"
                )
            elif "raylet addresses" in reason or "ray start" in reason:
                remedy = f"make this machine part of it first (ray start --address={address}), with 0 CPUs if nothing is to run here"
            raise ConfigError(f"launcher.address {address}: no Ray cluster can be joined there ({reason[:300]}); {remedy}") from None

    def _start(self, needs: Sequence[dict[str, float]]) -> None:
        total = {name: sum(need.get(name, 0.0) for need in needs) for need in needs for name in need}
        if self._settings.strategy == "STRICT_SPREAD" and len(needs) > 1:
            raise ConfigError(
                f"launcher.strategy STRICT_SPREAD wants a node for each of {len(needs)} roles, and without launcher.address there is this machine "
                "alone: use PACK, or the address of a cluster"
            )
        custom = {name: amount for name, amount in total.items() if name not in ("CPU", "GPU", "memory")}
        self._own = Path(tempfile.mkdtemp(prefix="ray-", dir=_short_folder()))
        options = {"num_cpus": ceil(total.get("CPU", 0.0)), "resources": custom, "object_store_memory": _OBJECTS_BYTES}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray nobody asked for by name tells nobody
        for attempt in range(1, _STARTS + 1):
            try:
                self.ray.init(address="local", include_dashboard=False, _temp_dir=str(self._own), **options, **self._quiet)
                break
            except Exception as error:  # Ray raises no narrower one
                self.ray.shutdown()
                if attempt == _STARTS:
                    raise RoleFailed(f"Ray could not be started on this machine: {' '.join(str(error).split())[:300]}") from error
        self._connected = True
        there = self.ray.cluster_resources()
        for name, key in (("GPU", "gpus"), ("memory", "custom.memory")):
            if total.get(name, 0.0) > there.get(name, 0.0):
                raise ConfigError(
                    f"the roles need {total[name]:g} {name} in all (launcher.ROLE.{key}), this machine has {there.get(name, 0.0):g}: lower them, or give "
                    "launcher.address, that of a cluster"
                )


@contextmanager
def _signals_kept() -> Generator[None]:
    """Ray takes SIGTERM for itself when it starts: it is given back to whoever had it. The terminal's end is not for Ray's own processes, but for us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # those that Ray starts meanwhile inherit this
    try:
        yield
    finally:
        for number, former in zip(numbers, before, strict=True):
            signal.signal(number, former)


def _knock(address: str) -> None:
    """Ray itself would go on asking for minutes. Raises :class:`OSError` where nobody listens who could be Ray."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S) as door:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        door.settimeout(_KNOCK_S)
        try:
            door.sendall(_HELLO)
            answer = door.recv(9, socket.MSG_WAITALL)
        except TimeoutError:
            answer = b""
    if len(answer) < 4 or answer[3] != _SETTINGS:
        raise ConnectionError("what listens there is not Ray")


def _short_folder() -> str | None:
    """Where Ray's own sockets fit: their paths are limited to 107 bytes, and a user's temporary folder may be long."""
    return None if len(tempfile.gettempdir()) <= 24 else "/tmp"
