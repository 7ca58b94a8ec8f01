"""Roles are killed at random instants, a hundred times and more, and the books close each time.

Real buffer, real actors with the scripted sampler, and a double of the learner whose weights are a digest over every token it was served (``nursery.py``).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nursery
from world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ROUNDS, KILLS_PER_ROUND = 5, 22
VICTIMS = {"buffer": 0.25, "actor-0": 0.2, "actor-1": 0.15, "learner": 0.3, "all": 0.1}


@pytest.fixture
def seed() -> int:
    """Printed when the test fails; give it as ROLLSTREAM_FAULT_SEED to draw the same kills again."""
    seed = int(os.environ.get("ROLLSTREAM_FAULT_SEED", time.time_ns() % 2**31))
    sys.stdout.write(f"ROLLSTREAM_FAULT_SEED={seed}\n")
    return seed


@pytest.fixture
def world(tmp_path: Path, seed: int) -> Iterator[World]:
    made = World(tmp_path / "run", seed)
    yield made
    made.close()


def test_after_a_hundred_kills_nothing_is_lost_and_nothing_is_trained_twice(world: World, seed: int) -> None:
    draw = random.Random(seed)
    for name in world.names:
        world.start(name, draw.randrange(2**31))
    known: set[Any] = set()
    num_kills = 0
    for _ in range(NUM_ROUNDS):
        before = world.last_batch()
        world.wait_until(lambda before=before: world.check_alive() or world.last_batch() >= before + 2, "progress between two rounds")
        for _ in range(KILLS_PER_ROUND):
            time.sleep(min(1.5, draw.expovariate(1 / 0.25)))
            world.check_alive()
            (victim,) = draw.choices(list(VICTIMS), list(VICTIMS.values()))
            victims = draw.sample(world.names, len(world.names)) if victim == "all" else [victim]
            world.kill(*victims)
            num_kills += 1
            known = check_after_kill(world, known)
            for name in victims:
                world.start(name, draw.randrange(2**31))
    drain(world)
    assert num_kills >= 100
    check_the_whole_run(world)


def check_after_kill(world: World, known: set[Any]) -> set[Any]:
    """The books close; what was committed before is still there, by the same attempt in the same append."""
    told = {tuple(entry["key"][1:3]) for entry in world.journal("appended")}
    world.audit()
    members = world.members()
    assert known <= members
    assert told <= {member[:2] for member in members}, "an actor was told that something is stored which is not"
    return members


def drain(world: World) -> None:
    """Every lease of the run so far ends up trained: none was lost."""
    leased = world.audit().num_leased
    unfinished = f"SELECT count(*) FROM groups WHERE group_id < {leased} AND state NOT IN ('trained', 'dropped')"
    world.wait_until(lambda: world.rows(unfinished)[0][0] == 0, f"the first {leased} groups to be trained")
    world.check_alive()


def check_the_whole_run(world: World) -> None:
    counters = world.counters()
    assert counters["digests_differ"] == 0
    assert counters["refused"] == 0
    report = world.audit()
    assert report.num_age_drops == 0
    assert counters["invalid_infra"] + counters["invalid_env"] == 0
    served: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in world.journal("pulled"):
        served[entry["version"]].append(entry)
    assert any(len(entries) > 1 for entries in served.values()), "nothing was ever redone"
    for version, entries in served.items():
        assert len({entry["content"] for entry in entries}) == 1, f"batch {version} differs between servings"
        assert all(entry["recorded"] for entry in entries[1:])
    world.kill("learner")
    weights = {0: "none"}
    for version in sorted(served):
        weights[version] = nursery.next_weights(weights[version - 1], served[version][0]["content"])
    for path in (world.run.folder / "double").glob("v*.json"):
        saved = json.loads(path.read_text())
        assert saved["weights"] == weights[saved["version"]], "the weights are not those of each batch trained once, in order"
