"""The key-value environment: its rewards, its end, its demonstrations."""

import pytest

from rollstream.envs import registry
from rollstream.envs.messages import assistant, assistant_call, user
from rollstream.errors import ConfigError


@pytest.fixture
def env():
    env = registry.make("rollstream/KeyValue-v0")
    env.reset(seed=4)
    return env


def other_key(env):
    return next(key for key in env.keys if key != env._key)


def wrong_digit(env):
    return str((int(env._store[env._key]) + 1) % 10)


def test_looking_up_and_answering_earns_both_rewards(env):
    messages, reward, terminated, *_ = env.step(assistant_call("get", key=env._key))
    assert reward == pytest.approx(0.3)
    assert not terminated
    _, reward, terminated, truncated, info = env.step(messages[0]["content"])
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["metrics"]["success"] == 1.0
    assert info["reward_parts"] == pytest.approx({"lookup": 0.3, "answer": 1.0})


def test_the_lookup_is_rewarded_once_and_only_for_the_right_key(env):
    rewards = [env.step(assistant_call("get", key=key))[1] for key in (other_key(env), env._key, env._key)]
    assert rewards == pytest.approx([0.0, 0.3, 0.0])


def test_a_guess_counts_but_a_wrong_digit_ends_the_episode_with_nothing(env):
    assert env.step(env._store[env._key])[1:3] == (1.0, True)
    env.reset(seed=4)
    _, reward, terminated, _, info = env.step(wrong_digit(env))
    assert (reward, terminated, info["metrics"]["success"]) == (0.0, True, 0.0)


@pytest.mark.parametrize(
    ("action", "reply"),
    [
        ("", "say one digit"),
        ("b", "say one digit"),
        ("12", "say one digit"),
        ("٣", "say one digit"),
        (assistant_call("get", key="z"), "no such key"),
        (assistant_call("get", kee="b"), "get has no argument 'kee'; it takes: key"),
        (assistant_call("put", key="b"), "unknown tool 'put'; tools: get"),
        ({**assistant("<|call|>get("), "malformed": "malformed call"}, "malformed call"),
    ],
)
def test_nonsense_costs_and_the_episode_goes_on(env, action, reply):
    messages, reward, terminated, truncated, info = env.step(action)
    assert messages[0]["content"] == reply
    assert reward == pytest.approx(-0.1)
    assert (terminated, truncated) == (False, False)
    assert info["metrics"]["success"] == 0.0


def test_the_third_turn_is_the_last(env):
    assert [env.step("hm")[3] for _ in range(3)] == [False, False, True]


def test_the_seed_draws_store_and_key():
    env = registry.make("rollstream/KeyValue-v0", keys="xyz")
    drawn = set()
    for seed in range(50):
        first = (env.reset(seed=seed)[0], env._store)
        assert (env.reset(seed=seed)[0], env._store) == first
        drawn.add((env._key, env._store[env._key]))
    assert {key for key, _ in drawn} == set("xyz")
    assert len(drawn) > 20


def test_keys_must_be_told_apart():
    with pytest.raises(ConfigError, match="at least 2 different letters"):
        registry.make("rollstream/KeyValue-v0", keys="a")


@pytest.mark.parametrize("correct", [True, False])
def test_a_demonstration_is_an_episode_the_environment_would_play(correct):
    env = registry.make("rollstream/KeyValue-v0")
    seen = set()
    for seed in range(60):
        said, _ = env.reset(seed=seed)
        script = env.demonstrate(correct)
        played, total, ended = list(said), 0.0, False
        for message in script:
            if message["role"] == "assistant":
                assert not ended
                replies, reward, ended, truncated, info = env.step(message)
                played += [message, *([] if ended or truncated else replies)]
                total += reward
        assert played == script
        assert ended
        assert info["metrics"]["success"] == float(correct)
        seen.add(tuple(str(message.get("tool_calls") or message["role"]) for message in script))
        if correct:
            assert total == pytest.approx(1.3)
    assert len(seen) > (1 if correct else 5)


def test_demonstrations_are_drawn_from_the_seed():
    def script(seed):
        env = registry.make("rollstream/KeyValue-v0")
        env.reset(seed=seed)
        return [env.demonstrate(False) for _ in range(5)]

    assert script(1) == script(1)
    assert script(1) != script(2)
    assert script(1)[0][0] == user(script(1)[1][0]["content"])
