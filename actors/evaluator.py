"""The evaluator: an actor whose leases say ``eval`` and pin a version, which it plays with exactly those weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

from ..buffer.retention import find_retained
from ..envs import registry
from ..errors import WeightsGone
from .loop import Actor, build_sampler

if TYPE_CHECKING:
    import threading

    from ..buffer.wire import Lease
    from ..configs.run_folder import Run
    from ..configs.schema import Actors, Config
    from .rollout import Renderers
    from .sampler import Sampler

logger = logging.getLogger(__name__)

_NICENESS = 10
_FIND_S = 3.0
"""How long the weights of a lease are looked for; then it goes back, to be leased again once the learner has them."""
_LOOK_S = 0.05


def evaluate(run: Run, evaluator_id: str, stop: threading.Event) -> None:
    """Runs one evaluator until the buffer says that the run ends, or ``stop`` is set.

    Consumes: leases to evaluate, and for each the weights of the very version it pins, which the learner keeps in the weights channel.
    Waits for: a lease (a version that is due); before another version, the end of all it plays with the one it holds; environments.
    Released by: the learner's progress.
    Produces: trajectories, every token of one version.

    It runs at low priority: where it shares cores with actors and learner, they come first. It fails as an actor does (:func:`rollstream.actors.loop.act`).
    """
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    registry.load_imports(run.config.imports)
    for env_id in run.config.evaluated_envs():
        registry.spec_of(env_id)
    sampler, renderers = build_sampler(run, run.config.evaluators())
    asyncio.run(Evaluator(run, evaluator_id, sampler, renderers).run(stop))


class Evaluator(Actor):
    """One evaluator. ``num_pinned`` groups are being played with the version that the sampler holds."""

    role = "evaluator"

    def __init__(self, run: Run, actor_id: str, sampler: Sampler, renderers: Renderers) -> None:
        super().__init__(run, actor_id, sampler, renderers)
        self.folder = run.weights_folder
        self.num_pinned = 0
        self.digest = ""
        """Of the weights that the sampler holds."""

    @staticmethod
    def plays(config: Config) -> tuple[Actors, dict[str, dict[str, Any]], int]:
        """How it plays, the arguments of its environments by their ids, and in groups of how many."""
        assert config.evaluation is not None
        return config.evaluators(), config.evaluated_envs(), config.evaluation.samples

    def tasks(self) -> dict[str, int]:
        """None: evaluations have no cursor."""
        return {}

    async def ready(self) -> None:
        """Leases may come at once: each says which weights it needs."""

    async def play_group(self, lease: Lease) -> None:
        """Plays the members that a lease names with its version; gives it back unplayed where the learner does not keep that version now."""
        self.awaited[lease.group_id] = lease.admit_version
        pinned = await self.pin(lease)
        del self.awaited[lease.group_id]
        if pinned:
            await self.play_members(lease)
            async with self.loaded:
                self.num_pinned -= 1
                self.loaded.notify_all()
        else:
            self.leave_unplayed(lease)
            logger.warning("group=%d version=%d played=false reason=%s", lease.group_id, lease.admit_version, "its weights are not kept now")
        self.client.finish(lease.group_id)

    async def pin(self, lease: Lease) -> bool:
        """Returns once the sampler holds exactly the lease's version, to stay while the group is played; False where that version is not to be had."""
        wanted = (lease.lineage, lease.admit_version)
        async with self.loaded:
            await self.loaded.wait_for(lambda: self.num_pinned == 0 or (self.sampler.held == wanted and self.digest == lease.digest))
            if self.sampler.held != wanted or self.digest != lease.digest:
                if not await self.fetch(lease):
                    return False
                self.loaded.notify_all()
            self.num_pinned += 1
            return True

    async def fetch(self, lease: Lease) -> bool:
        """Loads the version of a lease; False where it is not found in time, or was made again with other weights."""
        for _ in range(int(_FIND_S / _LOOK_S)):
            manifest = find_retained(self.folder, lease.lineage, lease.admit_version)
            if manifest is not None and manifest.digest == lease.digest:
                with contextlib.suppress(WeightsGone):  # the learner let go of it just as it was opened
                    await self.load(manifest)
                    self.digest = manifest.digest
                    return True
            await asyncio.sleep(_LOOK_S)
        return False
