"""The lag bound where it is hardest to keep: episodes whose lengths have a heavy tail."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MAX_LAG, NUM_VERSIONS = 3, 90


def test_with_a_heavy_tail_of_lengths_the_lag_bound_is_met_and_reached_and_long_episodes_are_trained_like_short_ones(tmp_path: Path) -> None:
    world = World(
        tmp_path / "run",
        seed=7,
        step_s=0.01,
        env={"kwargs": {"median_s": 0.01, "sigma": 1.6, "longest_s": 1.5}},
        buffer={"depth": 1, "max_lag": MAX_LAG},
        actors={"slots": 12, "sampler": {"kind": "scripted", "token_delay_s": 0.004}},
        learner={"versions": NUM_VERSIONS, "batch_groups": 3, "group_size": 2},
    )
    try:
        for name in world.names:
            world.start(name)
        world.wait_until(lambda: world.last_batch() == NUM_VERSIONS and world.audit().version == NUM_VERSIONS, f"version {NUM_VERSIONS}", 120)
        report = world.audit()
        lags = [lag for (lag,) in world.rows("SELECT max_lag FROM batches")]
        tokens = [num_tokens for (num_tokens,) in world.rows("SELECT num_tokens FROM members")]
    finally:
        world.close()
    assert (max(lags), report.lag_bound) == (MAX_LAG, MAX_LAG), "the bound is kept, and the window is used up to it"
    assert report.num_age_drops == 0
    # nothing is leased that is not trained, so what was trained has the lengths of what was played, to the last token
    assert report.counts == {"open": 0, "ready": 0, "assigned": 0, "trained": 3 * NUM_VERSIONS, "dropped": 0}
    (bias,) = report.bias.values()
    assert bias.num_trained == bias.num_leased == 6 * NUM_VERSIONS
    assert math.isclose(bias.trained_tokens_mean, bias.leased_tokens_mean)
    assert max(tokens) > 2 * sorted(tokens)[len(tokens) // 2], "some episodes are far longer than the usual one"
