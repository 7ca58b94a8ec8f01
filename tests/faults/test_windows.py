"""Every window of recovery (ARCHITECTURE, "Recovery, window by window"): a role is killed at that very instant, the others wait for it, and nothing is lost.

Real buffer and actors; the learner is the double of ``nursery.py``, whose weights are a digest over everything it was served. What the real learner makes of
its windows is in ``test_learner_windows.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

import failpoints
from world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One run, through all windows: what each leaves behind is what the next begins with."""
    made = World(tmp_path_factory.mktemp("windows") / "run", 11, step_s=0.02)
    for name in made.names:
        made.start(name)
    yield made
    made.close()


def go_on(world: World, batches: int = 3) -> None:
    before = world.last_batch()
    world.wait_until(lambda: world.last_batch() >= before + batches, f"{batches} more batches")
    world.check_alive()


@pytest.mark.parametrize("window", failpoints.WINDOWS)
def test_a_death_in_any_window_costs_no_lease_no_row_and_no_version(world: World, window: str) -> None:
    victim = failpoints.WINDOWS[window][0]
    go_on(world)
    world.kill(victim)
    world.start(victim, die_at=window)
    world.wait_until(lambda: not world.is_alive(victim), f"the {victim} to die where {window}")
    world.kill(victim)  # gone with all its threads
    told = {tuple(entry["key"][1:3]) for entry in world.journal("appended")}
    members = world.members()
    world.audit()
    assert told <= {member[:2] for member in members}, "an actor was told that something is stored which is not"
    world.start(victim)
    go_on(world)
    assert members <= world.members(), "a finished member was lost"
    world.audit()
    counters = world.counters()
    assert (counters["refused"], counters["digests_differ"], counters["age_drops"]) == (0, 0, 0)
    served: dict[int, set[str]] = defaultdict(set)
    for entry in world.journal("pulled"):
        served[entry["version"]].add(entry["content"])
    assert {version for version, contents in served.items() if len(contents) > 1} == set(), "a recorded batch was served again as another"
    leased = world.audit().num_leased
    unfinished = f"SELECT count(*) FROM groups WHERE group_id < {leased} AND state NOT IN ('trained', 'dropped')"
    world.wait_until(lambda: world.rows(unfinished)[0][0] == 0, f"the first {leased} groups to be trained")


def test_an_actor_that_holds_more_of_the_old_lineage_takes_the_new_weights_before_it_plays_for_the_new(world: World) -> None:
    """Buffer and learner die, the actors live on; the run forks below what the actors hold; what they were playing is taken as it comes."""
    go_on(world, 6)
    world.kill("learner", "buffer")
    held = world.last_batch()
    fork = world.fork_at_an_older_checkpoint()
    assert fork["version"] < held
    known = len(world.journal("appended"))
    world.start("buffer", fork=fork)
    world.start("learner", fork=fork)
    world.wait_until(lambda: world.rows("SELECT count(*) FROM batches WHERE lineage = 1")[0][0] >= 6, "six batches of the new lineage")
    world.check_alive()
    report = world.audit()
    assert (report.lineage, report.abandoned) == (1, {0: held - fork["version"]})
    assert world.counters()["refused"] == 0
    keys = [entry["key"] for entry in world.journal("appended")[known:]]
    assert [key[0] for key in keys] == sorted(key[0] for key in keys) or {0, 1} == {key[0] for key in keys}
    first_of_new = world.rows("SELECT min(min_version), max(max_version) FROM members WHERE lineage = 1")[0]
    assert first_of_new[0] >= fork["version"], "under the new lineage nothing older than the fork was sampled"
    for name in ("actor-0", "actor-1"):
        loaded = [line for line in world.whole_log(name).splitlines() if "weights=loaded lineage=1" in line]
        assert loaded, "the actor never took the new weights"
        assert int(loaded[0].split("version=")[1].split()[0]) < held, "their number is lower than what it held"
