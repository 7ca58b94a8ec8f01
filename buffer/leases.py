"""The leases: which groups are played, by whom, and until when.

A group is leased whole at first; given back, by an actor or by its silence, it is offered again with the members that are missing, and with what became of the
others. Where there is a deadline, a group is closed with what it has once it has been out for so long.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Container, Iterable

import msgspec
import numpy as np

from .bias import Bias
from .ledger import Ledger
from .tables import GroupRow
from .tasks import Tasks
from .types import GroupState
from .window import Group, Rules, teaches_nothing
from .wire import FinishedMember, Lease

logger = logging.getLogger(__name__)


class Leases:
    """What is leased; :class:`~rollstream.buffer.books.Books` adds what is finished and what is trained."""

    def __init__(self, ledger: Ledger, rules: Rules) -> None:
        self.ledger = ledger
        self.rules = rules
        self.lineages = ledger.lineages()
        self.lineage = self.lineages.current
        self.version = int(ledger.meta("version") or 0)
        self.last_batch = ledger.last_batch(self.lineage)
        self.num_leased = ledger.num_groups()
        self.counts: Counter[str] = Counter(ledger.counts())
        self.counters: Counter[str] = Counter(msgspec.json.decode(ledger.meta("counters") or "{}", type=dict[str, int]))
        self._saved_counters = Counter(self.counters)
        self._groups: dict[int, Group] = {}
        self._offered: list[tuple[int, int]] = []
        self._num_ready = self._num_degenerate = 0
        self._held: dict[str, set[int]] = {}
        self._undated: list[int] = []
        self._deadlines: list[tuple[float, int]] = []
        self.bias = Bias(ledger, self.lineage)
        self.tasks = Tasks(ledger, rules.envs, rules.seed)
        for row in ledger.unassigned():
            self._load(row)

    def _load(self, row: GroupRow) -> None:
        group = Group(row, {member.member: member for member in self.ledger.members(row.group_id)}, self.ledger.failures(row.group_id))
        self._groups[row.group_id] = group
        if row.state == "ready":
            self._count_ready(group)
            return
        self._undated.append(row.group_id)
        if row.holder is not None:
            group.playing = set(group.missing)
            self._held.setdefault(row.holder, set()).add(row.group_id)
        elif group.missing:
            heapq.heappush(self._offered, (row.sequence, row.group_id))

    # --- leases ---------------------------------------------------------------------------------------------------------------------

    def grant(self, peer_id: str, now: float) -> Lease | None:
        """One lease for ``peer_id``: the oldest group given back, else a new one; None where admission allows none."""
        while self._offered:
            _, group_id = heapq.heappop(self._offered)
            group = self._groups.get(group_id)
            if group is not None and group.row.state == "open" and group.row.holder is None:
                return self._lease(group, peer_id, now)
        if not self.rules.admits(self.counts["open"] + self.counts["ready"], self._num_degenerate, self.version, self.last_batch):
            return None
        return self._lease(self._admit(), peer_id, now)

    def _admit(self) -> Group:
        group_id = self.num_leased
        env_id, task_index = self.tasks.next()
        seed = int(np.random.SeedSequence([self.rules.seed, group_id]).generate_state(1)[0]) & 0x7FFFFFFF
        row = GroupRow(
            group_id=group_id,
            lineage=self.lineage,
            sequence=group_id,
            env_id=env_id,
            task_index=task_index,
            seed=seed,
            num_members=self.rules.group_size,
            admit_version=self.version,
            attempt=-1,
            state="open",
            version=None,
            reason=None,
            holder=None,
        )
        self.num_leased += 1
        self.counts["open"] += 1
        self._groups[group_id] = Group(row)
        return self._groups[group_id]

    def _lease(self, group: Group, peer_id: str, now: float) -> Lease:
        """A re-lease never asks for an older version than the first one did: its place in the order was reckoned from that (a fork reckons anew)."""
        admit_version = max(group.row.admit_version, self.version)
        self._put(group, lineage=self.lineage, admit_version=admit_version, attempt=group.row.attempt + 1, holder=peer_id)
        group.playing = set(group.missing)
        group.granted_at = now
        if group.row.attempt == 0:
            self._set_deadline(group.row.group_id, now)
        self._held.setdefault(peer_id, set()).add(group.row.group_id)
        self.counters["leases"] += 1
        row = group.row
        finished = [FinishedMember(member, group.members[member].reward) for member in sorted(group.members)]
        return Lease(
            row.lineage,
            row.group_id,
            row.sequence,
            row.attempt,
            "train",
            row.env_id,
            row.task_index,
            row.seed,
            sorted(group.playing),
            row.admit_version,
            finished,
        )

    def give_up(self, peer_id: str, *, keep: Container[int] = (), granted_before: float = float("inf")) -> int:
        """Offers again what ``peer_id`` held, but for ``keep`` and leases younger than ``granted_before``; gives how many."""
        given_up = [group_id for group_id in self._held.get(peer_id, ()) if group_id not in keep and self._groups[group_id].granted_at < granted_before]
        for group_id in given_up:
            self._offer(self._groups[group_id])
        self.counters["leases_given_up"] += len(given_up)
        return len(given_up)

    def claim(self, peer_id: str, group_ids: Iterable[int], now: float) -> None:
        """Lets ``peer_id`` keep the open groups it says it plays, where nobody else holds them."""
        for group_id in group_ids:
            group = self._groups.get(group_id)
            if group is not None and group.row.state == "open" and group.row.holder is None and group.row.attempt >= 0 and group.missing:
                self._put(group, holder=peer_id)
                group.playing = set(group.missing)
                group.granted_at = now
                self._held.setdefault(peer_id, set()).add(group_id)

    def held(self, peer_id: str) -> frozenset[int]:
        """Groups ``peer_id`` holds a lease of."""
        return frozenset(self._held.get(peer_id, ()))

    def num_held(self, peer_id: str) -> int:
        """How many those are."""
        return len(self._held.get(peer_id, ()))

    def awaits(self, group_id: int) -> bool:
        """Whether a group still waits for members."""
        group = self._groups.get(group_id)
        return group is not None and group.row.state == "open" and bool(group.missing)

    def holders(self) -> list[str]:
        """Everyone who holds a lease."""
        return [peer_id for peer_id, held in self._held.items() if held]

    def _offer(self, group: Group) -> None:
        self._drop_holder(group)
        self._put(group, holder=None)
        heapq.heappush(self._offered, (group.row.sequence, group.row.group_id))

    def _drop_holder(self, group: Group) -> None:
        if group.row.holder is not None:
            held = self._held[group.row.holder]
            held.discard(group.row.group_id)
            if not held:
                del self._held[group.row.holder]
        group.playing = set()

    # --- deadlines ------------------------------------------------------------------------------------------------------------------

    def close_late(self, now: float) -> None:
        """Closes the groups that have been out for longer than their deadline.

        It counts from the first lease; from the first call here for groups that were open when the buffer started: the time nobody could play is not theirs.
        """
        while self._undated:
            self._set_deadline(self._undated.pop(), now)
        while self._deadlines and self._deadlines[0][0] <= now:
            group = self._groups.get(heapq.heappop(self._deadlines)[1])
            if group is not None and group.row.state == "open":
                self._close(group)

    def _set_deadline(self, group_id: int, now: float) -> None:
        if self.rules.group_deadline_s is not None:
            heapq.heappush(self._deadlines, (now + self.rules.group_deadline_s, group_id))

    def postpone(self, seconds: float) -> None:
        """Moves all deadlines, for a time in which nothing could be taken in; leases granted before it may not have been sent yet."""
        for group in self._groups.values():
            group.granted_at += seconds
        self._deadlines = [(due + seconds, group_id) for due, group_id in self._deadlines]

    def _close(self, group: Group) -> None:
        """With the members it has, if enough of them are scored; else it is dropped, and admission makes room for another."""
        missing = group.missing
        self.ledger.put_unplayed(group.row.group_id, missing)
        self.counters["unplayed_members"] += len(missing)
        if group.num_scored >= self.rules.min_group:
            self.counters["groups_closed_early"] += 1
            self._ready(group)
        else:
            self.counters["groups_dropped_late"] += 1
            self._drop(group, "deadline")
        logger.info("event=deadline group=%d state=%s finished=%d missing=%d", group.row.group_id, group.row.state, len(group.members), len(missing))

    # --- states ---------------------------------------------------------------------------------------------------------------------

    def _ready(self, group: Group) -> None:
        self._drop_holder(group)
        self._move(group, "ready", holder=None)
        self._count_ready(group)

    def _count_ready(self, group: Group) -> None:
        group.degenerate = self.rules.max_refill > 0 and teaches_nothing(group, self.rules)
        self._num_ready += 1
        self._num_degenerate += group.degenerate

    def _drop(self, group: Group, reason: str) -> None:
        self._drop_holder(group)
        self._move(group, "dropped", reason=reason, holder=None)
        self.bias.drop(group.row.env_id, group.members.values())
        del self._groups[group.row.group_id]

    def _leave_ready(self, group: Group) -> None:
        self._num_ready -= 1
        self._num_degenerate -= group.degenerate

    def _move(self, group: Group, state: GroupState, **changes: object) -> None:
        self.counts[group.row.state] -= 1
        self.counts[state] += 1
        self._put(group, state=state, **changes)

    def _put(self, group: Group, **changes: object) -> None:
        group.row = group.row._replace(**changes)
        self.ledger.put_group(group.row)
