"""What an evaluation says of its version: means over trajectories, pass@k over tasks.

pass@k is the unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1: of n samples of a task of which c succeed,
1 − C(n − c, k) / C(n, k), averaged over tasks. A failed episode is no sample: it has no reward and counts neither as success nor as failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .evaluation_tables import EvaluatedMember

_SUCCESS = 0.5


def pass_at(k: int, num_samples: int, num_successes: int) -> float:
    """The chance that one of ``k`` samples drawn without replacement from these succeeds.

    Raises:
        ValueError: ``k`` is not between 1 and ``num_samples``, or more succeed than there are.

    """
    if not 1 <= k <= num_samples or not 0 <= num_successes <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples with {num_successes} successes: k must be 1 to {num_samples}")
    num_failures = num_samples - num_successes
    return 1.0 - math.prod(1.0 - k / place for place in range(num_failures + 1, num_samples + 1)) if num_failures >= k else 1.0


def succeeded(member: EvaluatedMember, success_at: float | None) -> bool | None:
    """Whether a trajectory is a success: by its reward where ``success_at`` is given, else by what its environment reported; None where nobody knows."""
    if member.reward is None:
        return None
    if success_at is not None:
        return member.reward >= success_at
    return None if member.success is None else member.success >= _SUCCESS


def scores(members: Iterable[EvaluatedMember], ks: Sequence[int], success_at: float | None) -> dict[str, float]:
    """The metrics of an evaluation with these ``members``, by their names. What cannot be known is left out.

    ``eval/reward_stderr`` is the standard error of the mean over tasks, so samples of one task do not count as independent.
    """
    groups: dict[int, list[EvaluatedMember]] = {}
    for member in members:
        groups.setdefault(member.group_id, []).append(member)
    all_members = [member for group in groups.values() for member in group]
    played = [member for member in all_members if member.status != "failed"]
    values: dict[str, float] = {"eval/trajectories": len(all_members), "eval/invalid_episodes": len(all_members) - len(played)}
    if played:
        values["eval/sequence_tokens_mean"] = _mean([member.num_tokens for member in played])
        values["eval/truncated_share"] = _mean([member.status == "truncated" for member in played])
    rewards = {group_id: scored for group_id, group in groups.items() if (scored := [member.reward for member in group if member.reward is not None])}
    if rewards:
        values["eval/reward_mean"] = _mean([reward for scored in rewards.values() for reward in scored])
    if len(rewards) > 1:
        means = [_mean(scored) for scored in rewards.values()]
        centre = _mean(means)
        values["eval/reward_stderr"] = math.sqrt(sum((mean - centre) ** 2 for mean in means) / (len(means) - 1) / len(means))
    known = [[won for member in group if (won := succeeded(member, success_at)) is not None] for group in groups.values()]
    if any(known):
        values["eval/success"] = _mean([won for group in known for won in group])
    for k in ks:
        if chances := [pass_at(k, len(group), sum(group)) for group in known if len(group) >= k]:
            values[f"eval/pass_at_{k}"] = _mean(chances)
    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
