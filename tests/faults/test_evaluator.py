"""Evaluators are killed, stopped and starved, and so are the buffer and the learner: the books of evaluations close, training never notices."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.buffer.evaluation_tables import FIRST_GROUP
from world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = {"every": 4, "tasks": 4, "samples": 3, "k": [1, 3], "success_at": 0.3, "slots": 4}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "run", 11, num_actors=1, evaluation=SETTINGS)
    yield made
    made.close()


def start(world: World) -> None:
    for name in world.names:
        world.start(name, 1)


def members(world: World) -> set[tuple[Any, ...]]:
    return set(world.rows("SELECT group_id, member, attempt, append_id FROM evaluation_members"))


def states(world: World) -> dict[str, int]:
    return dict(world.rows("SELECT state, count(*) FROM evaluations GROUP BY state"))


def played_twice(world: World) -> list[tuple[int, int]]:
    """(group, member) of evaluations whose acknowledged trajectories came from more than one attempt."""
    found: dict[tuple[int, int], set[int]] = {}
    for entry in world.journal("appended"):
        _, group_id, member, attempt = entry["key"]
        if group_id >= FIRST_GROUP:
            found.setdefault((group_id, member), set()).add(attempt)
    return [key for key, attempts in found.items() if len(attempts) > 1]


@pytest.mark.long
def test_a_killed_evaluator_costs_the_members_it_was_playing_and_no_other(world: World) -> None:
    start(world)
    for _ in range(3):
        world.wait_until(
            lambda: world.rows("SELECT 1 FROM evaluation_groups g JOIN evaluation_members USING (group_id) WHERE g.state = 'open'"), "half a group"
        )
        before = members(world)
        world.kill("evaluator-0")
        world.start("evaluator-0")
        world.wait_until(lambda known=before: len(members(world)) >= len(known) + 4, "the evaluation going on")
        assert before <= members(world), "what was finished stays"
    world.wait_until(lambda: states(world).get("done", 0) >= 2, "two evaluations")
    assert played_twice(world) == [], "a finished member is not played again"
    report = world.audit()
    assert report.num_trained > 0
    attempts = world.rows("SELECT max(attempt) FROM evaluation_groups")[0][0]
    assert 1 <= attempts <= 3, "leased again after each kill"


@pytest.mark.long
def test_a_stopped_evaluator_holds_up_neither_learner_nor_actors_and_what_was_due_meanwhile_is_skipped(world: World) -> None:
    start(world)
    world.wait_until(lambda: members(world), "an evaluation going on")
    os.kill(world.pids["evaluator-0"], signal.SIGSTOP)
    try:
        begun = world.last_batch()
        world.wait_until(lambda: world.last_batch() >= begun + 14, "fourteen versions without the evaluator")
        world.wait_until(lambda: states(world).get("skipped", 0) >= 2, "skipped evaluations")
        reasons = {reason for (reason,) in world.rows("SELECT reason FROM evaluations WHERE state = 'skipped'")}
        assert all(reason.startswith("evaluation.retain 1: kept for evaluations that go on are versions") for reason in reasons)
    finally:
        os.kill(world.pids["evaluator-0"], signal.SIGCONT)
    done = states(world).get("done", 0)
    world.wait_until(lambda: states(world).get("done", 0) > done + 1, "evaluations after it woke up")
    world.check_alive()
    assert set(world.audit().evaluations) >= {"done", "skipped"}


def test_after_kills_of_every_role_the_books_of_evaluations_close_and_every_token_is_of_the_pinned_version(world: World) -> None:
    draw = random.Random(5)
    start(world)
    for _ in range(8):
        time.sleep(draw.uniform(0.1, 0.8))
        victims = draw.choice([("buffer",), ("learner",), ("evaluator-0",), ("learner", "evaluator-0"), tuple(world.names)])
        world.kill(*victims)
        for name in victims:
            world.start(name, draw.randrange(2**31))
    done = states(world).get("done", 0)
    world.wait_until(lambda: states(world).get("done", 0) >= done + 2, "evaluations after the kills")
    before, report, after = len(members(world)), world.audit(), len(members(world))  # the run goes on meanwhile
    assert report.evaluations["done"] >= 2
    assert before <= report.num_evaluated <= after
    assert played_twice(world) == []
    strays = "SELECT count(*) FROM evaluation_members m JOIN evaluation_groups USING (group_id) JOIN evaluations e USING (evaluation_id)"
    assert world.rows(f"{strays} WHERE m.min_version != e.version OR m.max_version != e.version")[0][0] == 0
    assert world.rows("SELECT count(*) FROM members WHERE group_id >= 1099511627776")[0][0] == 0, "nothing evaluated is among what trains"
