"""The books under everything that happens to them, in any order: leases, rows, copies, losses, versions, crashes of actors, buffer and learner.

Forks begin new lineages in between.

Checked after every step: each lease is in exactly one state and the books close (invariant 1); nothing beyond max_lag is trained and nothing is trained twice
(2); no version is trained that the learner did not hold (3); a lost process costs at most the members it had not finished (8).

Groups have a deadline: one that is closed without some of its members has enough that are scored, and whoever comes late is never stored. Some members are
scored only later: their groups wait for it and are never leased again for it. Groups whose rewards are all equal are replaced, within a bound.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollstream.buffer.amendments import REWARD, WHOLE, Amendment
from rollstream.buffer.books import Books
from rollstream.buffer.facts import Fact
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.log import Location
from rollstream.buffer.recovery import fork
from rollstream.buffer.window import Rules
from rollstream.buffer.wire import Lease
from rollstream.errors import Refused

ACTORS = ("actor-0", "actor-1", "actor-2")
DEADLINE_S = 10.0


class BooksMachine(RuleBasedStateMachine):
    """Actors play leases with the version the learner last published to them; the learner trains, forgets, resumes."""

    @initialize(
        depth=st.integers(0, 2),
        spare=st.integers(0, 2),
        batch_groups=st.integers(1, 3),
        group_size=st.integers(1, 3),
        refill=st.integers(0, 3),
        min_group=st.integers(1, 3),
    )
    def start(self, depth: int, spare: int, batch_groups: int, group_size: int, refill: int, min_group: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.rules = Rules(
            batch_groups=batch_groups,
            group_size=group_size,
            depth=depth,
            max_lag=depth + spare,
            max_refill=refill,
            max_infra_attempts=2,
            max_env_attempts=2,
            overlong=None,
            exclude_truncated=False,
            envs=(("Acme/Calculator-v0", 2.0), ("Acme/Abacus-v0", 1.0)),
            seed=3,
            versions=1_000_000,
            min_group=min(min_group, group_size),
            group_deadline_s=DEADLINE_S,
            score_timeout_s=DEADLINE_S,
        )
        self.now = 0.0
        self.ledger = Ledger(self.folder / "ledger.sqlite", "run-a")
        self.books = Books(self.ledger, self.rules)
        self.playing: dict[str, list[tuple[Lease, int]]] = {actor: [] for actor in ACTORS}
        self.finished: dict[tuple[int, int], Fact] = {}
        self.sent: list[Fact] = []
        self.served: dict[int, tuple[list[int], list[tuple[int, int]]]] = {}
        self.version = 0
        self.num_appends = self.num_returned = 0

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            shutil.rmtree(self.folder)

    def play(self, lease: Lease, member: int, *, fails: bool, reward: float | None) -> Fact:
        """With the oldest version the lease allows: what actors that load weights late do."""
        version = lease.admit_version
        ending = ("failed", "infra") if fails else ("terminated", "terminated")
        return Fact(lease.lineage, lease.group_id, member, lease.attempt, None if fails else reward, *ending, 9, 5, version, version, 0, 1)

    def send(self, fact: Fact) -> None:
        self.books.check_known([fact])
        self.num_appends += 1
        verdict = self.books.receive(fact, self.num_appends)
        self.sent.append(fact)
        if verdict == "store":
            self.ledger.put_append(self.num_appends, Location(1, 8 * self.num_appends, 8, self.num_appends), 1, 1)
            assert (fact.group_id, fact.member) not in self.finished, "a member was committed twice"
            assert fact.member not in self.ledger.unplayed(fact.group_id), "a member that came too late was stored"
            self.finished[fact.group_id, fact.member] = fact
        elif verdict == "retry":
            assert fact.status == "failed"

    # --- what happens ---------------------------------------------------------------------------------------------------------------

    @rule(actor=st.sampled_from(ACTORS), wanted=st.integers(1, 4))
    def take_leases(self, actor: str, wanted: int) -> None:
        for _ in range(wanted):
            lease = self.books.grant(actor, self.now)
            if lease is None:
                break
            assert lease.members, "a lease without anything to play"
            assert not {(lease.group_id, member) for member in lease.members} & set(self.finished), "a finished member is played again"
            self.playing[actor].extend((lease, member) for member in lease.members)

    @precondition(lambda self: any(self.playing.values()))
    @rule(data=st.data(), fails=st.sampled_from((False, False, False, True)), reward=st.sampled_from((0.0, 1.0, None)))
    def finish_a_member(self, data: st.DataObject, fails: bool, reward: float | None) -> None:
        actor = data.draw(st.sampled_from([actor for actor in ACTORS if self.playing[actor]]))
        lease, member = self.playing[actor].pop(data.draw(st.integers(0, len(self.playing[actor]) - 1)))
        self.send(self.play(lease, member, fails=fails, reward=reward))

    @rule(actor=st.sampled_from(ACTORS))
    def finish_all_of_an_actor(self, actor: str) -> None:
        playing, self.playing[actor] = self.playing[actor], []
        for lease, member in playing:
            self.send(self.play(lease, member, fails=False, reward=float(member)))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def the_same_rows_come_again(self, data: st.DataObject) -> None:
        fact = data.draw(st.sampled_from(self.sent))
        assert self.books.receive(fact, 10**6) in ("duplicate", "superseded")

    @precondition(lambda self: any(fact.reward is None for fact in self.finished.values()))
    @rule(data=st.data(), value=st.sampled_from((0.0, 1.0)))
    def a_score_comes(self, data: st.DataObject, value: float) -> None:
        unscored = sorted(key for key, fact in self.finished.items() if fact.reward is None)
        fact = self.finished[data.draw(st.sampled_from(unscored))]
        amendment = Amendment(fact.lineage, fact.group_id, fact.member, WHOLE, fact.attempt, REWARD, value, "judge", 0.0)
        row = self.ledger.group(fact.group_id)
        assert row is not None
        if fact.status == "failed" or row.state != "open":
            with pytest.raises(Refused):
                self.books.amend([amendment], lambda _: None)
            return
        assert self.books.amend([amendment], lambda _: None) == [amendment]
        assert self.books.amend([amendment], lambda _: value) == []
        self.finished[fact.group_id, fact.member] = fact._replace(reward=value)

    @rule(actor=st.sampled_from(ACTORS), still_sends=st.booleans())
    def an_actor_falls_silent(self, actor: str, still_sends: bool) -> None:
        """Its leases expire; with ``still_sends`` it was only slow, and its rows still come."""
        self.books.give_up(actor)
        assert self.books.held(actor) == frozenset()
        if not still_sends:
            self.playing[actor] = []

    @rule(seconds=st.sampled_from((1.0, 4.0, DEADLINE_S)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.books.close_late(self.now)

    @rule()
    def the_learner_pulls_and_trains(self) -> None:
        version = self.version + 1
        batch = self.books.batch(version)
        if batch is None:
            return
        self.check_batch(batch.groups, batch.withheld, version)
        assert self.books.batch(version) == batch
        self.books.trained(version)
        self.version = version

    @rule()
    def the_learner_pulls_ahead(self) -> None:
        """Versions beyond the next are recorded before it has said that it holds the ones before."""
        version = self.books.last_batch + 1
        batch = self.books.batch(version) if version <= self.version + 3 else None
        if batch is not None:
            self.check_batch(batch.groups, batch.withheld, version)
        with pytest.raises(Refused):
            self.books.trained(self.version + 2)

    @rule(back=st.integers(0, 3))
    def the_learner_resumes_from_an_older_checkpoint(self, back: int) -> None:
        self.version = max(0, self.version - back)
        self.books.resume(self.version)

    @rule(back=st.integers(0, 4))
    def the_run_forks(self, back: int) -> None:
        """What was trained beyond the fork is undone; actors go on with what they play, under the weights of before."""
        self.books.save_counters()
        self.ledger.commit()
        self.version = max(0, self.version - back)
        fork(self.ledger, self.version, "asked for", lambda location: None)
        self.num_returned += sum(len(groups) for version, (groups, _) in self.served.items() if version > self.version)
        self.served = {version: served for version, served in self.served.items() if version <= self.version}
        self.books = Books(self.ledger, self.rules)
        self.books.resume(self.version)

    @rule()
    def the_buffer_is_killed_between_two_rounds(self) -> None:
        self.books.save_counters()
        self.ledger.commit()
        before = (+self.books.counts, self.books.version, self.books.last_batch, self.books.num_leased, {actor: self.books.held(actor) for actor in ACTORS})
        self.ledger._database.close()
        self.ledger = Ledger(self.folder / "ledger.sqlite", "run-a")
        self.books = Books(self.ledger, self.rules)
        after = (+self.books.counts, self.books.version, self.books.last_batch, self.books.num_leased, {actor: self.books.held(actor) for actor in ACTORS})
        assert after == before

    @rule()
    def the_buffer_is_killed_before_its_commit(self) -> None:
        """A round is lost: nobody was answered, so its rows come again."""
        self.books.save_counters()
        self.ledger.commit()
        lost: list[Fact] = []
        for playing in self.playing.values():
            for lease, member in playing[:1]:
                if (lease.group_id, member) not in self.finished:
                    lost.append(self.play(lease, member, fails=False, reward=1.0))
                    self.books.receive(lost[-1], self.num_appends + 1)
        self.ledger._database.rollback()
        self.ledger._database.close()
        self.ledger = Ledger(self.folder / "ledger.sqlite", "run-a")
        self.books = Books(self.ledger, self.rules)
        for fact in lost:
            self.send(fact)

    # --- what must hold -------------------------------------------------------------------------------------------------------------

    def check_batch(self, groups: list[int], withheld: list[tuple[int, int]], version: int) -> None:
        if version in self.served:
            assert self.served[version] == (groups, withheld), "a redone batch differs"
        else:
            others = {group_id for other, (served, _) in self.served.items() if other != version for group_id in served}
            assert not others & set(groups), "a group is in two batches"
        self.served[version] = (groups, withheld)
        num_live = sum(not self.teaches_nothing(group_id) for group_id in groups)
        assert num_live == self.rules.batch_groups or len(groups) == self.rules.batch_groups + self.rules.max_refill or not self.rules.max_refill
        lineages = self.ledger.lineages()
        learner = lineages.owner(lineages.current, version)
        assert len(groups) in range(self.rules.batch_groups, self.rules.batch_groups + self.rules.max_refill + 1)
        for group_id in groups:
            unplayed = self.ledger.unplayed(group_id)
            scored = [self.finished[group_id, member].reward is not None for member in range(self.rules.group_size) if member not in unplayed]
            assert sum(scored) >= (self.rules.min_group if unplayed else 1)
            for member in set(range(self.rules.group_size)) - unplayed:
                fact = self.finished[group_id, member]
                assert fact.min_version is not None
                assert fact.max_version is not None
                lag = version - 1 - lineages.reckoned(fact.lineage, fact.min_version, fact.max_version, learner)
                assert (lag > self.rules.max_lag) == ((group_id, member) in withheld), f"group {group_id} member {member} has lag {lag}"

    def teaches_nothing(self, group_id: int) -> bool:
        rewards = {fact.reward for (known, _), fact in self.finished.items() if known == group_id and fact.reward is not None}
        return len(rewards) < 2

    @invariant()
    def the_books_close(self) -> None:
        if hasattr(self, "books"):
            self.books.check()
            assert sum(self.books.counts.values()) == self.books.num_leased
            assert self.books.counts == self.ledger_counts()

    def ledger_counts(self) -> dict[str, int]:
        counts = dict.fromkeys(self.books.counts, 0)
        return counts | self.ledger.counts()

    @invariant()
    def finished_members_are_kept(self) -> None:
        if hasattr(self, "books"):
            for (group_id, member), fact in self.finished.items():
                kept = {row.member: row.attempt for row in self.ledger.members(group_id)}
                assert kept.get(member) == fact.attempt

    @invariant()
    def admission_holds(self) -> None:
        if hasattr(self, "books"):
            unassigned = self.books.counts["open"] + self.books.counts["ready"]
            num_degenerate = sum(row.state == "ready" and self.teaches_nothing(row.group_id) for row in self.ledger.unassigned())
            replaced = min(num_degenerate, self.rules.max_refill)
            assert unassigned - replaced <= self.rules.capacity + self.num_returned, "more is leased than admission allows and forks gave back"
            assert self.books.version == self.version


pytestmark = pytest.mark.timeout(900)  # forty histories of thirty steps

BooksMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestBooks = BooksMachine.TestCase


class HealthyRun(BooksMachine):
    """No fork and no lost actor: then nothing is ever withheld for age."""

    an_actor_falls_silent = None
    the_run_forks = None
    the_learner_resumes_from_an_older_checkpoint = None

    def check_batch(self, groups: list[int], withheld: list[tuple[int, int]], version: int) -> None:
        super().check_batch(groups, withheld, version)
        assert withheld == [], "a healthy run withheld something for age"


HealthyRun.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestHealthyRun = HealthyRun.TestCase
