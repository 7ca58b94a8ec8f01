"""The word-count environment: what an answer earns."""

import pytest

from rollstream.envs import registry
from rollstream.errors import ConfigError


@pytest.fixture
def env():
    env = registry.make("rollstream/WordCount-v0", least=4, most=4)
    (_, message), _ = env.reset(seed=1)
    assert message["content"].endswith("in exactly 4 words.")
    return env


@pytest.mark.parametrize(
    ("answer", "reward", "success"),
    [
        ("Deep blue salty waves.", 1.0, 1.0),
        ("It's wide-open, grey, cold", 1.0, 1.0),
        ("blue and deep", 0.75, 0.0),
        ("one two three four five six", 0.5, 0.0),
        ("blue Blue blue blue", 0.25, 0.0),
        ("a b c d e f g h i j", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("4 4 4 4", 0.0, 0.0),
    ],
)
def test_the_reward_falls_with_every_word_too_many_too_few_or_repeated(env, answer, reward, success):
    _, earned, terminated, _, info = env.step(answer)
    assert (earned, terminated, info["metrics"]["success"]) == (pytest.approx(reward), True, success)


def test_the_task_comes_from_the_seed():
    env = registry.make("rollstream/WordCount-v0")
    asked = [env.reset(seed=seed)[0][1]["content"] for seed in range(40)]
    assert asked == [env.reset(seed=seed)[0][1]["content"] for seed in range(40)]
    assert {text.split()[-2] for text in asked} == {"3", "4", "5", "6"}


@pytest.mark.parametrize("bounds", [{"least": 0}, {"least": 4, "most": 3}])
def test_bounds_that_hold_no_number_are_refused(bounds):
    with pytest.raises(ConfigError, match="least"):
        registry.make("rollstream/WordCount-v0", **bounds)
