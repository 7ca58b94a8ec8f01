"""Playing one episode: reset, then sample, parse, step and append until somebody ends it.

How an episode can end (``status``, ``stop_reason``):

    terminated, terminated   the environment says that the task ended
    truncated, turns | time  the environment cut it, or ``actors.episode_timeout_s`` passed between or within turns of the policy
    truncated, length        less than one token was left of ``max_trajectory_tokens`` or of the model's context
    failed, infra            the world around the episode failed, or the environment did not answer within ``actors.episode_timeout_s``
    failed, env              the environment's own code raised

A failed episode has reward null and never trains. So has one whose environment says ``score_later``, until a scorer amends it. A turn cut by
``max_turn_tokens`` is given to the environment as it is: what it is worth is for the environment to say.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..buffer.types import Status, StopReason, Trajectory, TrajectoryKey
from ..envs.blame import name_and_text, user_line
from ..envs.renderer import Renderer
from ..errors import EnvError, InfraError
from .endings import Endings
from .record import Record
from .sampler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from ..buffer.wire import Lease
    from ..configs.schema import Actors
    from ..envs.chat import ChatEnv
    from ..envs.renderer import Tokenizer
    from .env_pool import EnvPool
    from .sampler import Completion, Sampler


Result = TypeVar("Result")


@dataclass(slots=True)
class Renderers:
    """One renderer per set of tools: building one probes the chat template, so it is done once."""

    tokenizer: Tokenizer
    _known: dict[str, Renderer] = field(default_factory=dict[str, Renderer])

    def of(self, tools: Sequence[dict[str, Any]]) -> Renderer:
        """The renderer for these tools. Raises :class:`TemplateError` where the tokenizer's template cannot be extended token by token."""
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._known:
            self._known[key] = Renderer(self.tokenizer, tools)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended."""

    status: Status
    stop_reason: StopReason
    error: str = ""


@dataclass(slots=True)
class _Episode:
    """An episode while it is played."""

    record: Record
    lineage: int
    deadline: float
    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)
    sampler_s: float = 0.0
    env_s: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict[str, float])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    score_later: bool = False

    def note(self, info: dict[str, Any]) -> None:
        """Takes up what the environment reports so far."""
        self.reward_parts = dict(info.get("reward_parts", {}))
        self.metrics = dict(info.get("metrics", {}))
        self.score_later = bool(info.get("score_later"))


def sampling_seed(run_seed: int, lease: Lease, member: int, turn: int) -> int:
    """Seed of one completion, below 2**128: the same on whatever actor it is drawn, another for every attempt.

    Evaluations draw the same for every version and every attempt: what differs between two of them is the policy, and a member played again is the same.
    """
    evaluates = lease.purpose == "eval"
    place = (lease.task_index, member, 0) if evaluates else (lease.group_id, member, lease.attempt)
    sequence = np.random.SeedSequence(run_seed, spawn_key=(evaluates, *place, turn))
    low, high = sequence.generate_state(2, np.uint64).tolist()
    return (high << 64) | low


@dataclass(frozen=True, slots=True)
class Player:
    """Everything an actor needs to play episodes; each call of :meth:`play` is one, and many go on at once."""

    sampler: Sampler
    renderers: Renderers
    envs: EnvPool
    actors: Actors
    run_seed: int
    actor_id: str
    endings: Endings = field(default_factory=Endings)

    async def play(self, lease: Lease, member: int) -> Trajectory:
        """Plays one member of a group and returns its record, whatever became of it.

        Raises :class:`WeightsError` and whatever else the sampler raises, and :class:`TemplateError`: those are about the actor or the run, not about this
        episode.
        """
        held = self.sampler.held
        lineage, version = held or (lease.lineage, 0)  # a lease of an abandoned lineage may be played under the next: the versions are what counts
        episode = _Episode(Record(version), lineage, asyncio.get_running_loop().time() + self.actors.episode_timeout_s)
        session = f"{lease.lineage}/{lease.purpose}/{lease.group_id}/{member}/{lease.attempt}"
        env: ChatEnv | None = None
        try:
            env = self.envs.take(lease.env_id)
            outcome = await self._converse(env, lease, member, episode, session)
            self.envs.give_back(env, lease.env_id)
        except EnvError as error:
            outcome = Outcome("failed", "infra" if isinstance(error, InfraError) else "env", str(error))
            self.endings.failed(error, outcome.stop_reason, lease.env_id)
            if env is not None:
                self.envs.discard(env, lease.env_id)
        except asyncio.CancelledError:  # its group was closed: who knows where the environment stands
            if env is not None:
                self.envs.discard(env, lease.env_id)
            raise
        finally:
            await self.sampler.release(session)
        trajectory = self._trajectory(lease, member, episode, outcome)
        self.endings.count(trajectory)
        return trajectory

    async def _converse(self, env: ChatEnv, lease: Lease, member: int, episode: _Episode, session: str) -> Outcome:
        """The episode itself, turn by turn, into ``episode``."""
        record, sampling = episode.record, self.actors.sampling
        limit = min(sampling.max_trajectory_tokens, self.sampler.max_context)
        messages, info = await _in_env(episode, env.areset(seed=lease.seed, options={"task_index": lease.task_index}))
        episode.note(info)
        renderer = self.renderers.of(info.get("tools", ()))
        record.said(messages, renderer.initial(messages, limit=limit)[:limit])
        turn = 0
        while True:
            budget = min(sampling.max_turn_tokens, limit - len(record))
            if budget < 1:
                return Outcome("truncated", "length")
            params = SamplingParams(
                max_tokens=budget,
                seed=sampling_seed(self.run_seed, lease, member, turn),
                stop_ids=renderer.stop_ids,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            )
            completion = await _in_sampler(episode, self.sampler, params, session)
            message = renderer.parse(completion.token_ids.tolist())
            record.sampled(completion, message)
            if completion.stop_reason == "abort" or asyncio.get_running_loop().time() >= episode.deadline:
                return Outcome("truncated", "time")
            closed = completion.stop_reason == "stop"
            if not closed and len(record) >= limit:
                return Outcome("truncated", "length")
            messages, _, terminated, truncated, info = await _in_env(episode, env.astep(message))
            record.rewarded(info["turn_reward"])
            episode.note(info)
            if terminated:
                return Outcome("terminated", "terminated")
            if truncated:
                return Outcome("truncated", "time" if info.get("truncation") == "time" else "turns")
            ids = renderer.extend(messages, closed=closed, limit=limit)
            if len(record) + len(ids) >= limit:
                return Outcome("truncated", "length")
            record.said(messages, ids)
            turn += 1

    def _trajectory(self, lease: Lease, member: int, episode: _Episode, outcome: Outcome) -> Trajectory:
        sampling = self.actors.sampling
        return Trajectory(
            key=TrajectoryKey(episode.lineage, lease.group_id, member, lease.attempt),
            env_id=lease.env_id,
            task_index=lease.task_index,
            seed=lease.seed,
            purpose=lease.purpose,
            segments=(episode.record.segment(),),
            reward=None if outcome.status == "failed" or episode.score_later else episode.record.reward,
            status=outcome.status,
            stop_reason=outcome.stop_reason,
            reward_parts=episode.reward_parts,
            env_metrics=episode.metrics,
            error=outcome.error,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            messages=episode.record.transcript(),
            actor_id=self.actor_id,
            started_at=episode.started_at,
            finished_at=episode.started_at + time.perf_counter() - episode.began,  # whatever becomes of the clock on the wall
            sampler_s=episode.sampler_s,
            env_s=episode.env_s,
        )


async def _in_sampler(episode: _Episode, sampler: Sampler, params: SamplingParams, session: str) -> Completion:
    """One completion; at the episode's deadline it is aborted and what it has so far comes back."""
    loop = asyncio.get_running_loop()
    aborts: list[asyncio.Task[None]] = []
    timer = loop.call_at(episode.deadline, lambda: aborts.append(loop.create_task(sampler.abort(session))))
    started = time.perf_counter()
    try:
        return await sampler.generate(episode.record.token_ids, params, session=session)
    finally:
        timer.cancel()
        for task in aborts:
            await task
        episode.sampler_s += time.perf_counter() - started


async def _in_env(episode: _Episode, call: Coroutine[Any, Any, Result]) -> Result:
    """One call of the environment, within the episode's deadline; what its code raises becomes an :class:`EnvError`."""
    started = time.perf_counter()
    try:
        async with asyncio.timeout_at(episode.deadline):
            return await call
    except TimeoutError:
        raise InfraError("the environment did not answer before actors.episode_timeout_s passed; make it faster or raise the limit") from None
    except EnvError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise EnvError(f"{name_and_text(error)}{user_line(error)}") from error
    finally:
        episode.env_s += time.perf_counter() - started
