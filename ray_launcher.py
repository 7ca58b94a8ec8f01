"""The launcher ``ray``: the roles on a Ray cluster, each in a bundle of one placement group.

A bundle holds a keeper (``ray_keeper``), a Ray actor, and the keeper the role's process. A process that dies is started again by its keeper; a keeper
that dies, alone or with its node, is made anew in its bundle, for which Ray finds another node where one has room. The one door to ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from .configs.run_folder import Run
from .configs.schema import RayLauncher as Settings
from .errors import MissingExtra
from .processes import Role
from .ray_places import Places
from .ray_process import RayProcess
from .ray_session import Session


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
        self._run, self._settings = run, settings
        self._ray: Any = load_ray()
        self._session = Session(self._ray, settings, run.run_id)
        self._places: Places | None = None
        self._processes: list[RayProcess] = []
        self._told = False

    def __enter__(self) -> Self:
        return self

    def processes(self, roles: Sequence[Role]) -> list[RayProcess]:
        """A handle per role, and one placement group with a bundle for each. Nothing waits: the processes say that they are being placed."""
        places = Places(self._ray, self._run, self._settings, roles)
        self._session.open(places.bundles)
        self._places = places
        places.reserve()
        self._processes = [RayProcess(places, role, index) for index, role in enumerate(roles)]
        return self._processes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.close()
        if self._places is not None:
            self._places.release()
        self._session.close()

    def reach(self) -> Run | None:
        """The run, with the buffer's node in its address where it listens for other machines; None until that node is known."""
        return self._places.reach() if self._places is not None else None

    def news(self) -> list[str]:
        """What happened since the last call, for people: where the roles were placed."""
        news: list[str] = []
        where = [process.where for process in self._processes]
        if not self._told and where and all(where):
            self._told = True
            nodes = dict.fromkeys(where)
            if len(nodes) > 1:
                lists = {node: ", ".join(process.role.name for process in self._processes if process.where == node) for node in nodes}
                news.append(f"placed on {len(nodes)} nodes: {'; '.join(f'{node}: {names}' for node, names in lists.items())}")
        return news + (self._places.news() if self._places is not None else [])
