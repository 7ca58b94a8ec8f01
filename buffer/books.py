"""The books: what became of every lease, and which groups make the next batch.

    open ──► ready ──► assigned ──► trained          or   dropped(reason)

A plain state machine without sockets or clocks. Only open and ready groups live in memory; everything else is looked up in the ledger by key. Each
transition is written to the ledger's open transaction as it is made, so the caller commits, and only then tells anybody.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from ..errors import Refused, StreamError
from .facts import Fact
from .ledger import BatchRow, GroupRow, Ledger, MemberRow
from .window import Group, Rules, choose
from .wire import FinishedMember, Lease

logger = logging.getLogger(__name__)

Verdict = Literal["store", "duplicate", "superseded", "retry"]
"""``store`` the member is committed by these rows · ``duplicate`` the same attempt again · ``superseded`` another attempt won · ``retry`` failed, to be
played again."""


class Books:
    """The books of one run, over its ledger.

    ``counters`` only ever grow and survive restarts; ``counts`` are the groups per state.
    """

    def __init__(self, ledger: Ledger, rules: Rules) -> None:
        self.ledger = ledger
        self.rules = rules
        self.lineage = int(ledger.meta("lineage") or 0)
        self.version = int(ledger.meta("version") or 0)
        self.last_batch = ledger.last_batch(self.lineage)
        self.num_leased = ledger.num_groups()
        self.counts: Counter[str] = Counter(ledger.counts())
        self.counters: Counter[str] = Counter(msgspec.json.decode(ledger.meta("counters") or "{}", type=dict[str, int]))
        self._saved_counters = Counter(self.counters)
        self._groups: dict[int, Group] = {}
        self._offered: list[tuple[int, int]] = []
        self._num_ready = 0
        self._held: dict[str, set[int]] = {}
        for row in ledger.unassigned():
            self._load(row)
        self.check()

    def _load(self, row: GroupRow) -> None:
        group = Group(row, {member.member: member for member in self.ledger.members(row.group_id)}, set(self.ledger.failures(row.group_id)))
        self._groups[row.group_id] = group
        if row.state == "ready":
            self._num_ready += 1
        elif row.holder is not None:
            group.playing = set(group.missing)
            self._held.setdefault(row.holder, set()).add(row.group_id)
        else:
            heapq.heappush(self._offered, (row.sequence, row.group_id))

    # --- leases ---------------------------------------------------------------------------------------------------------------------

    def grant(self, peer_id: str, now: float) -> Lease | None:
        """One lease for ``peer_id``: the oldest group given back, else a new one; None where admission allows none."""
        while self._offered:
            _, group_id = heapq.heappop(self._offered)
            group = self._groups.get(group_id)
            if group is not None and group.row.state == "open" and group.row.holder is None:
                return self._lease(group, peer_id, now)
        if not self.rules.admits(self.counts, self.last_batch):
            return None
        return self._lease(self._admit(), peer_id, now)

    def _admit(self) -> Group:
        group_id = self.num_leased
        seed = int(np.random.SeedSequence([self.rules.seed, group_id]).generate_state(1)[0]) & 0x7FFFFFFF
        row = GroupRow(
            group_id=group_id,
            lineage=self.lineage,
            sequence=group_id,
            env_id=self.rules.env_id,
            task_index=group_id,
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
        """A re-lease never asks for an older version than the first one did: its place in the order was reckoned from that."""
        admit_version = max(group.row.admit_version, self.version)
        self._put(group, admit_version=admit_version, attempt=group.row.attempt + 1, holder=peer_id)
        group.playing = set(group.missing)
        group.granted_at = now
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
            if group is not None and group.row.state == "open" and group.row.holder is None and group.row.attempt >= 0:
                self._put(group, holder=peer_id)
                group.playing = set(group.missing)
                group.granted_at = now
                self._held.setdefault(peer_id, set()).add(group_id)

    def held(self, peer_id: str) -> frozenset[int]:
        """Groups ``peer_id`` holds a lease of."""
        return frozenset(self._held.get(peer_id, ()))

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

    def _put(self, group: Group, **changes: object) -> None:
        group.row = group.row._replace(**changes)
        self.ledger.put_group(group.row)

    # --- members --------------------------------------------------------------------------------------------------------------------

    def check_known(self, facts: Sequence[Fact]) -> None:
        """Refuses rows of groups that were never leased, or of versions and attempts that cannot exist; nothing is changed.

        Raises:
            Refused: ``unknown_group`` or ``malformed``.

        """
        for fact in facts:
            name = f"group {fact.group_id} member {fact.member}"
            if fact.group_id >= self.num_leased or fact.lineage != self.lineage:
                raise Refused(
                    "unknown_group",
                    f"{name}: lineage {self.lineage} has leased {self.num_leased} groups; this is group {fact.group_id} of lineage {fact.lineage}",
                )
            if fact.max_version is not None and fact.max_version > self.last_batch:
                raise Refused("malformed", f"{name}: tokens of version {fact.max_version}, but no batch beyond {self.last_batch} was ever formed")
            group = self._groups.get(fact.group_id)
            row = self.ledger.group(fact.group_id) if group is None else group.row
            if row is None or fact.member >= row.num_members:
                raise Refused("malformed", f"{name}: the group has {0 if row is None else row.num_members} members")
            if fact.attempt > row.attempt:
                raise Refused("not_leased", f"{name}: attempt {fact.attempt} was never leased, the last was {row.attempt}")

    def receive(self, fact: Fact, append_id: int) -> Verdict:
        """Enters one finished trajectory, whose rows will lie in append ``append_id`` if the verdict is to store them."""
        group = self._groups.get(fact.group_id)
        if group is None:
            stored = {member.member: member.attempt for member in self.ledger.members(fact.group_id)}
            return "duplicate" if stored.get(fact.member) == fact.attempt else "superseded"
        committed = group.members.get(fact.member)
        if committed is not None:
            return "duplicate" if committed.attempt == fact.attempt else "superseded"
        if (fact.member, fact.attempt) in group.failures:
            return "duplicate"
        if fact.status == "failed":
            self.counters[f"invalid_{fact.stop_reason}"] += 1
            failed_before = sum(member == fact.member for member, _ in group.failures)
            if failed_before + 1 < self.rules.max_attempts:
                group.failures.add((fact.member, fact.attempt))
                self.ledger.put_failure(fact.group_id, fact.member, fact.attempt)
                self._heard_of(group, fact.member)
                return "retry"
        self._commit_member(group, fact, append_id)
        return "store"

    def _commit_member(self, group: Group, fact: Fact, append_id: int) -> None:
        member = MemberRow(fact.group_id, fact.member, fact.attempt, append_id, fact.reward, fact.status, fact.stop_reason, *fact[7:11])
        group.members[fact.member] = member
        self.ledger.put_member(member)
        if len(group.members) < group.row.num_members:
            self._heard_of(group, fact.member)
        else:
            self._drop_holder(group)
            if all(done.reward is None for done in group.members.values()):
                self._move(group, "dropped", reason="invalid", holder=None)
                del self._groups[fact.group_id]
            else:
                self._move(group, "ready", holder=None)
                self._num_ready += 1

    def _heard_of(self, group: Group, member: int) -> None:
        """The holder owes one member less; once it owes none, what is missing is offered again."""
        group.playing.discard(member)
        if not group.playing and group.row.holder is not None:
            self._offer(group)

    def _move(self, group: Group, state: str, **changes: object) -> None:
        self.counts[group.row.state] -= 1
        self.counts[state] += 1
        self._put(group, state=state, **changes)

    # --- batches --------------------------------------------------------------------------------------------------------------------

    def batch(self, version: int) -> BatchRow | None:
        """The batch that makes ``version``: the recorded one, or a new one if enough groups can be taken; None where they cannot yet.

        Raises:
            Refused: ``version`` is not a recorded one nor the next.

        """
        if not 1 <= version <= self.last_batch + 1:
            raise Refused("malformed", f"batch {version} asked for; 1 to {self.last_batch} are recorded and {self.last_batch + 1} is next")
        if version <= self.last_batch:
            return self.ledger.batch(self.lineage, version)
        taken = choose(self._groups.values(), self.rules) if self._num_ready >= self.rules.batch_groups else []
        return self._record(version, taken) if taken else None

    def _record(self, version: int, taken: list[Group]) -> BatchRow:
        withheld: list[tuple[int, int]] = []
        max_lag = 0
        for member in (member for group in taken for _, member in sorted(group.members.items())):
            lag = 0 if member.min_version is None else version - 1 - member.min_version
            if lag > self.rules.max_lag:
                withheld.append((member.group_id, member.member))
            else:
                max_lag = max(max_lag, lag)
        batch = BatchRow(self.lineage, version, [group.row.group_id for group in taken], withheld, max_lag, self.rules.max_lag)
        self.ledger.put_batch(batch)
        for group in taken:
            self._move(group, "assigned", version=version)
            del self._groups[group.row.group_id]
        self._num_ready -= len(taken)
        self.last_batch = version
        self.counters["age_drops"] += len(withheld)
        self.counters["refilled_groups"] += len(taken) - self.rules.batch_groups
        return batch

    def trained(self, version: int) -> None:
        """The learner holds ``version`` now. Saying so again changes nothing.

        Raises:
            Refused: versions were left out, or there is no such batch.
            StreamError: the books do not close.

        """
        if version <= self.version:
            return
        if version != self.version + 1 or version > self.last_batch:
            raise Refused("malformed", f"version {version} cannot be trained: the learner held {self.version} and batches up to {self.last_batch} are recorded")
        self._shift(self.version + 1, version, "assigned", "trained")
        self._set_version(version)
        self.check()

    def resume(self, version: int) -> None:
        """The learner holds ``version``, whatever was known before: what was recorded beyond it will be served again (redo).

        Raises:
            Refused: the version was never recorded.

        """
        if not 0 <= version <= self.last_batch:
            raise Refused(
                "malformed", f"the learner holds version {version}, but batches only up to {self.last_batch} are recorded; resume from an older checkpoint"
            )
        if version < self.version:
            self._shift(version + 1, self.version, "trained", "assigned")
        else:
            self._shift(self.version + 1, version, "assigned", "trained")
        if version != self.version:
            logger.info("event=learner_resumed from_version=%d to_version=%d recorded=%d", self.version, version, self.last_batch)
            self._set_version(version)
        self.check()

    def _shift(self, first: int, last: int, before: Literal["assigned", "trained"], after: Literal["assigned", "trained"]) -> None:
        for batch in list(self.ledger.batches(self.lineage, first, last)):
            self.ledger.set_states(batch.groups, after, batch.version)
            self.counts[before] -= len(batch.groups)
            self.counts[after] += len(batch.groups)

    def _set_version(self, version: int) -> None:
        self.version = version
        self.ledger.set_meta("version", version)

    def published(self, version: int, digest: str) -> str:
        """Records the digest of a version's weights; on redo compares it. Gives a note for people where it differs.

        Raises:
            Refused: no batch ever made that version.

        """
        if not 0 <= version <= self.last_batch:
            raise Refused("malformed", f"version {version} cannot be published: batches up to {self.last_batch} are recorded")
        recorded = self.ledger.digest(self.lineage, version)
        if recorded is None:
            self.ledger.put_digest(self.lineage, version, digest)
        elif recorded != digest:
            self.counters["digests_differ"] += 1
            return f"version {version} was rebuilt with digest {digest}, recorded was {recorded}: the redo is not bit for bit the same"
        return ""

    def save_counters(self) -> None:
        """Writes the counters into the open transaction, where they changed."""
        if self.counters != self._saved_counters:
            self.ledger.set_meta("counters", msgspec.json.encode(self.counters).decode())
            self._saved_counters = Counter(self.counters)

    # --- looking --------------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Invariant 1: every lease is in exactly one state.

        Raises:
            StreamError: the books do not close.

        """
        states = {group.row.state for group in self._groups.values()} | {"open", "ready"}
        here = Counter(group.row.state for group in self._groups.values())
        closes = self.num_leased == sum(self.counts.values()) and min(self.counts.values(), default=0) >= 0
        if not closes or any(here[state] != self.counts[state] for state in states) or here["ready"] != self._num_ready:
            raise StreamError(f"the books do not close: leased={self.num_leased} states={dict(self.counts)} in_memory={dict(here)}; run `rollstream audit`")

    def first_group_beyond(self, version: int) -> int:
        """The oldest group that is not yet trained or dropped, or is trained by a batch beyond ``version``."""
        untaken = min((group.row.group_id for group in self._groups.values()), default=self.num_leased)
        return min([untaken, *(min(batch.groups) for batch in self.ledger.batches(self.lineage, version + 1, self.last_batch))])

    def waits_for(self) -> str:
        """Why no further batch can be formed, for people: the oldest unassigned group, who plays it, how far it is."""
        ready = f"{self._num_ready} of {self.rules.batch_groups} groups ready"
        head = min(self._groups.values(), key=lambda group: group.row.sequence, default=None)
        if head is None:
            return f"{ready}; nothing leased yet"
        done = f"{len(head.members)} of {head.row.num_members} members done"
        player = "nobody yet" if head.row.holder is None else head.row.holder
        return f"{ready}; oldest is group {head.row.group_id} ({done}, {head.row.state}, played by {player})" if head.row.state == "open" else ready
