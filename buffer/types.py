"""The words that cross a process: leases, trajectories, batches.

Plain frozen records over NumPy arrays and Python scalars; this module imports neither torch nor ray. Shapes: ``T`` tokens of one
segment, ``R`` runs of equal policy version, ``K`` turns. ``behaviour_logprobs[t]`` scores ``token_ids[t]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

Purpose = Literal["train", "eval"]
Status = Literal["terminated", "truncated", "failed"]
"""``terminated`` the task ended · ``truncated`` we cut it · ``failed`` the sample must not train."""
StopReason = Literal["terminated", "length", "turns", "time", "infra", "env"]
"""Why: ``terminated``; ``length``, ``turns``, ``time`` for truncated; ``infra``, ``env`` for failed."""
MAX_LOGPROB = 1e-4
"""A log-probability may exceed 0 by float noise only; more means somebody negated it."""
GroupState = Literal["open", "ready", "assigned", "trained", "dropped"]


class TrajectoryKey(NamedTuple):
    """Identity of one attempt at one member of a group. An insert is idempotent on it (with ``segment`` for its rows).

    ``lineage`` is that of the weights that sampled: the one its versions belong to.
    """

    lineage: int
    group_id: int
    member: int
    attempt: int


class MediaSpan(msgspec.Struct, frozen=True, gc=False):
    """Where the placeholder tokens of one image lie in a segment; the bytes live once, under their digest."""

    digest: str
    mime: str
    start: int
    length: int


class Segment(msgspec.Struct, frozen=True, gc=False):
    """One training row of a trajectory.

    ``token_ids``, ``loss_mask`` (1 where our policy sampled the token) and ``behaviour_logprobs`` (0 where the mask is 0) are ``[T]``.
    Policy versions are run-length coded: tokens ``version_starts[r] .. version_starts[r+1]`` carry ``version_values[r]`` (``[R]``,
    starts ascending from 0, values never decreasing). ``turn_starts``, ``turn_roles`` and ``turn_rewards`` are ``[K]``. ``routed_experts`` is reserved for
    mixture-of-experts routing replay: carried unread, None where the sampler gave none.
    """

    token_ids: Int32
    loss_mask: UInt8
    behaviour_logprobs: Float32
    version_starts: Int32
    version_values: Int32
    turn_starts: Int32
    turn_roles: tuple[str, ...]
    turn_rewards: tuple[float | None, ...]
    media: tuple[MediaSpan, ...] = ()
    routed_experts: tuple[bytes, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens our policy sampled."""
        return int(np.count_nonzero(self.loss_mask))

    def token_versions(self) -> Int32:
        """Policy version of every token, ``[T] int32``."""
        lengths = np.diff(np.append(self.version_starts, self.num_tokens))
        return np.repeat(self.version_values, lengths).astype(np.int32)

    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest version over the tokens our policy sampled; None where it sampled none."""
        versions = self.token_versions()[self.loss_mask.astype(bool)]
        return (int(versions.min()), int(versions.max())) if len(versions) else None


class Trajectory(msgspec.Struct, frozen=True, gc=False):
    """The record of one episode: who played it, what was sampled, how it was scored.

    ``reward`` is None when the episode was not scored, which is not 0. ``env_metrics`` are the environment's own numbers
    (``success`` among them), averaged in the metrics and never trained on. ``temperature``, ``top_p`` and ``top_k`` are those of the sampling
    that produced ``behaviour_logprobs``. Times are Unix seconds; ``sampler_s`` and ``env_s`` are seconds spent waiting for each.
    """

    key: TrajectoryKey
    env_id: str
    task_index: int
    seed: int
    purpose: Purpose
    segments: tuple[Segment, ...]
    reward: float | None
    status: Status
    stop_reason: StopReason
    reward_parts: dict[str, float] = {}
    env_metrics: dict[str, float] = {}
    error: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    messages: str = "[]"
    actor_id: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0
    sampler_s: float = 0.0
    env_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens over all segments."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens our policy sampled, over all segments."""
        return sum(segment.num_trained_tokens for segment in self.segments)

    def version_range(self) -> tuple[int, int] | None:
        """``(min_version, max_version)`` over every sampled token; None where nothing was sampled."""
        ranges = [found for segment in self.segments if (found := segment.version_range()) is not None]
        return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


class Header(msgspec.Struct, frozen=True):
    """What every rank knows of a whole batch: enough for advantages, filters and denominators, without a token.

    Columns over its ``N`` trajectories in the batch's order, over their ``B`` segments in that order, and over the ``R`` runs of equal policy version of those:
    ``segment_counts`` ``[N]`` and ``run_counts`` ``[B]`` say how many belong to each. ``segment_tokens`` ``[B]`` are lengths; ``run_sampled`` ``[R]`` counts
    the tokens of a run that our policy sampled, by the version in ``run_versions`` ``[R]``, reckoned in the learner's lineage.
    """

    group_ids: list[int]
    members: list[int]
    rewards: list[float | None]
    statuses: list[Status]
    stop_reasons: list[StopReason]
    env_metrics: list[dict[str, float]]
    temperatures: list[float]
    top_ps: list[float]
    top_ks: list[int]
    env_ids: list[str]
    segment_counts: list[int]
    segment_tokens: list[int]
    run_counts: list[int]
    run_versions: list[int]
    run_sampled: list[int]


class Batch(msgspec.Struct, frozen=True):
    """What one learner step consumes: batch k makes policy version k.

    ``groups`` lists the group ids in their recorded order; ``trajectories`` are those dealt to this rank, group by group and member by member: with one
    rank all of them. ``withheld`` names members whose tokens must not train although their reward stays in the group's baseline. ``header`` describes the
    whole batch; where it is None, ``trajectories`` are the whole batch (see :func:`rollstream.buffer.header.header_of`).
    """

    lineage: int
    version: int
    groups: tuple[int, ...]
    trajectories: tuple[Trajectory, ...]
    withheld: frozenset[tuple[int, int]] = frozenset()
    recorded: bool = False
    """True when this batch had been served before: a redo after a crash."""
    header: Header | None = None
    blobs: Mapping[str, bytes] = {}
    """The bytes of every image that ``trajectories`` name, by digest."""
