"""The books of evaluations: which versions are scored, who plays what, what came out. Nothing in here is ever counted by the books that train.

    evaluation   open ──► done    or   skipped(reason): its version could not be kept    or   dropped(reason)
    its groups   open ──► done    or   dropped with it

An evaluation opens when the learner says that it keeps the version's weights, and is leased to evaluators only, while it keeps them. Every token of its
trajectories is of exactly that version. A plain state machine without sockets, over the ledger's open transaction, like ``books``. Only open evaluations
live in memory.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import Refused, StreamError
from . import wire
from .books import Verdict
from .evaluation_facts import Played
from .evaluation_rules import EvaluationRules
from .evaluation_tables import FIRST_GROUP, EvaluatedGroup, EvaluatedMember, EvaluationRow, EvaluationState
from .ledger import Ledger
from .scores import scores

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Group:
    """A group that is not done. ``playing`` are the members its holder still owes; ``granted_at`` is on the caller's clock."""

    row: EvaluatedGroup
    members: dict[int, EvaluatedMember] = field(default_factory=dict[int, EvaluatedMember])
    failures: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    playing: set[int] = field(default_factory=set[int])
    granted_at: float = 0.0

    @property
    def missing(self) -> set[int]:
        return set(range(self.row.num_members)) - set(self.members)


@dataclass(slots=True)
class _Open:
    """An open evaluation: its groups that are not done, and of them those to lease, lowest id first."""

    row: EvaluationRow
    num_done: int = 0
    groups: dict[int, _Group] = field(default_factory=dict[int, _Group])
    offered: list[int] = field(default_factory=list[int])

    @property
    def key(self) -> tuple[int, int]:
        return self.row.lineage, self.row.version

    def as_message(self) -> wire.Evaluation:
        return wire.Evaluation(*self.key, "open", num_members=self.row.num_members, num_done=self.num_done)


class Evaluations:
    """The evaluations of one run, over its ledger. ``rules`` are None where the run evaluates nothing (any more)."""

    def __init__(self, ledger: Ledger, rules: EvaluationRules | None) -> None:
        self.ledger = ledger
        self.rules = rules
        self.counters: Counter[str] = Counter(msgspec.json.decode(ledger.meta("evaluation_counters") or "{}", type=dict[str, int]))
        self._saved_counters = Counter(self.counters)
        self._open: dict[int, _Open] = {}
        self._of_group: dict[int, _Open] = {}
        self._held: dict[str, set[int]] = {}
        self._kept: dict[tuple[int, int], str] = {}
        self._next_id = 1 + _first(ledger, "SELECT ifnull(max(evaluation_id), 0) FROM evaluations")
        self._next_group = 1 + _first(ledger, f"SELECT ifnull(max(group_id), {FIRST_GROUP - 1}) FROM evaluation_groups")  # noqa: S608 - our own number
        self._num_closed: int = _first(ledger, "SELECT ifnull(max(number), 0) FROM evaluations")
        for row in list(ledger.rows("SELECT * FROM evaluations WHERE state = 'open' ORDER BY evaluation_id")):
            self._load(EvaluationRow(*row))

    def _load(self, row: EvaluationRow) -> None:
        evaluation = self._open[row.evaluation_id] = _Open(row)
        groups = [EvaluatedGroup(*values) for values in self.ledger.rows("SELECT * FROM evaluation_groups WHERE evaluation_id = ?", (row.evaluation_id,))]
        for group in groups:
            members = self._members(group.group_id)
            evaluation.num_done += len(members)
            if group.state == "open":
                query = "SELECT member, attempt, reason FROM evaluation_failures WHERE group_id = ?"
                failures = {(member, attempt): reason for member, attempt, reason in self.ledger.rows(query, (group.group_id,))}
                self._enter(evaluation, _Group(group, {member.member: member for member in members}, failures))
        if self.rules is None or self.rules.settings != row.settings:
            self._drop(evaluation, "evaluation was switched off" if self.rules is None else "the settings of evaluation were changed")
        self._finish_if_done(evaluation)

    def _enter(self, evaluation: _Open, group: _Group) -> None:
        group_id, holder = group.row.group_id, group.row.holder
        evaluation.groups[group_id] = group
        self._of_group[group_id] = evaluation
        if holder is None:
            heapq.heappush(evaluation.offered, group_id)
        else:
            group.playing = group.missing
            self._held.setdefault(holder, set()).add(group_id)

    # --- what the learner keeps -----------------------------------------------------------------------------------------------------

    def retained(self, statement: wire.Retained) -> wire.Evaluations:
        """Takes in what the learner keeps: opens evaluations, reports those skipped, drops those whose weights are gone for good."""
        if self.rules is None:
            raise Refused("malformed", "versions are kept for evaluations, but this run evaluates nothing")
        self._kept = {(version.lineage, version.version): version.digest for version in statement.retained}
        for version in statement.retained:
            self._keep(self.rules, version)
        for skipped in statement.skipped:
            if self._known(skipped.lineage, skipped.version) is None:
                self._close(self._new(skipped.lineage, skipped.version, "", self.rules, num_groups=0), "skipped", skipped.reason)
        if statement.written is not None:
            for evaluation in list(self._open.values()):
                if evaluation.key <= statement.written and evaluation.key not in self._kept:
                    self._drop(evaluation, f"its weights are gone: the learner holds {_name(*statement.written)} and will not make them again")
        return wire.Evaluations([evaluation.as_message() for evaluation in self._open.values()], list(self.closed(after=statement.num_known)))

    def _keep(self, rules: EvaluationRules, version: wire.RetainedVersion) -> None:
        known = self._known(version.lineage, version.version)
        if known is None:
            self._begin(version, rules)
        elif known.state == "open" and known.digest != version.digest:
            self._drop(self._open[known.evaluation_id], f"the version was made again with other weights: digest {version.digest}, before {known.digest}")

    def _begin(self, version: wire.RetainedVersion, rules: EvaluationRules) -> None:
        row = self._new(version.lineage, version.version, version.digest, rules, num_groups=rules.num_groups)
        evaluation = self._open[row.evaluation_id] = _Open(row)
        self._put(row)
        for env_id, task_index in itertools.product(rules.env_ids, range(rules.first_task, rules.first_task + rules.tasks)):
            seed = rules.reset_seed(task_index)
            group = EvaluatedGroup(self._next_group, row.evaluation_id, env_id, task_index, seed, rules.samples, -1, "open", None)
            self._next_group += 1
            self._put_group(_Group(group))
            self._enter(evaluation, _Group(group))
        logger.info("event=evaluation_opened lineage=%d version=%d groups=%d members=%d", *evaluation.key, row.num_groups, row.num_members)

    def _new(self, lineage: int, version: int, digest: str, rules: EvaluationRules, *, num_groups: int) -> EvaluationRow:
        self._next_id += 1
        num_members = num_groups * rules.samples
        return EvaluationRow(self._next_id - 1, lineage, version, digest, "open", None, rules.settings, num_groups, num_members, time.time(), None, None)

    def _known(self, lineage: int, version: int) -> EvaluationRow | None:
        """The evaluation of a version."""
        query = "SELECT * FROM evaluations WHERE lineage = ? AND version = ?"
        return next((EvaluationRow(*row) for row in self.ledger.rows(query, (lineage, version))), None)

    # --- leases ---------------------------------------------------------------------------------------------------------------------

    def grant(self, peer_id: str, now: float) -> wire.Lease | None:
        """One lease for an evaluator, of the oldest evaluation whose weights are kept; None where there is nothing to play."""
        for evaluation in self._open.values():
            while evaluation.offered and evaluation.key in self._kept:
                group = evaluation.groups.get(heapq.heappop(evaluation.offered))
                if group is not None and group.row.holder is None:
                    return self._lease(evaluation, group, peer_id, now)
        return None

    def _lease(self, evaluation: _Open, group: _Group, peer_id: str, now: float) -> wire.Lease:
        group.row = group.row._replace(attempt=group.row.attempt + 1, holder=peer_id)
        self._put_group(group)
        group.playing, group.granted_at = group.missing, now
        self._held.setdefault(peer_id, set()).add(group.row.group_id)
        self.counters["evaluation_leases"] += 1
        row = group.row
        finished = [wire.FinishedMember(member, done.reward) for member, done in sorted(group.members.items())]
        lineage, version = evaluation.key
        return wire.Lease(
            *(lineage, row.group_id, row.group_id, row.attempt, "eval", row.env_id, row.task_index, row.seed, sorted(group.playing), version, finished),
            digest=evaluation.row.digest,
        )

    def give_up(self, peer_id: str, *, keep: Container[int] = (), granted_before: float = float("inf")) -> int:
        """Offers again what ``peer_id`` held, but for ``keep`` and leases younger than ``granted_before``; gives how many."""
        held = [self._group(group_id) for group_id in self._held.get(peer_id, ()) if group_id not in keep]
        given_up = [group for group in held if group.granted_at < granted_before]
        for group in given_up:
            self._offer(group)
        return len(given_up)

    def claim(self, peer_id: str, group_ids: Iterable[int], now: float) -> None:
        """Lets ``peer_id`` keep the open groups it says it plays, where nobody else holds them."""
        for group_id in group_ids:
            if group_id in self._of_group and (group := self._group(group_id)).row.holder is None and group.row.attempt >= 0:
                group.row = group.row._replace(holder=peer_id)
                self._put_group(group)
                group.playing, group.granted_at = group.missing, now
                self._held.setdefault(peer_id, set()).add(group_id)

    def held(self, peer_id: str) -> frozenset[int]:
        """Groups ``peer_id`` holds a lease of."""
        return frozenset(self._held.get(peer_id, ()))

    def num_held(self, peer_id: str) -> int:
        """How many those are."""
        return len(self._held.get(peer_id, ()))

    def postpone(self, seconds: float) -> None:
        """A time in which nothing could be taken in counts for no lease."""
        for evaluation in self._open.values():
            for group in evaluation.groups.values():
                group.granted_at += seconds

    def awaits(self, group_id: int) -> bool:
        """Whether a group still waits for members."""
        return group_id in self._of_group

    def holders(self) -> list[str]:
        """Everyone who holds a lease."""
        return [peer_id for peer_id, held in self._held.items() if held]

    def _group(self, group_id: int) -> _Group:
        return self._of_group[group_id].groups[group_id]

    def _offer(self, group: _Group) -> None:
        self._drop_holder(group)
        self._put_group(group)
        heapq.heappush(self._of_group[group.row.group_id].offered, group.row.group_id)

    def _drop_holder(self, group: _Group) -> None:
        if group.row.holder is not None:
            held = self._held[group.row.holder]
            held.discard(group.row.group_id)
            if not held:
                del self._held[group.row.holder]
        group.row = group.row._replace(holder=None)
        group.playing = set()

    # --- members --------------------------------------------------------------------------------------------------------------------

    def check_known(self, played: Sequence[Played]) -> None:
        """Refuses trajectories that nobody was asked for, and those with a token of another version than the pinned one; nothing is changed.

        Raises:
            Refused: ``unknown_group``, ``not_leased`` or ``malformed``.

        """
        for fact, _, versions in played:
            name = f"evaluation group {fact.group_id - FIRST_GROUP} member {fact.member}"
            query = "SELECT g.num_members, g.attempt, e.lineage, e.version FROM evaluation_groups g JOIN evaluations e USING (evaluation_id) WHERE group_id = ?"
            found = next(self.ledger.rows(query, (fact.group_id,)), None)
            if found is None or fact.lineage != found[2]:
                raise Refused("unknown_group", f"{name} of lineage {fact.lineage}: no evaluation leased it")
            num_members, attempt, _, version = found
            if fact.member >= num_members:
                raise Refused("malformed", f"{name}: the group has {num_members} members")
            if fact.attempt > attempt:
                raise Refused("not_leased", f"{name}: attempt {fact.attempt} was never leased, the last was {attempt}")
            if versions != (version, version):
                span = f"{versions[0]} to {versions[1]}" if versions[0] < versions[1] else f"{versions[0]}"
                raise Refused("malformed", f"{name}: tokens of version {span}; every token of this evaluation must be of version {version}")

    def receive(self, played: Played, append_id: int, learner_version: int) -> Verdict:
        """Enters one finished trajectory, whose rows will lie in append ``append_id`` if the verdict is to store them."""
        fact = played.fact
        evaluation = self._of_group.get(fact.group_id)
        if evaluation is None:
            stored = {member.member: member.attempt for member in self._members(fact.group_id)}
            return "duplicate" if stored.get(fact.member) == fact.attempt else "superseded"
        group = evaluation.groups[fact.group_id]
        if (committed := group.members.get(fact.member)) is not None:
            return "duplicate" if committed.attempt == fact.attempt else "superseded"
        if (fact.member, fact.attempt) in group.failures:
            return "duplicate"
        if fact.status == "failed" and self.rules is not None:
            failed_before = sum(member == fact.member and reason == fact.stop_reason for (member, _), reason in group.failures.items())
            if failed_before + 1 < self.rules.attempts(fact.stop_reason):
                group.failures[fact.member, fact.attempt] = fact.stop_reason
                values = (fact.group_id, fact.member, fact.attempt, fact.stop_reason)
                self.ledger.write("INSERT OR IGNORE INTO evaluation_failures VALUES(?, ?, ?, ?)", values)
                if fact.attempt == group.row.attempt:  # else another plays it by now, and still owes it
                    self._heard_of(group, fact.member)
                return "retry"
        member = EvaluatedMember(
            *(fact.group_id, fact.member, fact.attempt, append_id, fact.reward, fact.status, fact.stop_reason),
            *(fact.num_tokens, fact.num_trained_tokens, fact.min_version, fact.max_version, played.success),
        )
        group.members[fact.member] = member
        self.ledger.write(f"INSERT INTO evaluation_members VALUES({', '.join('?' * len(member))})", member)
        evaluation.num_done += 1
        if group.missing:
            self._heard_of(group, fact.member)
        else:
            self._end_group(evaluation, group, "done")
            self._finish_if_done(evaluation, learner_version)
        return "store"

    def _heard_of(self, group: _Group, member: int) -> None:
        """The holder owes one member less; once it owes none, what is missing is offered again."""
        group.playing.discard(member)
        if not group.playing and group.row.holder is not None:
            self._offer(group)

    def _members(self, group_id: int) -> list[EvaluatedMember]:
        return [EvaluatedMember(*row) for row in self.ledger.rows("SELECT * FROM evaluation_members WHERE group_id = ?", (group_id,))]

    # --- the end of an evaluation ---------------------------------------------------------------------------------------------------

    def _end_group(self, evaluation: _Open, group: _Group, state: Any) -> None:
        self._drop_holder(group)
        group.row = group.row._replace(state=state)
        self._put_group(group)
        del evaluation.groups[group.row.group_id], self._of_group[group.row.group_id]

    def _finish_if_done(self, evaluation: _Open, learner_version: int | None = None) -> None:
        row = evaluation.row
        if evaluation.groups or self.rules is None or row.evaluation_id not in self._open:
            return
        query = "SELECT env_id, evaluation_members.* FROM evaluation_members JOIN evaluation_groups USING (group_id) WHERE evaluation_id = ?"
        by_env: dict[str, list[EvaluatedMember]] = {}
        for env_id, *values in self.ledger.rows(query, (row.evaluation_id,)):
            by_env.setdefault(env_id, []).append(EvaluatedMember(*values))
        values = scores([member for members in by_env.values() for member in members], self.rules.ks, self.rules.success_at)
        if len(by_env) > 1:
            for env_id, members in by_env.items():
                own = scores(members, self.rules.ks, self.rules.success_at)
                values |= {f"eval/{env_id}/{name.removeprefix('eval/')}": value for name, value in own.items()}
        values["eval/seconds"] = time.time() - row.opened_at
        if learner_version is not None:
            values["eval/lag"] = learner_version - row.version
        self._close(row._replace(metrics=msgspec.json.encode(values).decode()), "done")

    def _drop(self, evaluation: _Open, reason: str) -> None:
        for group in list(evaluation.groups.values()):
            self._end_group(evaluation, group, "dropped")
        self._close(evaluation.row, "dropped", reason)

    def _close(self, row: EvaluationRow, state: EvaluationState, reason: str | None = None) -> None:
        self._num_closed += 1
        self._open.pop(row.evaluation_id, None)
        self._put(row._replace(state=state, reason=reason, number=self._num_closed))
        level = logging.INFO if state == "done" else logging.WARNING
        logger.log(level, "event=evaluation_%s lineage=%d version=%d reason=%r metrics=%s", state, row.lineage, row.version, reason or "", row.metrics or "{}")

    # --- looking --------------------------------------------------------------------------------------------------------------------

    def closed(self, *, after: int) -> Iterable[wire.Evaluation]:
        """Evaluations that closed after the first ``after`` of them, in that order."""
        for row in self.ledger.rows("SELECT * FROM evaluations WHERE number > ? ORDER BY number", (after,)):
            yield as_message(EvaluationRow(*row))

    def status(self) -> list[wire.Evaluation]:
        """Those open, and the one that closed last."""
        return [*(evaluation.as_message() for evaluation in self._open.values()), *self.closed(after=self._num_closed - 1)]

    def save_counters(self) -> None:
        """Writes the counters into the open transaction, where they changed."""
        if self.counters != self._saved_counters:
            self.ledger.set_meta("evaluation_counters", msgspec.json.encode(self.counters).decode())
            self._saved_counters = Counter(self.counters)

    def check(self) -> None:
        """Every group of an open evaluation is open and held by at most one evaluator, or not in memory at all.

        Raises:
            StreamError: the books of evaluations do not close.

        """
        in_memory = {group_id for evaluation in self._open.values() for group_id in evaluation.groups}
        held = [group_id for groups in self._held.values() for group_id in groups]
        if in_memory != set(self._of_group) or len(held) != len(set(held)) or not in_memory.issuperset(held):
            raise StreamError(f"the books of evaluations do not close: {len(in_memory)} groups open, {len(held)} held; run `rollstream audit`")

    def _put(self, row: EvaluationRow) -> None:
        self.ledger.write(f"INSERT OR REPLACE INTO evaluations VALUES({', '.join('?' * len(row))})", row)

    def _put_group(self, group: _Group) -> None:
        self.ledger.write(f"INSERT OR REPLACE INTO evaluation_groups VALUES({', '.join('?' * len(group.row))})", group.row)


def as_message(row: EvaluationRow) -> wire.Evaluation:
    """A closed evaluation as it is told."""
    values: dict[str, float] = msgspec.json.decode(row.metrics, type=dict[str, float]) if row.metrics else {}
    num_done = int(values.get("eval/trajectories", 0))
    return wire.Evaluation(row.lineage, row.version, row.state, row.reason or "", row.num_members, num_done, values, row.number or 0)


def _name(lineage: int, version: int) -> str:
    return f"version {version}" + (f" of lineage {lineage}" if lineage else "")


def _first(ledger: Ledger, query: str) -> int:
    return int(next(ledger.rows(query))[0])
