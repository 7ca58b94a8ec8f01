"""The actor: takes leases, plays the episodes of their groups, streams each trajectory as soon as it is finished."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Literal

from ..buffer.channels import subscribe_to
from ..buffer.client import ActorClient
from ..buffer.curve import client_keys
from ..configs.schema import ScriptedSampler as ScriptedConfig
from ..configs.schema import TinyModel
from ..envs import registry
from ..errors import DeadlineExceeded, Refused, StreamError, WeightsGone
from .closings import Closings, GroupClosed
from .env_pool import EnvPool
from .invalid import InvalidShare
from .rollout import Player, Renderers

if TYPE_CHECKING:
    import threading

    from ..buffer.types import Trajectory
    from ..buffer.weights import Manifest
    from ..buffer.wire import Lease
    from ..configs.run_folder import Run
    from ..configs.schema import Actors, Config
    from .sampler import Sampler

logger = logging.getLogger(__name__)

WEIGHTS_POLL_S = 0.002
REPORT_S = 0.5
STOP_POLL_S = 0.05
LEAVE_S = 1.5
"""How long a stopping actor tries to tell the buffer."""


def act(run: Run, actor_id: str, stop: threading.Event) -> None:
    """Runs one actor until the buffer says that the run ends, or ``stop`` is set.

    Consumes: leases from the buffer, weights from the weights channel.
    Waits for: a lease (the buffer's admission); the version a lease asks for (the learner); environments.
    Released by: the learner's progress, which admits leases and publishes versions.
    Produces: trajectories, each appended when it is finished, whole groups first come first served.

    The first failure of any part ends the actor with that failure: weights that cannot be proven (:class:`WeightsError`), environments that fail too
    often (:class:`EnvError`), a buffer that is gone (:class:`DeadlineExceeded`). Leases go back to the buffer in every case.
    """
    registry.load_imports(run.config.imports)
    for env in run.config.envs:
        registry.spec_of(env.id)
    sampler, renderers = build_sampler(run, run.config.actors)
    asyncio.run(Actor(run, actor_id, sampler, renderers).run(stop))


def build_sampler(run: Run, actors: Actors) -> tuple[Sampler, Renderers]:
    """The sampler that ``actors.sampler.kind`` names, and the renderers for its tokenizer. ``scripted`` loads no torch."""
    from .. import models

    model = run.config.model
    bound = actors.sampling.max_trajectory_tokens
    if isinstance(actors.sampler, ScriptedConfig):
        from .scripted_sampler import ScriptedSampler

        tokenizer: Any = (
            models.build_tiny_tokenizer(model.max_positions) if isinstance(model, TinyModel) else models.load_tokenizer(models.check_model_folder(model.path))
        )
        scripted = ScriptedSampler(vocab_size=len(tokenizer), token_delay_s=actors.sampler.token_delay_s, max_tokens=bound)
        return scripted, Renderers(tokenizer)
    from .torch_sampler import TorchSampler

    folder = models.prepare_model(run)
    policy = models.load_policy(folder, device=actors.device)
    tokenizer = models.load_tokenizer(folder)
    batching = actors.sampler
    embedded = TorchSampler(policy, max_batch=batching.max_batch, on_push=batching.on_push, max_tokens=bound, num_threads=actors.num_threads)
    return embedded, Renderers(tokenizer)


class _Leave(Exception):
    """The actor's work is done."""


class Actor:
    """One actor: its sampler, its place at the buffer, and the episodes it plays."""

    role: Literal["actor", "evaluator"] = "actor"

    def __init__(self, run: Run, actor_id: str, sampler: Sampler, renderers: Renderers) -> None:
        self.settings, kwargs, self.group_size = self.plays(run.config)
        self.stall_timeout_s = run.config.buffer.stall_timeout_s
        self.sampler = sampler
        self.envs = EnvPool(kwargs)
        self.player = Player(sampler, renderers, self.envs, self.settings, run.config.seed, actor_id)
        self.invalid = InvalidShare(self.settings.max_invalid_share)
        compression = run.config.buffer.compression
        self.client = ActorClient(run.endpoint, run.run_id, actor_id, role=self.role, tasks=self.tasks(), keys=client_keys(run), compression=compression)
        self.reader = subscribe_to(run, actor_id)
        self.loaded = asyncio.Condition()
        self.slots = asyncio.Semaphore(self.settings.slots)
        self.num_owed = 0
        self.num_playing = 0
        self.closings = Closings()
        self.leaving_lineage = False
        self.awaited: dict[int, int] = {}

    @staticmethod
    def plays(config: Config) -> tuple[Actors, dict[str, dict[str, Any]], int]:
        """How it plays, the arguments of its environments by their ids, and in groups of how many."""
        return config.actors, {env.id: env.kwargs for env in config.envs}, config.learner.group_size

    def tasks(self) -> dict[str, int]:
        """How many tasks its environments have, for the cursors of training."""
        return self.envs.num_tasks()

    async def run(self, stop: threading.Event) -> None:
        """Connects, lives as concurrent activities, and leaves in order: leases back, sampler closed, environments closed."""
        try:
            async with self.client:
                try:
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(self.leave_when(stop), name="stop")
                        if self.role == "actor":
                            tasks.create_task(self.watch_weights(), name="weights")
                        tasks.create_task(self.report(), name="report")
                        tasks.create_task(self.end_closed(), name="closed groups")
                        tasks.create_task(self.take_leases(tasks), name="leases")
                finally:
                    with contextlib.suppress(TimeoutError, StreamError):
                        await asyncio.wait_for(self.client.release(), LEAVE_S)
        except BaseExceptionGroup as group:
            failure = first_failure(group)
            if not isinstance(failure, _Leave):
                raise failure from None
            logger.info("actor=left reason=%s", failure)
        finally:
            await self.sampler.close()
            self.reader.close()
            self.envs.close()

    # --- leases and episodes ----------------------------------------------------------------------------------------------------------

    async def take_leases(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes leases; waits for the first weights, then for the buffer; produces one task per group."""
        await self.ready()
        self.give_credit()
        while (lease := await self.client.next_lease()) is not None:
            self.num_owed += len(lease.members)
            tasks.create_task(self.play_group(lease), name=f"group {lease.group_id}")
        raise _Leave(self.client.stop_reason or "the buffer ended the run")

    async def play_group(self, lease: Lease) -> None:
        """Plays the members that a lease names, side by side, once the weights it asks for are held; gives it back when all are appended."""
        self.awaited[lease.group_id] = lease.admit_version
        try:
            async with self.closings.unless_closed(lease.group_id):
                await self.hold(lease.lineage, lease.admit_version)
        except GroupClosed:
            self.closings.num_cancelled += len(lease.members)
            self.leave_unplayed(lease)
        else:
            self.awaited.pop(lease.group_id, None)
            await self.play_members(lease)
        self.awaited.pop(lease.group_id, None)
        self.client.finish(lease.group_id)

    def leave_unplayed(self, lease: Lease) -> None:
        """Nothing of this lease is played."""
        self.num_owed -= len(lease.members)
        self.give_credit()

    async def play_members(self, lease: Lease) -> None:
        """Plays the members that a lease names, side by side."""
        async with asyncio.TaskGroup() as members:
            for member in lease.members:
                members.create_task(self.play_member(lease, member), name=f"group {lease.group_id} member {member}")

    async def play_member(self, lease: Lease, member: int) -> None:
        """Plays one episode in a free slot, then appends its trajectory; the slot is taken by the next while the network works."""
        trajectory = None
        try:
            trajectory = await self.play_episode(lease, member)
        except GroupClosed:
            self.closings.num_cancelled += 1
        self.num_owed -= 1
        self.give_credit()
        if trajectory is None:
            return
        try:
            await self.client.append(trajectory)
        except Refused as error:
            if error.code not in ("unknown_group", "not_leased"):
                raise
            # The learner started a new lineage while this episode was played: nobody waits for it any more.
            logger.warning("group=%d member=%d state=not_wanted reason=%s", lease.group_id, member, error)
        self.invalid.count(trajectory)

    async def play_episode(self, lease: Lease, member: int) -> Trajectory:
        """Plays one episode in a free slot. Raises :class:`GroupClosed` where the buffer closed its group before it ended."""
        async with self.closings.unless_closed(lease.group_id), self.slots:
            await self.hold(lease.lineage, lease.admit_version)  # a new lineage may have begun while it waited for the slot
            self.num_playing += 1
            try:
                return await self.player.play(lease, member)
            finally:
                self.num_playing -= 1

    async def end_closed(self) -> None:
        """Consumes what the buffer says of groups that wait for nobody; ends what is played of them, which frees their slots."""
        while True:
            closed = await self.client.closed()
            if num_ended := self.closings.close(closed):
                logger.info("groups=closed ids=%s episodes_ended=%d", sorted(closed), num_ended)

    def give_credit(self) -> None:
        """Tells the buffer how many more groups fit. An actor with fewer slots than a group has members takes one group when it is idle."""
        free = (self.settings.slots - self.num_owed) // self.group_size
        self.client.credit(max(free, 0 if self.num_owed else 1))

    # --- weights ----------------------------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Returns once leases may come."""
        await self.hold(0, 0)

    async def hold(self, lineage: int, version: int) -> None:
        """Returns once the sampler holds at least this version: of that lineage, or any of a later one, and none is about to take its place.

        Raises :class:`DeadlineExceeded` where the learner publishes none for ``buffer.stall_timeout_s``.
        """

        def holds() -> bool:
            return (held := self.sampler.held) is not None and held >= (lineage, version) and not self.leaving_lineage

        if holds():
            return
        try:
            async with asyncio.timeout(self.stall_timeout_s), self.loaded:
                await self.loaded.wait_for(holds)
        except TimeoutError:
            held = self.sampler.held
            raise DeadlineExceeded(
                f"no weights of version {version} came from the learner for {self.stall_timeout_s:g} s (buffer.stall_timeout_s); "
                f"{self.client.peer_id} holds {'none' if held is None else f'version {held[1]}'}; is the learner alive?"
            ) from None

    async def watch_weights(self) -> None:
        """Consumes published versions; waits for the learner; is released by the next version; produces weights in the sampler, proven.

        A learner that was started again publishes once more what it redoes. Versions older than the held one are passed over: no trajectory goes back.
        Those of a new lineage are loaded whatever their number, once the episodes in progress have ended under the old: no trajectory mixes the two.
        """
        while True:
            manifest, held = self.reader.poll(), self.sampler.held
            if manifest is None or (held is not None and (manifest.lineage, manifest.version) < held):
                await asyncio.sleep(WEIGHTS_POLL_S)
                continue
            self.leaving_lineage = held is not None and manifest.lineage != held[0]
            if self.leaving_lineage and self.num_playing:
                await asyncio.sleep(WEIGHTS_POLL_S)
                continue
            try:
                await self.load(manifest)
            except WeightsGone as error:  # published faster than read: the next one
                logger.info("weights=gone version=%d reason=%s", manifest.version, error)
                await asyncio.sleep(WEIGHTS_POLL_S)
                continue
            self.leaving_lineage = False
            async with self.loaded:
                self.loaded.notify_all()

    async def load(self, manifest: Manifest) -> None:
        """Puts a version into the sampler, proven."""
        started = time.perf_counter()
        with contextlib.ExitStack() as stack:
            # Opening hashes every byte: for a large model that would hold up everybody else here.
            view = await asyncio.to_thread(stack.enter_context, self.reader.open(manifest))
            await self.sampler.load(manifest, view)
        logger.info("weights=loaded lineage=%d version=%d seconds=%.3f", manifest.lineage, manifest.version, time.perf_counter() - started)

    # --- the rest -----------------------------------------------------------------------------------------------------------------------

    async def report(self) -> None:
        """Tells the buffer, with each heartbeat, how far this actor is and what it waits for."""
        while True:
            held = self.sampler.held
            self.client.report(
                {
                    **self.sampler.counters,
                    "episodes": float(self.invalid.num_episodes),
                    "invalid_episodes": float(self.invalid.num_invalid),
                    "cancelled_episodes": float(self.closings.num_cancelled),
                    "cpu_s": time.process_time(),
                },
                {"running": float(self.num_playing), "version": float(held[1] if held else -1)},
                self.waits_for(),
            )
            await asyncio.sleep(REPORT_S)

    def waits_for(self) -> str:
        """What this actor waits for now, in a word for people; empty while it samples."""
        if self.role == "actor" and self.sampler.held is None:
            return "weights v0"
        if self.num_playing:
            return "" if self.sampler.running else "environment"
        return f"weights v{min(self.awaited.values())}" if self.awaited else "lease"

    async def leave_when(self, stop: threading.Event) -> None:
        """Ends the actor when this process was asked to stop."""
        while not stop.is_set():
            await asyncio.sleep(STOP_POLL_S)
        raise _Leave("this process was asked to stop")


def first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show of those that ended together: the first that is a failure, since a TaskGroup lists them in the order they came."""
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat.append(first_failure(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in flat if not isinstance(error, _Leave)), flat[0])
