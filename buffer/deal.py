"""How a batch is split over the ranks of the learner: whole trajectories, by the number of tokens they cost.

A pure function of the header, so that every pull of a batch splits it alike, whichever buffer process answers. Longest first, each to the rank with the
least so far (Graham 1969): two ranks then differ by no more than one trajectory. What will not train costs nothing and goes wherever fewest are.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from typing import Literal

import numpy as np

from ..configs.learner_schema import Advantage
from .shaping import is_degenerate, shape_rewards
from .types import Header


def deal(costs: list[int], ranks: int) -> list[list[int]]:
    """Which trajectories (indices into ``costs``) each of ``ranks`` gets, ascending. Deterministic: ties go to the lower index, and to the lower rank."""
    loads = [(0, 0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, count, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + costs[index], count + 1, rank))
    return [sorted(share) for share in shares]


def costs(header: Header, withheld: Collection[tuple[int, int]], advantage: Advantage, degenerate: Literal["keep", "mask", "refill"]) -> list[int]:
    """Tokens that the model computes for each trajectory, ``[N]``: those of its segments with something sampled, 0 where all of it leaves the loss."""
    row_sampled = _sums(header.run_sampled, header.run_counts)
    row_cost = [tokens if sampled else 0 for tokens, sampled in zip(header.segment_tokens, row_sampled, strict=True)]
    cost, sampled = _sums(row_cost, header.segment_counts), _sums(row_sampled, header.segment_counts)
    scored = [reward is not None and status != "failed" for reward, status in zip(header.rewards, header.statuses, strict=True)]
    cut = [status == "truncated" for status in header.statuses]
    leaves = [not known or (short and advantage.truncated != "keep") for known, short in zip(scored, cut, strict=True)]
    if degenerate != "keep":
        included = [known and not (short and advantage.truncated == "exclude") for known, short in zip(scored, cut, strict=True)]
        shaped = shape_rewards([np.nan if reward is None else reward for reward in header.rewards], sampled, advantage.overlong)
        members: dict[int, list[int]] = {}
        for index, group_id in enumerate(header.group_ids):
            members.setdefault(group_id, []).append(index)
        for indices in members.values():
            if is_degenerate(shaped[indices], [included[index] for index in indices]):
                for index in indices:
                    leaves[index] = True
    keys = zip(header.group_ids, header.members, strict=True)
    return [0 if gone or key in withheld else tokens for gone, key, tokens in zip(leaves, keys, cost, strict=True)]


def _sums(values: list[int], counts: list[int]) -> list[int]:
    """Sums of consecutive stretches of ``values``, each as long as ``counts`` says."""
    stream = iter(values)
    return [sum(itertools.islice(stream, count)) for count in counts]
