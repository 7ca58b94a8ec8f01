"""The scripted sampler's own promises, beyond those of every sampler."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import xxhash

from rollstream.actors.sampler import SamplingParams
from rollstream.actors.scripted_sampler import ScriptedSampler
from rollstream.buffer.manifest import Manifest
from rollstream.errors import ConfigError

STOPS = frozenset({3, 4})


async def loaded(**settings: float) -> ScriptedSampler:
    sampler = ScriptedSampler(vocab_size=20, **settings)  # type: ignore[arg-type]
    await sampler.load(Manifest(0, 1, xxhash.xxh3_128_hexdigest(b""), 0, 0, []), memoryview(b""))
    return sampler


async def test_log_probabilities_are_those_of_the_distribution_it_draws_from() -> None:
    sampler = await loaded(mean_tokens=5)
    completion = await sampler.generate([1], SamplingParams(max_tokens=200, seed=2, stop_ids=STOPS), session="a")
    stopped = np.isin(completion.token_ids, list(STOPS))
    np.testing.assert_allclose(completion.logprobs, np.where(stopped, math.log(0.2 / 2), math.log(0.8 / 18)), rtol=1e-6)


async def test_turns_have_the_mean_length_asked_for() -> None:
    sampler = await loaded(mean_tokens=5)
    lengths = [len((await sampler.generate([1], SamplingParams(max_tokens=500, seed=s, stop_ids=STOPS), session="a")).token_ids) for s in range(400)]
    assert np.mean(lengths) == pytest.approx(5, abs=0.7)


async def test_the_version_does_not_change_what_is_drawn() -> None:
    sampler = await loaded()
    params = SamplingParams(max_tokens=30, seed=5)
    before = await sampler.generate([1], params, session="a")
    await sampler.load(Manifest(0, 2, xxhash.xxh3_128_hexdigest(b"x"), 0, 1, []), memoryview(b"x"))
    after = await sampler.generate([1], params, session="a")
    np.testing.assert_array_equal(before.token_ids, after.token_ids)
    assert (set(before.versions), set(after.versions)) == ({1}, {2})


async def test_without_stop_tokens_every_turn_runs_to_its_budget() -> None:
    sampler = await loaded(mean_tokens=2)
    completion = await sampler.generate([1], SamplingParams(max_tokens=50, seed=0), session="a")
    assert (len(completion.token_ids), completion.stop_reason) == (50, "length")
    assert completion.logprobs[0] == pytest.approx(math.log(1 / 20))


@pytest.mark.parametrize("settings", [{"vocab_size": 1}, {"vocab_size": 9, "mean_tokens": 0.5}])
def test_a_policy_that_cannot_be_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="at least 2 and 1"):
        ScriptedSampler(**settings)  # type: ignore[arg-type]


def test_it_loads_no_torch() -> None:
    program = "import sys, rollstream.actors.scripted_sampler, rollstream.actors.loop; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout.strip() == "False"
