"""Which leases are granted, and which groups make the next batch: the two equations that bound the age of what is trained.

Symbols: ``D`` depth, ``L`` max_lag, ``b`` groups per batch, ``R`` max_refill (0 where degenerate groups are not replaced), ``a`` batches formed and not
trained, ``u`` open and ready groups, ``d`` those of them that are known to teach nothing.

* A new lease is granted while u - min(d, R) + a b < (D + 1) b, and while the versions still to be made need more than u - min(d, R) groups: what is generated
  is trained, up to the last version.
* A batch takes ready groups in the order of their leases, each before ``head + window``, where ``window = (L - D) b + 1`` and ``head`` is the oldest lease that
  is neither assigned nor taken. It is formed once it has b groups that teach, or b + R groups.

So at most window - 1 younger groups overtake any group. A batch takes b groups that teach; or b + R, and then more than R that do not. Whichever it is, of the
u - min(d, R) groups that were counted when a lease was granted, and of those that overtake it, each batch uses up b at least. So the lag is at most
D + ceil((window - 1) / b) = L. At depth 0 a group that turns out to teach nothing is replaced at once, under the same weights as the others of its batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..configs.learner_schema import Overlong
from ..configs.schema import Config
from .shaping import is_degenerate, shape_rewards
from .tables import GroupRow, MemberRow


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says about leases and batches.

    ``max_refill`` is 0 where degenerate groups are not replaced; ``envs`` are ids and weights; without ``group_deadline_s`` groups wait for all their members.
    """

    batch_groups: int
    group_size: int
    depth: int
    max_lag: int
    max_refill: int
    max_infra_attempts: int
    max_env_attempts: int
    overlong: Overlong | None
    exclude_truncated: bool
    envs: tuple[tuple[str, float], ...]
    seed: int
    versions: int
    min_group: int = 1
    group_deadline_s: float | None = None
    score_timeout_s: float = 600.0

    @classmethod
    def of(cls, config: Config) -> Rules:
        """The rules of a run."""
        buffer, learner = config.buffer, config.learner
        return cls(
            batch_groups=learner.batch_groups,
            group_size=learner.group_size,
            depth=buffer.depth,
            max_lag=buffer.max_lag,
            max_refill=buffer.max_refill if buffer.degenerate == "refill" else 0,
            max_infra_attempts=buffer.max_infra_attempts,
            max_env_attempts=buffer.max_env_attempts,
            overlong=learner.advantage.overlong,
            exclude_truncated=learner.advantage.truncated == "exclude",
            envs=tuple((env.id, env.weight) for env in config.envs),
            seed=config.seed,
            versions=learner.versions,
            min_group=buffer.min_group,
            group_deadline_s=buffer.group_deadline_s,
            score_timeout_s=buffer.score_timeout_s,
        )

    def attempts(self, stop_reason: str) -> int:
        """How often a member may be played with this kind of failure, before the failure is recorded as its outcome."""
        return self.max_infra_attempts if stop_reason == "infra" else self.max_env_attempts

    @property
    def capacity(self) -> int:
        """Groups that may be open, ready or assigned at once, but for those that replace degenerate ones."""
        return (self.depth + 1) * self.batch_groups

    def admits(self, num_unassigned: int, num_degenerate: int, version: int, last_batch: int) -> bool:
        """Whether one more group may be leased.

        ``num_degenerate`` of the open and ready groups are known to teach nothing, the learner holds ``version``, ``last_batch`` is the newest batch formed.
        """
        counted = num_unassigned - min(num_degenerate, self.max_refill)
        return counted + (last_batch - version) * self.batch_groups < self.capacity and counted < (self.versions - last_batch) * self.batch_groups

    @property
    def window(self) -> int:
        """Leases, counted from the oldest unassigned one, among which a batch may choose."""
        return (self.max_lag - self.depth) * self.batch_groups + 1


@dataclass(slots=True)
class Group:
    """A group that no batch has yet.

    ``failures`` are reasons by (member, attempt); ``playing`` the members its holder still owes; ``granted_at`` is on the caller's clock.
    ``degenerate`` is told of ready groups, where degenerate ones are replaced.
    """

    row: GroupRow
    members: dict[int, MemberRow] = field(default_factory=dict[int, MemberRow])
    failures: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    playing: set[int] = field(default_factory=set[int])
    granted_at: float = 0.0
    degenerate: bool = False

    @property
    def missing(self) -> list[int]:
        """Members nobody has finished."""
        return [member for member in range(self.row.num_members) if member not in self.members]

    @property
    def num_scored(self) -> int:
        """Finished members with a reward."""
        return sum(member.reward is not None for member in self.members.values())

    @property
    def num_awaited(self) -> int:
        """Finished members whose score is still to come."""
        return sum(member.reward is None and member.status != "failed" for member in self.members.values())

    def num_failures(self, member: int, reason: str) -> int:
        """How often a member has failed for that reason and was to be played again."""
        return sum(known == member and found == reason for (known, _), found in self.failures.items())


def choose(groups: Iterable[Group], rules: Rules) -> list[Group]:
    """Groups of the next batch among the unassigned ``groups``, in lease order; empty where the window does not hold enough.

    Beyond ``batch_groups``, up to ``max_refill`` further ones replace the degenerate ones; with so many, it trains what is live.
    """
    head: int | None = None
    taken: list[Group] = []
    num_live = 0
    for group in sorted(groups, key=lambda group: group.row.sequence):
        if head is not None and group.row.sequence >= head + rules.window:
            break
        if group.row.state != "ready":
            head = group.row.sequence if head is None else head
            continue
        if num_live >= rules.batch_groups or len(taken) >= rules.batch_groups + rules.max_refill:
            break
        taken.append(group)
        num_live += not group.degenerate
    return taken if num_live >= rules.batch_groups or len(taken) >= rules.batch_groups + rules.max_refill else []


def teaches_nothing(group: Group, rules: Rules) -> bool:
    """Whether the shaped rewards of a ready group are all equal."""
    members = list(group.members.values())
    rewards = [np.nan if member.reward is None else member.reward for member in members]
    shaped = shape_rewards(rewards, [member.num_trained_tokens for member in members], rules.overlong)
    included = [member.reward is not None and not (rules.exclude_truncated and member.status == "truncated") for member in members]
    return is_degenerate(shaped, included)
