"""ChatEnv: what a user's class gets, and what happens when it is wrong."""

import asyncio
import subprocess
import sys
import textwrap

import pytest
from gymnasium.utils.env_checker import check_env

from rollstream import ChatEnv, Turn, tool
from rollstream.envs import registry
from rollstream.envs.messages import assistant, assistant_call, user
from rollstream.errors import ConfigError, EnvError, InfraError


class Safe(ChatEnv):
    """The example of the documentation."""

    max_turns = 6

    def start(self, task):
        self.code = int(self.np_random.integers(10, 99))
        return "Open the safe. Use try_code."

    @tool
    async def try_code(self, code: int):
        """Try a two-digit code."""
        await asyncio.sleep(0)
        if code == self.code:
            return Turn("open", reward=1.0, done=True, metrics={"success": 1.0})
        return "higher" if code < self.code else "lower"

    def respond(self, message):
        return Turn("use the tool", reward=-0.1)


class Counter(ChatEnv):
    """Two tools that reward, to see how turns add up."""

    num_tasks = 5

    async def start(self, task):
        self.count = 0
        return [{"role": "system", "content": "count"}, f"task {task}"]

    @tool
    def add(self, amount: int = 1):
        """Add."""
        self.count += amount
        return Turn(str(self.count), reward_parts={"add": 0.5, "size": amount / 10}, metrics={"adds": 1, "success": self.count})

    @tool
    def finish(self):
        """Finish."""
        return Turn("bye", reward=1, done=True)

    @tool
    def state(self):
        """Tell the state."""
        return {"count": self.count, "name": "zähler"}


def calls(*pairs):
    return {"role": "assistant", "content": "", "tool_calls": [call for name, arguments in pairs for call in assistant_call(name, **arguments)["tool_calls"]]}


@pytest.mark.parametrize("env_class", [Safe, Counter])
def test_a_conversation_passes_the_gymnasium_checker(env_class):
    check_env(env_class().unwrapped, skip_render_check=True)


@pytest.mark.parametrize("env_id", [env_id for env_id in registry.registered_ids() if env_id.startswith("rollstream/")])
def test_every_shipped_environment_passes_the_gymnasium_checker(env_id):
    check_env(registry.make(env_id), skip_render_check=True)


def test_the_documented_example_plays():
    env = Safe()
    messages, info = env.reset(seed=1)
    assert messages == (user("Open the safe. Use try_code."),)
    assert info["tools"][0]["function"]["name"] == "try_code"
    assert info["metrics"] == {"malformed_tool_calls": 0.0, "tool_calls": 0.0}
    _, reward, terminated, _, info = env.step("let me think")
    assert (reward, terminated, info["turn_reward"]) == (-0.1, False, -0.1)
    messages, reward, *_, info = env.step(assistant_call("try_code", code=99))
    assert messages == ({"role": "tool", "content": "lower", "name": "try_code"},)
    assert (reward, info["turn_reward"]) == (0.0, None)
    _, reward, terminated, truncated, info = env.step(assistant_call("try_code", code=env.code))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["metrics"]["success"] == 1.0


async def test_members_of_a_group_share_the_task_through_the_seed():
    first, second, other = Safe(), Safe(), Safe()
    await first.areset(seed=7)
    await second.areset(seed=7)
    await other.areset(seed=8)
    assert first.code == second.code != other.code


def test_a_task_index_is_taken_modulo_the_number_of_tasks():
    assert Counter().reset(seed=0, options={"task_index": 12})[0][1] == user("task 2")


def test_without_an_index_the_seed_draws_the_task():
    drawn = {Counter().reset(seed=seed)[1]["task_index"] for seed in range(40)}
    assert drawn == set(range(5))
    assert Counter().reset(seed=3)[1]["task_index"] == Counter().reset(seed=3)[1]["task_index"]


@pytest.mark.parametrize("options", [{"task_index": -1}, {"task_index": "two"}, {"task_index": True}, {"task": 1}])
def test_a_wrong_reset_option_is_refused(options):
    with pytest.raises(EnvError, match="task_index"):
        Counter().reset(options=options)


def test_parallel_calls_are_answered_in_order_and_their_rewards_add_up():
    env = Counter()
    env.reset(seed=0)
    message = calls(("add", {"amount": 2}), ("add", {}), ("state", {}))
    messages, reward, terminated, _, info = env.step(message)
    assert [m["content"] for m in messages] == ["2", "3", '{"count": 3, "name": "zähler"}']
    assert [m["name"] for m in messages] == ["add", "add", "state"]
    assert reward == pytest.approx(1.3)
    assert not terminated
    assert info["reward_parts"] == pytest.approx({"add": 1.0, "size": 0.3})


def test_calls_after_the_end_of_the_episode_are_not_carried_out():
    env = Counter()
    env.reset(seed=0)
    messages, reward, terminated, *_ = env.step(calls(("add", {}), ("finish", {}), ("add", {})))
    assert [m["content"] for m in messages] == ["1", "bye"]
    assert reward == pytest.approx(1.6)
    assert terminated
    assert env.count == 1


def test_an_episode_may_end_without_a_word():
    class Curt(Safe):
        def respond(self, message):
            return Turn(reward=1.0, done=message["content"] == "stop")

    env = Curt()
    env.reset(seed=0)
    assert env.step("go on")[0] == (user(""),)
    assert env.step("stop")[:3] == ((), 1.0, True)


def test_metrics_add_up_and_success_is_the_latest():
    env = Counter()
    env.reset(seed=0)
    env.step(calls(("add", {"amount": 4}), ("add", {"amount": 1})))
    info = env.step(assistant_call("add", amount=-3))[-1]
    assert info["metrics"] == {"malformed_tool_calls": 0.0, "tool_calls": 3.0, "adds": 3.0, "success": 2.0}


def test_the_identity_of_a_call_returns_with_its_result():
    env = Counter()
    env.reset(seed=0)
    message = assistant_call("state")
    message["tool_calls"][0]["id"] = "call_7"
    assert env.step(message)[0][0]["tool_call_id"] == "call_7"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (assistant_call("try_code", code="x"), "code must be an integer, not 'x'"),
        (assistant_call("try_code", code=True), "code must be an integer, not True"),
        (assistant_call("try_code"), "argument code is missing"),
        (assistant_call("try_code", code=1, speed=2), "has no argument 'speed'; it takes: code"),
        (assistant_call("open", code=1), "unknown tool 'open'; tools: try_code"),
        (assistant_call("__init__"), "unknown tool '__init__'"),
        ({**assistant("<tool_call>{"), "malformed": "malformed call: not JSON"}, "malformed call: not JSON"),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_an_observation_and_a_metric(message, said):
    env = Safe()
    env.reset(seed=0)
    messages, reward, terminated, truncated, info = env.step(message)
    assert messages[0]["role"] == "tool"
    assert said in messages[0]["content"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info["metrics"]["malformed_tool_calls"] == 1.0


@pytest.mark.parametrize(("arguments", "said"), [('{"code": 5}', "er"), ('{"code": ', "arguments are not JSON"), ("[5]", "must be an object")])
def test_arguments_may_come_as_json_text(arguments, said):
    env = Safe()
    env.reset(seed=0)
    message = assistant_call("try_code")
    message["tool_calls"][0]["function"]["arguments"] = arguments
    assert said in env.step(message)[0][0]["content"]


def test_running_out_of_turns_truncates():
    env = Safe()
    env.reset(seed=0)
    outcomes = [env.step("hello")[2:] for _ in range(6)]
    assert all(outcome[:2] == (False, False) for outcome in outcomes[:-1])
    assert outcomes[-1][:2] == (False, True)
    assert outcomes[-1][2]["truncation"] == "turns"


def test_an_environment_of_one_turn_says_terminated():
    env = Safe()
    env.max_turns = 1
    env.reset(seed=0)
    assert env.step("hello")[2:4] == (True, False)
    check_env(env, skip_render_check=True)


def test_a_step_after_the_end_is_refused():
    env = Counter()
    with pytest.raises(EnvError, match="call reset first"):
        env.step("too early")
    env.reset(seed=0)
    env.step(assistant_call("finish"))
    with pytest.raises(EnvError, match="call reset first"):
        env.step("too late")


class Broken(ChatEnv):
    """Every way to be wrong, chosen by the task or the argument."""

    def start(self, task):
        return "go"

    def respond(self, message):
        replies = {"nothing": None, "number": 3, "nan": Turn(reward=float("nan")), "text": Turn(reward="1")}
        replies |= {"half": "\ud800", "half in a list": [user("a"), user("b\udfff")]}
        return {**replies, "bool": Turn(reward=True), "pair": ("a", 1.0)}[message["content"]]

    @tool
    def fail(self, how: str):
        """Fail."""
        if how == "infra":
            raise InfraError("the store is down")
        if how == "none":
            return None
        if how == "object":
            return object()
        if how == "tuple":
            return "text", 1.0
        raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("nothing", "Broken: respond returned None, which is neither text nor a message (a dict with role and content); return text, a message, a list"),
        ("number", "Broken: respond returned 3, which is neither text nor a message"),
        ("nan", "respond returned reward nan; it must be a finite number"),
        ("text", "respond returned reward '1', a str; give a finite number"),
        ("half", r"respond returned content with half a character ('\ud800' at 0), which is no text"),
        ("half in a list", r"respond returned content with half a character ('\udfff' at 1)"),
        ("bool", "respond returned reward True; a reward is a number: write 1.0"),
        ("pair", "Broken: respond returned a tuple; return text, a message, a list of those, or rollstream.Turn(text, reward=…)"),
        (assistant_call("fail", how="tuple"), "Broken: fail returned a tuple; return text"),
        ("unheard of", "Broken: respond raised KeyError: 'unheard of'"),
        (assistant_call("fail", how="raise"), "Broken: fail raised ZeroDivisionError: division by zero"),
        (assistant_call("fail", how="none"), "Broken: fail returned None; return text"),
        (assistant_call("fail", how="object"), "Broken: fail returned object, which is neither text nor JSON"),
        (user("hello"), "step needs text or an assistant message and was given a message with role 'user'"),
        (5, "step needs text or an assistant message and was given 5, which is neither"),
    ],
)
def test_a_mistake_in_user_code_names_environment_and_method(message, error):
    env = Broken()
    env.reset()
    with pytest.raises(EnvError) as caught:
        env.step(message)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, InfraError)


def test_a_tool_may_call_its_arguments_what_it_likes():
    class Names(ChatEnv):
        def start(self, task):
            return "go"

        @tool
        def greet(self, name: str, method: str):
            """Greet."""
            return f"{name} {method}"

    env = Names()
    env.reset()
    assert env.step(assistant_call("greet", name="Ada", method="wave"))[0][0]["content"] == "Ada wave"


def test_an_infrastructure_failure_stays_one():
    env = Broken()
    env.reset()
    with pytest.raises(InfraError, match="the store is down"):
        env.step(assistant_call("fail", how="infra"))


def test_an_incomplete_class_is_refused_at_construction():
    class Silent(ChatEnv):
        def respond(self, message):
            return "hm"

    class Deaf(ChatEnv):
        def start(self, task):
            return "hello"

    class Untyped(Deaf):
        @tool
        def press(self, key):
            """Press."""
            return key

    class Taskless(ChatEnv):
        def start(self):
            return "hello"

        def respond(self, message):
            return "hm"

    for env_class, error in [
        (Silent, "has no start"),
        (Deaf, "neither respond"),
        (Untyped, "tool Untyped.press: argument key has no type hint"),
        (Taskless, "must be written start"),
    ]:
        with pytest.raises(EnvError, match=error):
            env_class()


def test_a_start_that_says_nothing_is_refused():
    class Mute(Safe):
        def start(self, task):
            return []

    with pytest.raises(EnvError, match="start returned no message"):
        Mute().reset()


def test_an_override_of_a_tool_stays_a_tool():
    class Polite(Safe):
        def try_code(self, code: int):
            """Try, please."""
            return "thank you"

    env = Polite()
    assert env.reset()[1]["tools"][0]["function"]["description"] == "Try, please."
    assert env.step(assistant_call("try_code", code=1))[0][0]["content"] == "thank you"


def test_a_constructor_need_not_call_ours_and_unknown_arguments_are_refused():
    class Sized(Safe):
        def __init__(self, size: int):
            self.size = size

    env = Sized(3)
    env.reset(seed=0)
    assert env.step("hi")[1] == -0.1
    with pytest.raises(TypeError):
        Safe(size=3)


def test_a_constant_observation_is_handed_out_as_a_copy():
    class Constant(Safe):
        message = user("same every time")

        def start(self, task):
            return self.message

    env = Constant()
    first, _ = env.reset()
    first[0]["content"] = "changed"
    assert env.reset()[0] == (user("same every time"),)


class Slow(ChatEnv):
    def start(self, task):
        return "wait"

    @tool
    async def nap(self):
        """Sleep."""
        await asyncio.sleep(30)

    @tool
    def busy(self):
        """Keep the loop busy."""
        import time

        time.sleep(0.05)
        return "done"


@pytest.mark.parametrize("name", ["nap", "busy"])
def test_a_step_that_takes_too_long_fails_as_infrastructure(name):
    env = Slow()
    env.step_timeout_s = 0.02
    env.reset()
    with pytest.raises(InfraError, match=r"step took longer than step_timeout_s=0\.02"):
        env.step(assistant_call(name))


def test_an_episode_that_takes_too_long_is_truncated_by_time():
    env = Slow()
    env.episode_timeout_s = 0.01
    env.reset()
    *_, truncated, info = env.step(assistant_call("busy"))
    assert truncated
    assert info["truncation"] == "time"


def test_an_environment_without_demonstrations_says_what_to_do():
    with pytest.raises(ConfigError, match="write demonstrate"):
        Safe().demonstrate(True)


def test_without_respond_the_policy_is_told_to_use_the_tools():
    env = Counter()
    env.reset()
    assert env.step("hello")[0] == (user("use a tool: add, finish, state"),)


async def test_the_sync_facade_works_inside_a_running_loop():
    env = Safe()
    env.reset(seed=0)
    assert env.step("hello")[1] == -0.1


def test_the_sync_facade_inside_an_environment_is_refused_instead_of_hanging():
    class Nested(Safe):
        def start(self, task):
            Safe().reset()
            return "never"

    with pytest.raises(EnvError, match="await areset"):
        Nested().reset()


def test_the_sync_facade_survives_a_fork_and_leaves_nothing_behind():
    script = """
        import os
        from rollstream.envs import registry
        env = registry.make("rollstream/KeyValue-v0")
        env.reset(seed=0)
        child = os.fork()
        if child == 0:
            env.reset(seed=1)
            os._exit(0 if env.step("5")[2] else 1)
        assert os.waitpid(child, 0)[1] == 0
        env.step("5")
    """
    done = subprocess.run([sys.executable, "-W", "error", "-X", "dev", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
