"""A trial of an environment before a run: made, begun, answered once, every tool called once, closed.

consumes    an environment's id and arguments
waits for   the user's code, on a thread of its own
released by its answers; each step of the trial that takes longer than its limit is given up, and the thread with it
produces    notices, or one line that says what to change
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, EnvError, RollstreamError
from . import registry
from .blame import name_and_text, user_line
from .chat import ChatEnv
from .messages import Message, assistant, assistant_call, named, problem_with

LIMIT_S = 20.0
"""How long one reset or step may take in a trial; a larger ``step_timeout_s`` of the environment counts instead."""
_POLL_S = 0.01
_WORD = "x"


@dataclass(slots=True)
class _Progress:
    """Where a trial is, as its thread tells it."""

    phase: str = "its constructor"
    since: float = field(default_factory=time.monotonic)
    limit_s: float = LIMIT_S
    notices: list[str] = field(default_factory=list[str])
    scored: bool = False
    failure: BaseException | None = None

    def enter(self, phase: str) -> None:
        self.phase, self.since = phase, time.monotonic()


def try_out(env_id: str, kwargs: Mapping[str, Any], *, demonstrates: bool = False, limit_s: float = LIMIT_S) -> list[str]:
    """Plays one plain turn and one call of each tool, and returns what is worth saying although all went well.

    ``demonstrates`` asks for an environment that has demonstrations.

    Raises:
        UnknownEnv: nothing is registered under ``env_id``.
        ConfigError: the environment raised, returned something that is no message, or did not answer; one line naming the id and the method.

    """
    progress = _Progress(limit_s=limit_s)
    thread = threading.Thread(target=_guarded, args=(env_id, kwargs, demonstrates, progress), name="trial", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        if thread.is_alive() and time.monotonic() - progress.since > progress.limit_s:
            raise ConfigError(
                f"{env_id}: {progress.phase} did not return within {progress.limit_s:g} s; make it faster, or allow more with register(…, step_timeout_s=…)"
            )
    failure = progress.failure
    if failure is None:
        return progress.notices
    if isinstance(failure, RollstreamError) and failure.exit_code == ConfigError.exit_code:
        raise failure
    if isinstance(failure, EnvError):
        text = str(failure)
        raise ConfigError(text if env_id in text else f"{env_id}: {text}") from failure
    raise ConfigError(f"{env_id}: {progress.phase} raised {name_and_text(failure)}{user_line(failure)}") from failure


def _guarded(env_id: str, kwargs: Mapping[str, Any], demonstrates: bool, progress: _Progress) -> None:
    try:
        asyncio.run(_play(env_id, kwargs, demonstrates, progress))
    except BaseException as failure:  # noqa: BLE001 - a user's code may raise anything, and the thread that waits tells it
        progress.failure = failure


async def _play(env_id: str, kwargs: Mapping[str, Any], demonstrates: bool, progress: _Progress) -> None:
    env = registry.make(env_id, **kwargs)
    progress.limit_s = max(progress.limit_s, env.step_timeout_s or 0.0)
    if demonstrates and type(env).demonstrate is ChatEnv.demonstrate:
        env.demonstrate(correct=True)  # raises, saying what to write
    progress.enter("start")
    _, info = await env.areset(seed=0)
    if demonstrates:
        await _demonstrate(env_id, env, progress)
    progress.enter("respond")
    await _step(env, assistant("hello"), progress)
    for schema in [tool["function"] for tool in info["tools"]]:
        name, arguments = schema["name"], sample_arguments(schema["parameters"])
        if not schema["description"]:
            progress.notices.append(f"{env_id}: tool {name} has no docstring; the policy reads what a tool does there, write one")
        progress.enter("start")
        await env.areset(seed=0)
        progress.enter(f"tool {name}({json.dumps(arguments, ensure_ascii=False)})")
        await _step(env, assistant_call(name, **arguments), progress)
    if not progress.scored:
        progress.notices.append(
            f"{env_id}: no turn of the trial was scored; where no turn ever gives a reward, rollstream.Turn(text, reward=…), every episode counts 0 and "
            "nothing is learnt"
        )
    progress.enter("close")
    env.close()


async def _demonstrate(env_id: str, env: ChatEnv, progress: _Progress) -> None:
    """Both kinds of demonstration, each after a fresh reset, as the warm-up asks for them."""
    for correct in (True, False):
        await env.areset(seed=0)
        progress.enter(f"demonstrate({correct})")
        messages: Any = env.demonstrate(correct)
        if not isinstance(messages, list) or not messages:
            raise ConfigError(f"{env_id}: demonstrate({correct}) returned {named(messages)}, not the messages of a whole conversation")
        if wrong := next(filter(None, map(problem_with, messages)), None):
            raise ConfigError(f"{env_id}: demonstrate({correct}) holds {wrong}")
        if messages[-1]["role"] != "assistant":
            raise ConfigError(f"{env_id}: demonstrate({correct}) ends with a message of the {messages[-1]['role']}; the last one has to be the assistant's")
    progress.enter("start")
    await env.areset(seed=0)


async def _step(env: ChatEnv, message: Message, progress: _Progress) -> None:
    *_, info = await env.astep(message)
    progress.scored |= info["turn_reward"] is not None or "score_later" in info


def sample_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the required arguments of a tool that its schema allows."""
    return {name: _sample(parameters["properties"][name]) for name in parameters["required"]}


def _sample(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _sample(schema["anyOf"][0])
    makers: dict[str, Callable[[], Any]] = {
        "integer": lambda: 1,
        "number": lambda: 1.0,
        "boolean": lambda: True,
        "null": lambda: None,
        "array": lambda: [_sample(schema["items"])] if "items" in schema else [],
        "object": lambda: {_WORD: _sample(schema["additionalProperties"])} if "additionalProperties" in schema else {},
    }
    return makers.get(schema.get("type", ""), lambda: _WORD)()
