"""Lineages: which history of weights a version belongs to.

A run begins as lineage 0. A fork at version f opens the next lineage: it shares every version up to f with the history it leaves, and makes its own from f + 1
on; what that history had beyond f is abandoned. Forks of forks make a tree, and each lineage has one history, from version 0 to its newest:

    lineage 0   0 ─ 1 ─ 2 ─ 3 ─ 4          the history of lineage 2 is 0, 1, 2 of lineage 0,
    lineage 1           └── 3 ─ 4 ─ 5      3 of lineage 1, and 4 of its own
    lineage 2               └── 4

Symbols: ``V`` version of the learner, ``v`` version of a token, ``f`` the last version that both histories share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

NEVER = 2**61
"""Beyond every version."""


class Fork(NamedTuple):
    """Lineage ``lineage`` left the history of lineage ``parent`` after ``version``; ``parent`` made that version itself (0 for version 0)."""

    lineage: int
    parent: int
    version: int
    reason: str


class Span(NamedTuple):
    """Versions ``first`` to ``last`` of a history, all made in ``lineage``."""

    lineage: int
    first: int
    last: int


class Lineages:
    """The tree of a run's lineages; ``current`` is the newest, the one that is trained."""

    def __init__(self, forks: Iterable[Fork] = ()) -> None:
        self.forks = tuple(sorted(forks))
        self._by_lineage = {fork.lineage: fork for fork in self.forks}
        self.current = max(self._by_lineage, default=0)

    def __contains__(self, lineage: int) -> bool:
        return lineage == 0 or lineage in self._by_lineage

    def fork_of(self, lineage: int) -> Fork:
        """Where a lineage began; lineage 0 at version 0."""
        return self._by_lineage.get(lineage, Fork(0, 0, 0, ""))

    def spans(self, lineage: int) -> list[Span]:
        """The history of ``lineage``, oldest part first; every version from 1 on lies in one of them."""
        found: list[Span] = []
        last = NEVER
        while lineage:
            fork = self._by_lineage[lineage]
            if fork.version < last:
                found.append(Span(lineage, fork.version + 1, last))
                last = fork.version
            lineage = fork.parent
        return [Span(0, 1, last), *reversed(found)]

    def owner(self, lineage: int, version: int) -> int:
        """The lineage that made ``version`` of the history of ``lineage``; 0 for version 0."""
        return next((span.lineage for span in self.spans(lineage) if span.first <= version <= span.last), 0)

    def common(self, one: int, other: int) -> int:
        """f: the last version that the histories of two lineages share; :data:`NEVER` for one and the same."""
        shared = 0
        for here, there in zip(self.spans(one), self.spans(other), strict=False):
            if here.lineage != there.lineage:
                break
            shared = min(here.last, there.last)
            if here.last != there.last:
                break
        return shared

    def shares(self, lineage: int, version: int) -> bool:
        """Whether ``version`` of ``lineage`` belongs to the current history."""
        return lineage in self and version <= self.common(lineage, self.current)

    def reckoned(self, lineage: int, oldest: int, newest: int, learner: int) -> int:
        """The version to subtract from V for the lag of what versions ``oldest`` to ``newest`` of ``lineage`` sampled, when ``learner`` trains on it.

        A token of the shared history has lag V - v, one of an abandoned part (V - f) + (v - f): as if it were folded back at the fork to version 2f - v.
        """
        return oldest if lineage == learner else folded(oldest, newest, self.common(lineage, learner))


def folded(oldest: int, newest: int, shared: int) -> int:
    """The smallest of min(v, 2f - v) over the versions ``oldest`` to ``newest``, ``shared`` being f."""
    return min(oldest, 2 * shared - newest)
