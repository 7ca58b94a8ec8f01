"""What an environment does wrong is known before a run, in one line."""

# the environments here are written as a user would write them

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch

from rollstream.envs import registry
from rollstream.envs.chat import ChatEnv, Turn, tool
from rollstream.envs.trial import sample_arguments, try_out
from rollstream.errors import ConfigError, InfraError

ID = "test-trial/It-v0"


class Good(ChatEnv):
    def start(self, task):
        return "hi"

    def respond(self, message):
        return Turn("ok", reward=1.0, done=True)


class StartRaises(Good):
    def start(self, task):
        raise KeyError("no such task")


class StartHangs(Good):
    async def start(self, task):
        await asyncio.sleep(60)


class RespondSleeps(Good):
    def respond(self, message):
        time.sleep(5)


class RespondExits(Good):
    def respond(self, message):
        sys.exit(3)


class RespondInterrupts(Good):
    def respond(self, message):
        raise KeyboardInterrupt


class RespondTuple(Good):
    def respond(self, message):
        return "ok", 1.0, True


class StartTuple(Good):
    def start(self, task):
        return "ok", {}


class ToolTuple(Good):
    @tool
    def look(self, where: str):
        """Look."""
        return "ok", 1.0


class BoolReward(Good):
    def respond(self, message):
        return Turn("ok", reward=True)


class ToolRaises(Good):
    @tool
    def look(self, where: Literal["left", "right"], times: int, hint: str = "none"):
        """Look."""
        return [1][times]


class NoServer(Good):
    def start(self, task):
        raise InfraError("the store is down")


class NoStart(ChatEnv):
    def respond(self, message):
        return "ok"


class NoHint(Good):
    @tool
    def look(self, where):
        """Look."""


class CloseRaises(Good):
    def close(self):
        raise OSError("still open")


def registered(monkeypatch: pytest.MonkeyPatch, env_class: type[ChatEnv]) -> None:
    monkeypatch.setattr(registry, "_registrations", dict(registry._registrations))
    monkeypatch.setattr(registry, "_gymnasium", registry._gymnasium)
    registry._registrations.pop(ID, None)
    registry._gymnasium.pop(ID, None)
    registry.register(ID, env_class)


@pytest.mark.parametrize(
    ("env_class", "line"),
    [
        (StartRaises, "test-trial/It-v0: start raised KeyError: 'no such task' (test_trial.py, line "),
        (StartHangs, "test-trial/It-v0: start did not return within 0.3 s; make it faster, or allow more with register(…, step_timeout_s=…)"),
        (RespondSleeps, "test-trial/It-v0: respond did not return within 0.3 s"),
        (RespondExits, "test-trial/It-v0: respond raised SystemExit: 3 (test_trial.py, line "),
        (RespondInterrupts, "test-trial/It-v0: respond raised KeyboardInterrupt (test_trial.py, line "),
        (RespondTuple, "test-trial/It-v0: respond returned a tuple; return text, a message, a list of those, or rollstream.Turn(text, reward=…)"),
        (StartTuple, "test-trial/It-v0: start returned a tuple"),
        (ToolTuple, "test-trial/It-v0: look returned a tuple"),
        (BoolReward, "test-trial/It-v0: respond returned reward True; a reward is a number: write 1.0"),
        (ToolRaises, "test-trial/It-v0: look raised IndexError: list index out of range (test_trial.py, line "),
        (NoServer, "test-trial/It-v0: the store is down"),
        (NoStart, "test-trial/It-v0: NoStart has no start(self, task)"),
        (NoHint, "test-trial/It-v0: tool NoHint.look: argument where has no type hint"),
        (CloseRaises, "test-trial/It-v0: close raised OSError: still open (test_trial.py, line "),
    ],
)
def test_a_faulty_environment_is_refused_in_one_line(env_class: type[ChatEnv], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, env_class)
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        try_out(ID, {}, limit_s=0.3 if "did not return" in line else 20.0)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 4, "a hanging method is not waited for"


def test_every_tool_is_called_once_after_a_fresh_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []

    class Tools(Good):
        def start(self, task):
            heard.append("reset")
            return "hi"

        @tool
        def first(self, name: str, sizes: list[int], side: Literal["left", "right"], extra: int = 3):
            """Do the first."""
            heard.append((name, sizes, side, extra))
            return Turn("done", done=True)

        @tool
        def second(self, share: float | None, options: dict[str, bool]):
            heard.append((share, options))
            return "done"

        def close(self):
            heard.append("close")

    registered(monkeypatch, Tools)
    notices = try_out(ID, {})
    assert heard == ["reset", "reset", ("x", [1], "left", 3), "reset", (1.0, {"x": True}), "close"]
    assert notices == [f"{ID}: tool second has no docstring; the policy reads what a tool does there, write one"]


def demonstrating(gives: Callable[[bool], Any]) -> type[ChatEnv]:
    class Demonstrating(Good):
        def demonstrate(self, correct):
            return gives(correct)

    return Demonstrating


HI, BYE = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "bye"}


@pytest.mark.parametrize(
    ("gives", "line"),
    [
        (lambda correct: [][1], r"demonstrate\(True\) raised IndexError: list index out of range \(test_trial\.py, line \d+\)"),
        (lambda correct: [HI, BYE] if correct else None, r"demonstrate\(False\) returned None, not the messages of a whole conversation"),
        (lambda correct: [], r"demonstrate\(True\) returned .*, not the messages of a whole conversation"),
        (lambda correct: [HI, "bye"], r"demonstrate\(True\) holds a str, which is neither text nor a message"),
        (lambda correct: [HI], r"demonstrate\(True\) ends with a message of the user; the last one has to be the assistant's"),
    ],
)
def test_faulty_demonstrations_are_refused_where_they_are_asked_for(gives: Callable[[bool], Any], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, demonstrating(gives))
    with pytest.raises(ConfigError, match=f"{ID}: {line}"):
        try_out(ID, {}, demonstrates=True)
    assert try_out(ID, {}) == []


def test_sound_demonstrations_are_asked_for_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    registered(monkeypatch, demonstrating(lambda correct: asked.append(correct) or [HI, BYE]))
    assert try_out(ID, {}, demonstrates=True) == []
    assert asked == [True, False]


def test_a_longer_step_timeout_of_the_environment_counts_in_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Good):
        step_timeout_s = 5.0

        async def start(self, task):
            await asyncio.sleep(0.5)
            return "hi"

    registered(monkeypatch, Slow)
    assert try_out(ID, {}, limit_s=0.2) == []


def test_sample_arguments_fit_a_schema_without_a_type() -> None:
    properties = {"a": {}, "b": {"type": "null"}, "c": {"type": "array"}}
    assert sample_arguments({"properties": properties, "required": ["a", "b", "c"]}) == {
        "a": "x",
        "b": None,
        "c": [],
    }


def saying(says: Any) -> type[ChatEnv]:
    class Says(Good):
        def respond(self, message):
            return says

    return Says


IMAGE = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]


@pytest.mark.parametrize(
    ("says", "line"),
    [
        (
            1.0,
            "respond returned 1.0, which is neither text nor a message (a dict with role and content); return text, a message, a list of them",
        ),
        (None, "respond returned None, which is neither text nor a message (a dict with role and content); return text"),
        (np.zeros(2), "respond returned a ndarray, which is neither text nor a message"),
        ({"role": "user", "content": IMAGE}, "respond returned a message whose content is a list, not text; images in observations are not there yet"),
        (
            IMAGE[1:],
            "respond returned a part of type 'image_url', which is no message (a dict with role and content); images in observations are not there yet",
        ),
        ({"role": "robot", "content": ""}, "respond returned a message with role 'robot', which is none of system, user, assistant, tool"),
        (Turn("ok", reward=torch.tensor(1.0)), "respond returned reward tensor(1.), a tensor; give float(…)"),
        (Turn("ok", reward=torch.zeros(2, 2)), "respond returned reward tensor([[0., 0.], [0., 0.]]), a tensor; give float(…)"),
        (Turn("ok", reward_parts={"style": np.array(1.0)}), "respond returned style array(1.), a ndarray; give float(…)"),
        (Turn("ok", metrics={"success": None}), "respond returned success None; it must be a finite number"),  # type: ignore[dict-item]
    ],
)
def test_what_is_no_answer_is_told_in_a_sentence(says: Any, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, saying(says))
    with pytest.raises(ConfigError) as caught:
        try_out(ID, {})
    assert str(caught.value).startswith(f"{ID}: {line}")


def test_an_environment_that_scores_no_turn_of_the_trial_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, saying(Turn("ok", reward=None)))
    (notice,) = try_out(ID, {})
    assert notice.startswith(f"{ID}: no turn of the trial was scored")
    for scored in (Turn("ok", reward=0.0), Turn("ok", reward_parts={"style": 0.0}), Turn("ok", score_later=True, done=True)):
        registered(monkeypatch, saying(scored))
        assert try_out(ID, {}) == []
