"""What messages are made of: structs that are no messages by themselves (see ``wire``, which gives them all)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .types import Purpose

Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What columns and tables can hold: a message with a larger one is malformed, and nothing behind the door has to ask."""

Role = Literal["actor", "evaluator", "learner", "supervisor", "scorer"]


class RetainedVersion(msgspec.Struct, frozen=True):
    """A version whose weights the learner keeps so that evaluators can load them."""

    lineage: Number
    version: Number
    digest: str


class SkippedVersion(msgspec.Struct, frozen=True):
    """A version that was due to be evaluated and could not be kept."""

    lineage: Number
    version: Number
    reason: str


class FinishedMember(msgspec.Struct, frozen=True):
    """A member of a re-leased group that somebody already finished."""

    member: Number
    reward: float | None


class Lease(msgspec.Struct, frozen=True):
    """The right to produce one group. ``members`` are the ones to play; ``finished`` the ones that are done already.

    ``sequence`` numbers training leases in admission order. The actor starts only when its sampler holds ``admit_version`` or newer of
    ``lineage``, or any version of a later one. A lease to evaluate asks for exactly ``admit_version``, with weights of this ``digest``.
    ``seed`` is the environment's reset seed, shared by the group.
    """

    lineage: Number
    group_id: Number
    sequence: Number
    attempt: Number
    purpose: Purpose
    env_id: str
    task_index: Number
    seed: Number
    members: list[Number]
    admit_version: Number
    finished: list[FinishedMember] = []
    digest: str = ""


class Evaluation(msgspec.Struct, frozen=True):
    """One evaluation: ``state`` is open, done, skipped or dropped, the last two for ``reason``. ``values`` are its metrics once it is done.

    ``num_done`` of ``num_members`` trajectories are there. ``number`` counts closed evaluations in the order they closed, from 1; 0 while it is open.
    """

    lineage: Number
    version: Number
    state: str
    reason: str = ""
    num_members: Number = 0
    num_done: Number = 0
    values: dict[str, float] = {}
    number: Number = 0


class PeerStatus(msgspec.Struct, frozen=True):
    """One peer as the buffer sees it. ``silent_s`` is the time since it last spoke."""

    role: Role
    peer_id: str
    silent_s: float
    counters: dict[str, float]
    gauges: dict[str, float]
    waiting_for: str
    num_leases: Number
