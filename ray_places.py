"""Where the roles of a run live on a Ray cluster: one placement group with a bundle for each, the keepers in them, and who may live where."""

from __future__ import annotations

import tempfile
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import __version__
from .configs.learner_schema import FsdpPolicy
from .configs.run_folder import Run
from .configs.schema import RayLauncher as Settings
from .configs.schema import Resources
from .errors import ConfigError
from .processes import Role
from .ray_keeper import Keeper, Place, Started, end, place_of

_EVERYWHERE = ("tcp://0.0.0.0:", "tcp://[::]:")
_CALLS = 4
"""Methods of a keeper that may run at once: one of them waits."""
_END_S = 20.0
"""How long the end of a process whose keeper is gone may take: a worker has to start for it."""


class Places:
    """The places of one run's ``roles``, by their index."""

    def __init__(self, ray: Any, run: Run, settings: Settings, roles: Sequence[Role]) -> None:
        self.ray, self.run, self.settings, self.roles = ray, run, settings, roles
        self.here = place_of(run)
        self.address: str | None = None
        """Where the buffer is, once it was placed, where it listens on every interface of its node."""
        self._group: Any = None
        self._makers: list[Any] = []
        self._ranks: dict[int, tuple[str, Place]] = {}
        self._news: list[str] = []

    # --- the placement group --------------------------------------------------------------------------------------------------------

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What each role asks for, as Ray names it."""
        return [self._bundle(role) for role in self.roles]

    def reserve(self) -> None:
        """Asks for the placement group; nothing waits for it. Raises :class:`ConfigError` where Ray does not take what the roles ask for."""
        bundles = self.bundles
        try:
            self._group = self.ray.util.placement_group(bundles, strategy=self.settings.strategy)
            self._makers = [self._maker(index, bundle) for index, bundle in enumerate(bundles)]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"launcher: Ray does not take these resources ({' '.join(str(error).split())[:300]}); change launcher.ROLE") from None

    def release(self) -> None:
        """Gives all places back."""
        if self._group is not None:
            with suppress(Exception):  # the cluster may be gone
                self.ray.util.remove_placement_group(self._group)

    def _bundle(self, role: Role) -> dict[str, float]:
        need = self._resources(role)
        bundle = {"CPU": need.cpus, "GPU": need.gpus, **need.custom}
        return {name: amount for name, amount in bundle.items() if amount > 0} or {"CPU": 0.001}  # Ray knows no empty bundle

    def _resources(self, role: Role) -> Resources:
        kinds = {"buffer": self.settings.buffer, "learner": self.settings.learner, "actor": self.settings.actor, "evaluator": self.settings.evaluator}
        return kinds.get(role.kind, self.settings.learner)

    def _maker(self, index: int, bundle: dict[str, float]) -> Any:
        where = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
        return self.ray.remote(Keeper).options(
            num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), memory=bundle.get("memory"), resources=custom,
            max_concurrency=_CALLS, max_restarts=0, scheduling_strategy=where,
        )  # fmt: skip

    def keeper(self, index: int) -> Any:
        """A new keeper in a bundle; Ray makes it once the bundle has a node."""
        environment = {"TMPDIR": tempfile.gettempdir()} if self.run.config.buffer.endpoint == "ipc" else {}
        return self._makers[index].remote(self.run.folder, self.run.run_id, __version__, self.roles[index], Path.cwd(), environment)

    def node_of(self, index: int) -> tuple[str, str]:
        """Id and address of the node that holds a bundle; empty where none does."""
        table = self.ray.util.placement_group_table(self._group)
        node_id = str(table["bundles_to_node_id"].get(index, ""))
        return node_id, next((str(node["NodeManagerAddress"]) for node in self.ray.nodes() if node["NodeID"] == node_id), "")

    def lives(self, node_id: str) -> bool:
        """Whether a node is still part of the cluster."""
        return any(node["NodeID"] == node_id and node["Alive"] for node in self.ray.nodes())

    def end(self, node_id: str, started: Started) -> None:
        """Ends, on its node, a process whose keeper is gone and which nobody will start again."""
        with suppress(Exception):  # the node may be gone by now, and the process with it, or the cluster
            if not self.lives(node_id):
                return
            there = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
            self.ray.get(self.ray.remote(end).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(started), timeout=_END_S)

    # --- who is where ---------------------------------------------------------------------------------------------------------------

    def reach(self) -> Run | None:
        """The run, with the buffer's node in its address where it listens for other machines; None until that node is known."""
        if not self._listens_everywhere:
            return self.run
        return replace(self.run, address=self.address) if self.address is not None else None

    @property
    def _listens_everywhere(self) -> bool:
        return self.run.config.buffer.endpoint.startswith(_EVERYWHERE)

    def placed(self, role: Role, address: str, place: Place) -> str | None:
        """Takes in where a role was placed; gives the reason where it cannot be there, None where it can."""
        if role.kind == "learner":
            self._ranks[role.rank] = address, place
        if role.kind != "buffer" or not self._listens_everywhere:
            return None
        found = f"tcp://{_in_brackets(address)}:{self.run.config.buffer.endpoint.rpartition(':')[2]}"
        if self.address not in (None, found):
            return f"it is at {found} now, and the others know it at {self.address}: go on with --resume"
        self.address = found
        return None

    def ready_for(self, role: Role) -> bool:
        """Whether all is known that ``role`` has to be told at its start: where the buffer is, and where ranks meet."""
        if role.kind == "buffer":
            return True
        return self.reach() is not None and (role.kind != "learner" or len(self._ranks) == sum(other.kind == "learner" for other in self.roles))

    def meeting(self) -> str | None:
        """``HOST:PORT`` at which the ranks of the learner meet, once all have a place: loopback where they share it, else the address of rank 0's node.

        None for a policy that one process holds.
        """
        if not isinstance(self.run.config.learner.policy, FsdpPolicy) or 0 not in self._ranks:
            return None
        address, first = self._ranks[0]
        together = all(place.network == first.network for _, place in self._ranks.values())
        return f"{'127.0.0.1' if together else _in_brackets(address)}:{first.meeting_port}"

    def refusal(self, role: Role, place: Place) -> str | None:
        """Why ``role`` cannot do its work in ``place``; None where it can."""
        if place.problem:
            return f"node {place.host} {place.problem}"
        endpoint = self.run.config.buffer.endpoint
        if endpoint == "ipc" and place.sockets != self.here.sockets:
            return f"node {place.host} does not share this machine's sockets: with buffer.endpoint ipc everything runs on one; use {_reachable()}"
        if not self.run.needs_keys and endpoint != "ipc" and place.network != self.here.network:
            return f"node {place.host} cannot reach buffer.endpoint {endpoint}, this machine's loopback; use {_reachable()}"
        publishes_or_reads = role.kind != "buffer" and not role.rank
        if self.run.config.weights.channel == "shm" and publishes_or_reads and place.memory != self.here.memory:
            return f"node {place.host} does not share this machine's memory: use weights.channel=files, with the run on a file system that all nodes share"
        return None

    # --- in words -------------------------------------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """Adds to the news."""
        self._news.append(text)

    def news(self) -> list[str]:
        """What was told since the last call."""
        told, self._news = self._news, []
        return told

    def no_room(self) -> str:
        """What the roles need and what the cluster has."""
        needs: dict[str, list[str]] = {}
        for role, bundle in zip(self.roles, self.bundles, strict=True):
            needs.setdefault(_words(bundle), []).append(role.name)
        wanted = "; ".join(f"{', '.join(names)}: {need}{' each' if len(names) > 1 else ''}" for need, names in needs.items())
        asked = {name for bundle in self.bundles for name in bundle}
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        there = "; ".join(f"{node['NodeManagerAddress']}: {_words(node['Resources'], asked)}" for node in nodes)
        free = _words(self.ray.available_resources(), asked)
        return f"needed, {self.settings.strategy}: {wanted}; {len(nodes)} nodes have: {there}; free in all: {free}"


def _in_brackets(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _words(resources: dict[str, float], asked: Container[str] | None = None) -> str:
    """``CPU 2, GPU 0.5``: all of it, or what was ``asked`` for, without what Ray counts for itself."""
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items()) if asked is None or name in asked) or "none of it"


def _reachable() -> str:
    return "buffer.endpoint=tcp://0.0.0.0:PORT"
