"""The books: what became of every lease, and which groups make the next batch.

    open ──► ready ──► assigned ──► trained          or   dropped(reason)

A plain state machine without sockets or clocks. Only open and ready groups live in memory; everything else is looked up in the ledger by key. Each
transition is written to the ledger's open transaction as it is made, so the caller commits, and only then tells anybody.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from ..errors import Refused, StreamError
from .facts import Fact
from .lags import Ints, lags, too_old
from .ledger import Ledger
from .scoring import Scoring
from .tables import BatchRow, GroupRow, MemberRow
from .window import Group, Rules, choose

logger = logging.getLogger(__name__)

Verdict = Literal["store", "duplicate", "superseded", "retry"]
"""``store`` the member is committed by these rows · ``duplicate`` the same attempt again · ``superseded`` another attempt won, or the group was closed
without it · ``retry`` failed, to be played again."""


class Books(Scoring):
    """The books of one run, over its ledger.

    ``counters`` only ever grow and survive restarts; ``counts`` are the groups per state.
    """

    def __init__(self, ledger: Ledger, rules: Rules) -> None:
        super().__init__(ledger, rules)
        self.check()

    # --- members --------------------------------------------------------------------------------------------------------------------

    def check_known(self, facts: Sequence[Fact]) -> None:
        """Refuses rows of groups that were never leased, or of versions and attempts that cannot exist; nothing is changed.

        Raises:
            Refused: ``unknown_group`` or ``malformed``.

        """
        for fact in facts:
            name = f"group {fact.group_id} member {fact.member}"
            if fact.group_id >= self.num_leased or fact.lineage not in self.lineages:
                raise Refused(
                    "unknown_group",
                    f"{name} of lineage {fact.lineage}: {self.num_leased} groups were leased, and the newest lineage is {self.lineage}",
                )
            if fact.lineage == self.lineage and fact.max_version is not None and fact.max_version > self.last_batch:
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
            if fact.member not in stored:
                return self._too_late(fact, self.ledger.group(fact.group_id))
            return "duplicate" if stored[fact.member] == fact.attempt else "superseded"
        committed = group.members.get(fact.member)
        if committed is not None:
            return "duplicate" if committed.attempt == fact.attempt else "superseded"
        if (fact.member, fact.attempt) in group.failures:
            return "duplicate"
        if group.row.state != "open":
            return self._too_late(fact, group.row)
        if fact.status == "failed":
            self.counters[f"invalid_{fact.stop_reason}"] += 1
            if group.num_failures(fact.member, fact.stop_reason) + 1 < self.rules.attempts(fact.stop_reason):
                self.counters[f"retries_{fact.stop_reason}"] += 1
                group.failures[fact.member, fact.attempt] = fact.stop_reason
                self.ledger.put_failure(fact.group_id, fact.member, fact.attempt, fact.stop_reason)
                if fact.attempt == group.row.attempt:  # else another plays it by now, and still owes it
                    self._heard_of(group, fact.member)
                return "retry"
        self._commit_member(group, fact, append_id)
        return "store"

    def _too_late(self, fact: Fact, row: GroupRow | None) -> Verdict:
        """Its group was closed without it: it is counted, once per member, and not stored."""
        if row is not None and fact.status != "failed" and self.ledger.put_late(fact.group_id, fact.member, fact.num_tokens, fact.reward):
            self.bias.late(row.env_id, fact.num_tokens, fact.reward)
        return "superseded"

    def _commit_member(self, group: Group, fact: Fact, append_id: int) -> None:
        member = MemberRow(fact.group_id, fact.member, fact.attempt, append_id, fact.reward, fact.status, fact.stop_reason, *fact[7:11], fact.lineage)
        group.members[fact.member] = member
        self.ledger.put_member(member)
        if len(group.members) < group.row.num_members:
            self._heard_of(group, fact.member)
        else:
            self._complete(group)

    def _heard_of(self, group: Group, member: int) -> None:
        """The holder owes one member less; once it owes none, what is missing is offered again."""
        group.playing.discard(member)
        if not group.playing and group.row.holder is not None:
            self._offer(group)

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

    def shared(self, batch: BatchRow) -> dict[int, int]:
        """Of each other lineage that rows of ``batch`` were sampled in: the last version that its history shares with the batch's."""
        if not self.lineages.forks:
            return {}
        sampled = {member.lineage for member in self.ledger.members_of(batch.groups)}
        return {lineage: self.lineages.common(lineage, batch.lineage) for lineage in sampled - {batch.lineage}}

    def _record(self, version: int, taken: list[Group]) -> BatchRow:
        members = [member for group in taken for _, member in sorted(group.members.items())]
        old, max_lag = too_old(self._lags(members, version - 1), self.rules.max_lag)
        withheld = [(member.group_id, member.member) for member, is_old in zip(members, old.tolist(), strict=True) if is_old]
        batch = BatchRow(self.lineage, version, [group.row.group_id for group in taken], withheld, max_lag, self.rules.max_lag)
        self.ledger.put_batch(batch)
        for group in taken:
            self._move(group, "assigned", version=version)
            self.bias.batch(group.row.env_id, group.members.values(), set(withheld))
            self._leave_ready(group)
            del self._groups[group.row.group_id]
        self.last_batch = version
        self.counters["age_drops"] += len(withheld)
        self.counters["refilled_groups"] += len(taken) - self.rules.batch_groups
        return batch

    def _lags(self, members: Sequence[MemberRow], version: int) -> Ints:
        """Lags of trajectories, ``[M]``, for a learner that holds ``version``; 0 where nothing was sampled."""
        sampled = [(member.lineage, *((1, 0) if member.min_version is None else (member.min_version, member.max_version))) for member in members]
        return lags(self.lineages, self.lineage, version, *np.array(sampled, np.int64).reshape(-1, 3).T)

    def _drop_too_old(self) -> None:
        """Drops ready groups of which an abandoned lineage sampled everything too long ago: they could only take the place of groups that teach.

        Within a lineage the window lets no group come to that; there whatever is beyond the bound is withheld from its batch.
        """
        if self.lineage == 0:
            return
        for group in [group for group in self._groups.values() if group.row.state == "ready"]:
            members = list(group.members.values())
            if all(member.lineage != self.lineage for member in members) and (self._lags(members, self.version) > self.rules.max_lag).all():
                self.counters["age_drops"] += len(members)
                self._leave_ready(group)
                self._drop(group, "age")

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
        self._drop_too_old()
        self.check()

    def resume(self, version: int, lineage: int | None = None) -> None:
        """The learner holds ``version`` of ``lineage`` (None: the current one), whatever was known before. What was recorded beyond it is served again (redo).

        Raises:
            Refused: the version was never recorded, or a fork abandoned it.

        """
        if lineage is not None and not self.lineages.shares(lineage, version):
            last = self.lineages.common(lineage, self.lineage) if lineage in self.lineages else 0
            raise Refused(
                "malformed",
                f"the learner holds version {version} of lineage {lineage}, which was left after version {last}: resume from a checkpoint up to that, "
                f"or of lineage {self.lineage}",
            )
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
        self._drop_too_old()
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

    def is_unassigned(self, group_id: int) -> bool:
        """Whether a group is open or ready."""
        return group_id in self._groups

    def waits_for(self) -> str:
        """Why no further batch can be formed, for people: the oldest unassigned group, who plays it, how far it is."""
        replaced = f", {self._num_degenerate} of them teach nothing and are replaced" if self._num_degenerate else ""
        ready = f"{self._num_ready} of {self.rules.batch_groups} groups ready{replaced}"
        head = min(self._groups.values(), key=lambda group: group.row.sequence, default=None)
        if head is None:
            return f"{ready}; nothing leased yet"
        done = f"{len(head.members)} of {head.row.num_members} members done" + (f", {head.num_awaited} await their score" if head.num_awaited else "")
        player = "nobody yet" if head.row.holder is None else head.row.holder
        return f"{ready}; oldest is group {head.row.group_id} ({done}, {head.row.state}, played by {player})" if head.row.state == "open" else ready
