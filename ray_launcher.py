"""The launcher ``ray``: the roles on a Ray cluster, each in a bundle of one placement group.

A bundle holds a keeper (``ray_keeper``), a Ray actor, and the keeper the role's process. A process that dies is started again by its keeper; a keeper
that dies, alone or with its node, is made anew in its bundle, for which Ray finds another node where one has room. The one door to ray.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from . import __version__
from .configs.run_folder import Run
from .configs.schema import RayLauncher as Settings
from .configs.schema import Resources
from .errors import ConfigError, MissingExtra, RoleFailed, describe
from .processes import Death, Role
from .ray_keeper import Keeper, Place, Started, place_of

_OBJECTS_BYTES = 100_000_000
"""Of a Ray that is started for the run alone: nothing goes through its object store."""
_KILL_S = 5.0
"""How long a process that was ended by force may take to be told; its node does not answer then."""
_EVERYWHERE = ("tcp://0.0.0.0:", "tcp://[::]:")
_KNOCK_S = 5.0
_CALLS = 4
"""Methods of a keeper that may run at once: one of them waits."""


def load_ray() -> Any:
    """The library. Raises :class:`MissingExtra` where it is not installed."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("launcher.kind ray needs ray: pip install 'rollstream[ray]', on every node") from None
    return ray


class RayLauncher:
    """The roles live on the cluster that ``launcher.address`` names, or on a Ray that this process starts and ends."""

    def __init__(self, run: Run, settings: Settings) -> None:
        self.run, self.settings = run, settings
        self.ray: Any = load_ray()
        self.here = place_of(run)
        self.address: str | None = None
        """Where the buffer is, once it was placed, where it listens on every interface of its node."""
        self._group: Any = None
        self._own: Path | None = None
        self._connected = False
        self._processes: list[RayProcess] = []
        self._roles: Sequence[Role] = ()
        self._news: list[str] = []
        self._told = False

    # --- the cluster ----------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def processes(self, roles: Sequence[Role]) -> list[RayProcess]:
        """A handle per role, and one placement group with a bundle for each. Nothing waits: the processes say that they are being placed."""
        self._roles = roles
        self._connect()
        bundles = [self._bundle(role) for role in roles]
        self._group = self.ray.util.placement_group(bundles, strategy=self.settings.strategy)
        self._processes = [RayProcess(self, role, index) for index, role in enumerate(roles)]
        return self._processes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.close()
        if self._connected:
            with suppress(Exception):  # the cluster may be gone
                if self._group is not None:
                    self.ray.util.remove_placement_group(self._group)
            self.ray.shutdown()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def reach(self) -> Run | None:
        """The run, with the buffer's node in its address where it listens for other machines; None until that node is known."""
        if not self._listens_everywhere:
            return self.run
        return replace(self.run, address=self.address) if self.address is not None else None

    @property
    def _listens_everywhere(self) -> bool:
        return self.run.config.buffer.endpoint.startswith(_EVERYWHERE)

    def placed(self, role: Role, address: str) -> str | None:
        """Takes in where a role was placed; gives the reason where it cannot be there, None where it can."""
        if role.kind != "buffer" or not self._listens_everywhere:
            return None
        host = f"[{address}]" if ":" in address else address
        found = f"tcp://{host}:{self.run.config.buffer.endpoint.rpartition(':')[2]}"
        if self.address not in (None, found):
            return f"it is at {found} now, and the others know it at {self.address}: go on with --resume"
        self.address = found
        return None

    def news(self) -> list[str]:
        """What happened since the last call, for people: where the roles were placed."""
        where = [process.where for process in self._processes]
        if not self._told and where and all(where):
            self._told = True
            nodes = dict.fromkeys(where)
            if len(nodes) > 1:
                lists = {node: ", ".join(process.role.name for process in self._processes if process.where == node) for node in nodes}
                self._news.append(f"placed on {len(nodes)} nodes: {'; '.join(f'{node}: {names}' for node, names in lists.items())}")
        told, self._news = self._news, []
        return told

    def tell(self, text: str) -> None:
        """Adds to the news."""
        self._news.append(text)

    def _connect(self) -> None:
        settings, quiet = self.settings, {"log_to_driver": False, "logging_level": "ERROR", "namespace": f"rollstream-{self.run.run_id}"}
        if self.ray.is_initialized():  # the caller's own, and its to end
            return
        if settings.address is None:
            needs = [self._resources(role) for role in self._roles]
            custom = {name: sum(need.custom.get(name, 0.0) for need in needs) for need in needs for name in need.custom}
            self._own = Path(tempfile.mkdtemp(prefix="ray-", dir=_short_folder()))
            options = {"num_cpus": ceil(sum(need.cpus for need in needs)), "resources": custom, "object_store_memory": _OBJECTS_BYTES}
            self._start_own(include_dashboard=False, _temp_dir=str(self._own), **options, **quiet)
        else:
            try:
                _knock(settings.address)
                self.ray.init(address=settings.address, **quiet)
            except (OSError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                remedy = "start one (ray start --head), or leave the address out"
                raise ConfigError(f"launcher.address {settings.address}: no Ray cluster can be joined there ({reason}); {remedy}") from None
        self._connected = True

    def _start_own(self, **options: Any) -> None:
        try:
            self.ray.init(address="local", **options)
        except Exception as error:  # Ray raises no narrower one
            raise RoleFailed(f"Ray could not be started on this machine: {' '.join(str(error).split())[:300]}") from error

    def _resources(self, role: Role) -> Resources:
        return {"buffer": self.settings.buffer, "learner": self.settings.learner, "actor": self.settings.actor, "evaluator": self.settings.evaluator}[role.kind]

    def _bundle(self, role: Role) -> dict[str, float]:
        need = self._resources(role)
        bundle = {"CPU": need.cpus, "GPU": need.gpus, **need.custom}
        return {name: amount for name, amount in bundle.items() if amount > 0} or {"CPU": 0.001}  # Ray knows no empty bundle

    # --- places ---------------------------------------------------------------------------------------------------------------------

    def keeper(self, role: Role, index: int) -> Any:
        """A new keeper in the bundle of ``role``; Ray makes it once the bundle has a node."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        environment = {"TMPDIR": tempfile.gettempdir()} if self.run.config.buffer.endpoint == "ipc" else {}
        bundle = self._bundle(role)
        options = {
            "num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0), "resources": bundle, "max_concurrency": _CALLS, "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
        }  # fmt: skip
        return self.ray.remote(Keeper).options(**options).remote(self.run.folder, self.run.run_id, __version__, role, Path.cwd(), environment)

    def node_of(self, index: int) -> tuple[str, str]:
        """Id and address of the node that holds a bundle; empty where none does."""
        table = self.ray.util.placement_group_table(self._group)
        node_id = str(table["bundles_to_node_id"].get(index, ""))
        return node_id, next((str(node["NodeManagerAddress"]) for node in self.ray.nodes() if node["NodeID"] == node_id), "")

    def lives(self, node_id: str) -> bool:
        """Whether a node is still part of the cluster."""
        return any(node["NodeID"] == node_id and node["Alive"] for node in self.ray.nodes())

    def refusal(self, role: Role, place: Place) -> str | None:
        """Why ``role`` cannot do its work in ``place``; None where it can."""
        if place.problem:
            return f"node {place.host} {place.problem}"
        endpoint = self.run.config.buffer.endpoint
        if endpoint == "ipc" and place.sockets != self.here.sockets:
            return f"node {place.host} does not share this machine's sockets: with buffer.endpoint ipc everything runs on one; use {_reachable()}"
        if not self.run.needs_keys and endpoint != "ipc" and place.network != self.here.network:
            return f"node {place.host} cannot reach buffer.endpoint {endpoint}, this machine's loopback; use {_reachable()}"
        if self.run.config.weights.channel == "shm" and role.kind != "buffer" and place.memory != self.here.memory:
            return f"node {place.host} does not share this machine's memory: use weights.channel=files, with the run on a file system that all nodes share"
        return None

    def no_room(self) -> str:
        """What the roles need and what the cluster has, in words."""
        needs: dict[str, list[str]] = {}
        for role in self._roles:
            needs.setdefault(_words(self._bundle(role)), []).append(role.name)
        wanted = "; ".join(f"{', '.join(names)}: {need}{' each' if len(names) > 1 else ''}" for need, names in needs.items())
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        there = "; ".join(f"{node['NodeManagerAddress']}: {_words(node['Resources'])}" for node in nodes)
        return f"needed, {self.settings.strategy}: {wanted}; {len(nodes)} nodes have: {there}; free in all: {_words(self.ray.available_resources())}"


class RayProcess:
    """A role on the cluster, as the supervisor holds it."""

    def __init__(self, launcher: RayLauncher, role: Role, index: int) -> None:
        self.role = role
        self.num_starts = 0
        self.cpu_s = 0.0
        self.where = ""
        """Address of the node it was placed on last."""
        self._launcher, self._index = launcher, index
        self._keeper: Any = None
        self._node_id = ""
        self._answer: Any = None
        self._stage: Literal["placing", "starting", "running"] = "placing"
        self._started: Started | None = None
        self._since = 0.0
        self._overdue_told = False
        self._asked_to_end = False
        self._killed_at: float | None = None

    @property
    def alive(self) -> bool:
        """True from the start until its end was told."""
        return self._answer is not None

    @property
    def doing(self) -> str:
        """``placing`` while no node has room for it."""
        return "placing" if self.alive and self._stage == "placing" else ""

    def start(self) -> None:
        """Starts it where its keeper is, or has a keeper placed first."""
        self.num_starts += 1
        self._since, self._overdue_told, self._asked_to_end, self._killed_at = time.monotonic(), False, False, None
        if self._keeper is None:
            self._stage, self._node_id, self._keeper = "placing", "", self._launcher.keeper(self.role, self._index)
        else:
            self._stage = "starting"
        self._ask()

    def _ask(self) -> None:
        """Has the keeper do what the stage says. It may be asked again: the second time it tells what it did the first."""
        if self._stage == "placing":
            self._answer = self._keeper.place.remote()
        elif self._stage == "starting":
            address = self._launcher.address if self.role.kind != "buffer" else None
            self._answer = self._keeper.start.remote(self.num_starts, address, self._started)
        else:
            self._answer = self._keeper.wait.remote()

    def poll(self) -> Death | None:
        """How it ended, once; None while it runs, or is being placed, and after that."""
        if self._answer is None:
            return None
        if self._stage == "placing" and self._asked_to_end:
            self._let_go()
            return self._death(0, "ended before it had a place")
        ray = self._launcher.ray
        if not ray.wait([self._answer], timeout=0)[0]:
            return self._overdue()
        try:
            found: Any = ray.get(self._answer)
        except ray.exceptions.RayTaskError as error:
            self._answer = None
            return self._death(1, describe(error.cause))
        except ray.exceptions.ActorUnavailableError:  # cut off for now: it comes back, or is told dead
            self._ask()
            return None
        except ray.exceptions.RayError as error:
            return self._lost(error)
        return self._take(found)

    def _take(self, found: Any) -> Death | None:
        if isinstance(found, Place):
            refusal = self._launcher.refusal(self.role, found)
            if refusal is not None:
                self._let_go()
                return self._death(2, refusal)
            self._node_id, self.where = self._launcher.node_of(self._index)
            refusal = self._launcher.placed(self.role, self.where)
            if refusal is not None:
                self._let_go()
                return self._death(2, refusal)
            if self.role.kind != "buffer" and self._launcher.reach() is None:
                self._ask()  # until the buffer has a place
                return None
            if self.num_starts > 1:
                self._launcher.tell(f"{self.role.name} has a place again, on node {self.where}")
            self._stage = "starting"
            self._ask()
        elif isinstance(found, Started):
            self._started, self._stage = found, "running"
            self._ask()
        else:
            death, cpu_s = found
            self._answer = self._started = None
            self.cpu_s += cpu_s
            return death
        return None

    def terminate(self) -> None:
        """Asks it to stop in order."""
        self._asked_to_end = True
        if self.alive and self._stage != "placing":
            self._keeper.terminate.remote()

    def abort(self, reason: str) -> None:
        """Ends it, stuck as it is, with a trace of where it was."""
        if self.alive and self._stage != "placing":
            self._keeper.abort.remote(reason)

    def kill(self) -> None:
        """Ends it and everything it started, at once."""
        self._asked_to_end = True
        if self.alive and self._killed_at is None:
            self._killed_at = time.monotonic()
            self._keeper.kill.remote()

    def close(self) -> None:
        """Gives its place back."""
        self._let_go()

    def _overdue(self) -> Death | None:
        """What a wait that is too long means: no room in the cluster, or a node that does not answer."""
        now, bound_s = time.monotonic(), self._launcher.settings.placement_timeout_s
        if self._killed_at is not None and now - self._killed_at > _KILL_S:
            self._let_go()
            return self._death(1, f"its node {self.where} did not answer")
        if self._stage != "placing" or now - self._since < bound_s or self._overdue_told:
            return None
        if self.role.kind in ("actor", "evaluator") and self.where:  # the others go on without it, and nodes come back
            self._overdue_told = True
            self._launcher.tell(f"{self.role.name} waits for room in the cluster; {self._launcher.no_room()}")
            return None
        self._let_go()
        return self._death(2, f"no room in the cluster within launcher.placement_timeout_s {bound_s:g}; {self._launcher.no_room()}")

    def _lost(self, error: Exception) -> Death:
        """The keeper is gone: with its node, alone, or it could not even be made."""
        text = " ".join(str(error).split())
        self._answer = self._keeper = None
        if "No module named 'rollstream'" in text:
            return self._death(2, "its node has no rollstream: install the same version on every node (pip install the wheel)")
        if "node has died" in text or (self._node_id and not self._launcher.lives(self._node_id)):
            self._started = None
            return self._death(1, f"its node {self.where} is gone".replace("  ", " "))
        if not self._node_id:
            return self._death(1, f"its keeper could not be made: {text[:300]}")
        return self._death(1, f"its keeper on node {self.where} died: {text[:300]}")

    def _let_go(self) -> None:
        keeper, self._keeper, self._answer = self._keeper, None, None
        if keeper is not None:
            with suppress(Exception):  # it may be gone, and the cluster with it
                self._launcher.ray.kill(keeper, no_restart=True)

    def _death(self, exit_code: int, message: str) -> Death:
        return Death(self.role.name, exit_code, message, time.monotonic() - self._since, exit_code=exit_code or 1)


def _knock(address: str) -> None:
    """Ray itself would go on asking for minutes. Raises :class:`OSError` where nobody listens."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()


def _words(resources: dict[str, float]) -> str:
    """``CPU 2, GPU 0.5``: what a person declared, without what Ray counts for itself."""
    shown = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "memory", "object_store_memory")) and "_group_" not in name}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "nothing"


def _reachable() -> str:
    return "buffer.endpoint=tcp://0.0.0.0:PORT"


def _short_folder() -> str | None:
    """Where Ray's own sockets fit: their paths are limited to 107 bytes, and a user's temporary folder may be long."""
    return None if len(tempfile.gettempdir()) <= 24 else "/tmp"
