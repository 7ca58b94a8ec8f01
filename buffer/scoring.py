"""Groups whose members are all played and not all scored: they wait for the rewards that come later, for so long.

A member without a reward that did not fail awaits its score. Its group stays ``open``, held by nobody and offered to nobody, until amendments have scored
every such member, or until ``buffer.score_timeout_s`` has passed since the last member came: then what is unscored is invalid, like a failed member.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from ..errors import Refused
from .amendments import REWARD, WHOLE, Amendment
from .leases import Leases
from .ledger import Ledger
from .window import Group, Rules


class Scoring(Leases):
    """Leases, and what is awaited once they are played."""

    def __init__(self, ledger: Ledger, rules: Rules) -> None:
        self._score_deadlines: list[tuple[float, int]] = []
        self._unscored: list[int] = []
        super().__init__(ledger, rules)
        self._unscored += [group.row.group_id for group in self._groups.values() if group.row.state == "open" and not group.missing]

    def _complete(self, group: Group) -> None:
        """All members are finished, or the last that was awaited has its score."""
        if group.num_awaited:
            self._drop_holder(group)
            self._put(group, holder=None)
            self._unscored.append(group.row.group_id)
        elif group.num_scored:
            self._ready(group)
        else:
            self._drop(group, "invalid")

    def close_late(self, now: float) -> None:
        """As :meth:`Leases.close_late`; then gives up the scores that have been awaited for too long."""
        super().close_late(now)
        while self._unscored:
            heapq.heappush(self._score_deadlines, (now + self.rules.score_timeout_s, self._unscored.pop()))
        while self._score_deadlines and self._score_deadlines[0][0] <= now:
            group = self._groups.get(heapq.heappop(self._score_deadlines)[1])
            if group is not None and group.row.state == "open" and not group.missing:
                self.counters["scores_missing"] += group.num_awaited
                if group.num_scored:
                    self._ready(group)
                else:
                    self._drop(group, "unscored")

    def postpone(self, seconds: float) -> None:
        """Moves all deadlines."""
        super().postpone(seconds)
        self._score_deadlines = [(due + seconds, group_id) for due, group_id in self._score_deadlines]

    def amend(self, amendments: Sequence[Amendment], known: Callable[[Amendment], float | None]) -> list[Amendment]:
        """Takes up ``amendments``, all or none; gives those that are new. ``known`` is the value an earlier one gave.

        Raises:
            Refused: a row that is not committed, a column that has another value already, a reward that was never awaited or comes too late.

        """
        new: dict[tuple[int, int, int, int, str], Amendment] = {}
        for amendment in amendments:
            key = (amendment.group_id, amendment.member, amendment.attempt, amendment.segment, amendment.column)
            before = known(amendment)
            before = new[key].value if before is None and key in new else before
            if before is not None and before != amendment.value:
                raise Refused("already_amended", f"{amendment.name} was given {before:g} before, now {amendment.value:g}: the first one stands")
            if before is None:
                self._check(amendment)
                new[key] = amendment
        for amendment in new.values():
            if amendment.column == REWARD:
                self._score(amendment)
        return list(new.values())

    def _check(self, amendment: Amendment) -> None:
        group = self._groups.get(amendment.group_id)
        members = group.members.values() if group is not None else self.ledger.members(amendment.group_id)
        member = next((member for member in members if member.member == amendment.member), None)
        if member is None or (member.lineage, member.attempt) != (amendment.lineage, amendment.attempt):
            raise Refused("unknown_group", f"{amendment.name} in lineage {amendment.lineage}: no such row is committed")
        if member.append_id <= self.ledger.removed_up_to:
            raise Refused("too_late", f"{amendment.name}: its rows were removed by retention (buffer.keep_gb)")
        if not math.isfinite(amendment.value):
            raise Refused("malformed", f"{amendment.name} is {amendment.value}: only finite numbers are kept")
        if amendment.column != REWARD:
            return
        if amendment.segment != WHOLE:
            raise Refused("malformed", f"{amendment.name}: a reward is of a whole trajectory (segment {WHOLE}), not of segment {amendment.segment}")
        if member.reward is not None or member.status == "failed":
            raise Refused("not_awaited", f"{amendment.name}: it {'failed' if member.status == 'failed' else 'has its reward'} and awaits no score")
        if group is None or group.row.state != "open":
            raise Refused("too_late", f"{amendment.name}: its group no longer waits for scores (buffer.score_timeout_s {self.rules.score_timeout_s:g})")

    def _score(self, amendment: Amendment) -> None:
        group = self._groups[amendment.group_id]
        group.members[amendment.member] = group.members[amendment.member]._replace(reward=amendment.value)
        self.ledger.set_reward(amendment.group_id, amendment.member, amendment.value)
        self.counters["scores"] += 1
        if not group.missing and not group.num_awaited:
            self._complete(group)
