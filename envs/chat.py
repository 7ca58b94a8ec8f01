"""ChatEnv: a conversation with tools as a Gymnasium environment.

A user writes one class::

    class Safe(ChatEnv):
        max_turns = 6

        def start(self, task):
            self.code = self.np_random.integers(10, 99)
            return "Open the safe. Use try_code."

        @tool
        def try_code(self, code: int):
            "Try a two-digit code."
            if code == self.code:
                return Turn("open", reward=1.0, done=True, metrics={"success": 1.0})
            return "higher" if code < self.code else "lower"

        def respond(self, message):
            return Turn("use the tool", reward=-0.1)

Every method may be sync or async. The core is async (``areset``, ``astep``); ``reset`` and ``step`` are the same for people who have no event loop.
A sync method runs on the event loop of the caller: one that waits for long should be async.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import gymnasium
import numpy as np

from ..configs.limits import MAX_TASKS
from ..errors import ConfigError, EnvError, InfraError, RollstreamError
from . import loop
from .blame import name_and_text, number_needed, user_line
from .messages import Message, ToolCall, assistant, problem_with, tool_result, user
from .spaces import Assistant, Messages
from .tools import BadCall, Tool, describe, is_tool, tool

__all__ = ["ChatEnv", "Message", "Says", "Turn", "tool"]

Says = str | Message | Sequence[str | Message]
"""What a method may say: text, a message, or a list of both. Text is a user message, from a tool a tool message."""
Observation = tuple[Message, ...]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Turn:
    """The environment's reply to one turn, where plain text is not enough.

    Attributes:
        content: what the policy reads next.
        reward: of this turn; None means this turn is not scored, and counts nothing. Left out while there are ``reward_parts``, it is their sum.
        done: the task ended (terminated).
        truncated: the episode is cut here although the task has not ended.
        score_later: the whole episode has no reward yet: it awaits one from a scorer (``buffer.score_timeout_s``).
        reward_parts: the reward by named components, added up over the episode in ``info["reward_parts"]``.
        metrics: numbers for people, never trained on: added up over the episode in ``info["metrics"]``, except ``success``, where the latest stands.

    """

    content: Says = ""
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    score_later: bool = False
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(slots=True)
class _Episode:
    """What one episode has added up so far."""

    started: float
    metrics: dict[str, float]
    reward_parts: dict[str, float] = field(default_factory=dict[str, float])
    num_turns: int = 0
    score_later: bool = False
    ended: bool = False


class ChatEnv(gymnasium.Env[Observation, Message | str]):
    """Base class of conversations. Write ``start``, and ``respond`` or methods marked :func:`tool`; everything else is optional.

    Attributes:
        max_turns: turns of the policy after which the episode is truncated. With 1 the only turn ends the task: it says terminated.
        step_timeout_s: seconds one ``areset`` or ``astep`` may take; beyond it the episode fails as infrastructure. A sync method is measured, not stopped.
        episode_timeout_s: seconds after which a step truncates the episode, sampling included.
        num_tasks: number of tasks for ``task(index)``; None where tasks are made up from ``np_random``.
        metric_defaults: metrics every episode starts from, ``{"success": 0.0}`` for example, so that an episode that never reports one still counts.
        task_index: the task of this episode: ``options["task_index"]`` modulo ``num_tasks``, drawn from the seed where none is given.

    ``self.np_random`` is seeded by ``reset``: the members of a group share the seed, hence the task. ``info`` carries ``task_index`` and ``tools``
    (OpenAI schemas) on reset, ``reward_parts`` and ``metrics`` (so far) always, ``turn_reward`` (None where unscored) after a step, and
    ``truncation`` (``turns`` or ``time``) where truncated.

    """

    max_turns: int = 8
    step_timeout_s: float | None = None
    episode_timeout_s: float | None = None
    num_tasks: int | None = None
    metric_defaults: ClassVar[Mapping[str, float]] = {}
    task_index: int = 0

    _tools: ClassVar[Mapping[str, Tool]]
    _episode: _Episode | None = None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Sets up what every instance needs, so that a subclass may write ``__init__`` without calling ours.

        Raises:
            EnvError: the class lacks a method, or a tool has no schema; the message names it.

        """
        env = super().__new__(cls)
        if "_tools" not in cls.__dict__:
            cls._tools = _inspect(env)
        env.action_space, env.observation_space = Assistant(), Messages()
        return env

    def __init__(self) -> None:
        """Takes nothing; a subclass may take what it likes. Without this method Python would ignore arguments nobody declared."""
        super().__init__()

    # --- what a user writes ---------------------------------------------------------------------------------------------------------

    def task(self, index: int) -> Any:
        """The task number ``index``, passed on to ``start``. By default the number itself."""
        return index

    def start(self, task: Any) -> Says | Awaitable[Says]:
        """Begins an episode and returns what the policy reads first."""
        raise NotImplementedError

    def respond(self, message: Message) -> Says | Turn | Awaitable[Says | Turn]:
        """Answers a plain message, one without tool calls. By default the policy is told to use the tools."""
        return f"use a tool: {', '.join(self._tools)}"

    def malformed_call(self, problem: str) -> Says | Turn | Awaitable[Says | Turn]:
        """Answers a tool call that cannot be carried out; ``problem`` says why. Override it to put a price on such calls."""
        return problem

    def demonstrate(self, correct: bool) -> list[Message]:
        """A whole scripted conversation for the task of this episode, for a warm-up that teaches a small policy the form of an answer.

        Optional; called after ``reset``. It starts with what ``start`` said, ends with an assistant message, and every message of the environment in it
        is the one ``step`` would give. ``correct`` asks for one that earns the full reward, else for a plausible failure, varied with ``np_random``.

        Raises:
            ConfigError: this environment has none.

        """
        raise ConfigError(f"warmup: {self._id} has no demonstrations; write demonstrate(self, correct) in its class, or leave warmup out of the configuration")

    # --- the async core -------------------------------------------------------------------------------------------------------------

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode. ``options={"task_index": i}`` chooses the task.

        Raises:
            EnvError: the environment's code raised or returned something that is no message; the message names id and method.
            InfraError: it said so itself, or took longer than ``step_timeout_s``.

        """
        super().reset(seed=seed)
        self.task_index = self._choose_task(options or {})
        self._episode = _Episode(time.monotonic(), {"malformed_tool_calls": 0.0, "tool_calls": 0.0, **self.metric_defaults})

        async def begin() -> Observation:
            task = await self._ask("task", self.task, self.task_index)
            messages = self._messages("start", await self._ask("start", self.start, task), user)
            if not messages:
                raise EnvError(f"{self._id}: start returned no message; return at least one for the policy to read")
            return messages

        messages = await self._in_time("reset", begin())
        tools = [known.schema() for known in self._tools.values()]
        return messages, {"task_index": self.task_index, "tools": tools, **self._totals(self._episode)}

    async def astep(self, action: Message | str) -> Step:
        """Answers what the policy said: new messages, reward of this turn, terminated, truncated, info.

        Tool calls of one message are carried out in order until one ends the episode; their rewards add up. A call that cannot be carried out is
        answered by ``malformed_call`` and counted in the metric ``malformed_tool_calls``, never raised.

        Raises:
            EnvError, InfraError: as for :meth:`areset`; EnvError too when no episode is under way.

        """
        episode = self._episode
        if episode is None or episode.ended:
            raise EnvError(f"{self._id}: step after the episode ended (or before it began); call reset first")
        messages, turns = await self._in_time("step", self._answer(_as_message(action, self._id), episode))
        episode.num_turns += 1
        scores = [_score(turn) for turn in turns]
        scored = [score for score in scores if score is not None]
        for turn in turns:
            _add_up(episode, turn)
        episode.score_later |= any(turn.score_later for turn in turns)
        terminated = any(turn.done for turn in turns)
        cut = "" if terminated else self._cut(episode, turns)
        if cut == "turns" and self.max_turns == 1:
            terminated, cut = True, ""
        episode.ended = terminated or bool(cut)
        info = {
            "turn_reward": sum(scored) if scored else None,
            **self._totals(episode),
            **({"truncation": cut} if cut else {}),
            **({"score_later": True} if episode.score_later else {}),
        }
        return messages, float(sum(scored)), terminated, bool(cut), info

    def _choose_task(self, options: dict[str, Any]) -> int:
        unknown = set(options) - {"task_index"}
        if unknown:
            raise EnvError(f"{self._id}: reset knows no option {sorted(unknown)[0]!r}; the one it knows is task_index")
        if self.num_tasks is not None and not 1 <= self.num_tasks <= MAX_TASKS:
            raise EnvError(f"{self._id}: num_tasks is {self.num_tasks}; it must be 1 to {MAX_TASKS:,}, or None where there is no end of tasks")
        index = options.get("task_index")
        if index is None:
            return int(self.np_random.integers(self.num_tasks)) if self.num_tasks else 0
        if isinstance(index, bool) or not isinstance(index, int | np.integer) or index < 0:
            raise EnvError(f"{self._id}: task_index {index!r} is not a whole number from 0 up")
        return int(index) % self.num_tasks if self.num_tasks else int(index)

    async def _answer(self, message: Message, episode: _Episode) -> tuple[Observation, list[Turn]]:
        """New messages and turns for one assistant message."""
        if "malformed" in message:
            return self._collect("malformed_call", [(await self._refuse(message["malformed"], episode), tool_result)])
        calls = message.get("tool_calls") or []
        if not calls:
            turn = self._turn("respond", await self._ask("respond", self.respond, message))
            return self._collect("respond", [(turn, user)])
        replies: list[tuple[Turn, Callable[[str], Message]]] = []
        for call in calls:
            turn = await self._carry_out(call, episode)
            replies.append((turn, lambda text, call=call: tool_result(text, call)))
            if turn.done or turn.truncated:
                break
        return self._collect(calls[0]["function"]["name"], replies)

    async def _carry_out(self, call: ToolCall, episode: _Episode) -> Turn:
        name = call["function"]["name"]
        episode.metrics["tool_calls"] += 1
        if (known := self._tools.get(name)) is None:
            return await self._refuse(f"unknown tool {name[:40]!r}; tools: {', '.join(self._tools) or 'none'}", episode)
        try:
            arguments = known.bind(call["function"]["arguments"])
        except BadCall as problem:
            return await self._refuse(str(problem), episode)
        reply = await self._ask(name, getattr(self, name), **arguments)
        return self._turn(name, reply if isinstance(reply, Turn) else _as_text(reply, f"{self._id}: {name}"))

    async def _refuse(self, problem: str, episode: _Episode) -> Turn:
        episode.metrics["malformed_tool_calls"] += 1
        return self._turn("malformed_call", await self._ask("malformed_call", self.malformed_call, problem))

    def _collect(self, method: str, replies: Sequence[tuple[Turn, Callable[[str], Message]]]) -> tuple[Observation, list[Turn]]:
        spoken = [(turn, of_text) for turn, of_text in replies if not isinstance(turn.content, str) or turn.content or not (turn.done or turn.truncated)]
        messages = [message for turn, of_text in spoken for message in self._messages(method, turn.content, of_text)]
        return tuple(messages), [turn for turn, _ in replies]

    def _cut(self, episode: _Episode, turns: Sequence[Turn]) -> str:
        """Why the episode is truncated now; empty when it goes on. An environment that cuts itself counts as out of turns."""
        if any(turn.truncated for turn in turns) or episode.num_turns >= self.max_turns:
            return "turns"
        return "time" if self.episode_timeout_s is not None and time.monotonic() - episode.started > self.episode_timeout_s else ""

    @staticmethod
    def _totals(episode: _Episode) -> dict[str, Any]:
        return {"reward_parts": dict(episode.reward_parts), "metrics": dict(episode.metrics)}

    # --- the sync facade ------------------------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """:meth:`areset` for callers without an event loop."""
        return loop.run(self.areset(seed=seed, options=options))

    def step(self, action: Message | str) -> Step:
        """:meth:`astep` for callers without an event loop."""
        return loop.run(self.astep(action))

    # --- the border to user code ----------------------------------------------------------------------------------------------------

    @property
    def _id(self) -> str:
        return self.spec.id if self.spec is not None else type(self).__name__

    async def _ask(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a user's method, sync or async; what it raises becomes an EnvError that names it."""
        try:
            result = method(*args, **kwargs)
            result = await result if inspect.isawaitable(result) else result
        except RollstreamError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise EnvError(f"{self._id}: {name} raised {name_and_text(error)}{user_line(error)}") from error
        if isinstance(result, tuple) and name != "task":
            raise EnvError(f"{self._id}: {name} returned a tuple; return text, a message, a list of those, or rollstream.Turn(text, reward=…)")
        return result

    async def _in_time(self, phase: str, work: Coroutine[Any, Any, Result]) -> Result:
        limit, started = self.step_timeout_s, time.monotonic()
        try:
            async with asyncio.timeout(limit):
                result = await work
        except TimeoutError as error:
            raise self._too_slow(phase) from error
        if limit is not None and time.monotonic() - started > limit:  # a sync method cannot be interrupted, but it is not let through either
            raise self._too_slow(phase)
        return result

    def _too_slow(self, phase: str) -> InfraError:
        return InfraError(f"{self._id}: {phase} took longer than step_timeout_s={self.step_timeout_s:g}; make it faster or raise the limit in register")

    def _turn(self, method: str, reply: Any) -> Turn:
        """A turn whose numbers are numbers."""
        turn = reply if isinstance(reply, Turn) else Turn(reply)
        numbers: dict[str, Any] = {"reward": 0.0 if turn.reward is None else turn.reward, **turn.reward_parts, **turn.metrics}
        for name, value in numbers.items():
            if isinstance(value, bool | np.bool_) and name not in turn.metrics:
                raise EnvError(f"{self._id}: {method} returned {name} {value}; a reward is a number: write {float(value)} or float(…)")
            if not isinstance(value, int | float | np.number | np.bool_) or not math.isfinite(value):
                raise EnvError(f"{self._id}: {method} returned {name} {number_needed(value)}")
        return turn

    def _messages(self, method: str, says: Any, of_text: Callable[[str], Message]) -> Observation:
        """Fresh messages from what a method said."""
        parts: list[Any] = list(says) if isinstance(says, list | tuple) else [says]
        messages = [of_text(part) if isinstance(part, str) else part for part in parts]
        for message in messages:
            if problem := problem_with(message):
                raise EnvError(f"{self._id}: {method} returned {problem}; return text, a message, a list of them, or rollstream.Turn")
        return tuple(copy.deepcopy(messages))  # fresh objects: a user may return the same constant every time


def _inspect(env: ChatEnv) -> dict[str, Tool]:
    """The tools of an environment's class, after a check that the class is complete."""
    cls = type(env)
    tools = {name: describe(name, getattr(env, name), cls.__name__) for name in dir(cls) if is_tool(cls, name)}
    if cls.start is ChatEnv.start:
        raise EnvError(f"{cls.__name__} has no start(self, task); write one that returns what the policy reads first")
    if not tools and cls.respond is ChatEnv.respond:
        raise EnvError(f"{cls.__name__} has neither respond(self, message) nor a method marked @rollstream.tool; write one of them")
    for name, argument in (("start", "task"), ("respond", "message")):
        try:
            inspect.signature(getattr(env, name)).bind(None)
        except TypeError as error:
            raise EnvError(f"{cls.__name__}.{name} must be written {name}(self, {argument}): {error}") from error
    return tools


def _as_message(action: Any, env_id: str) -> Message:
    if isinstance(action, str):
        return assistant(action)
    problem = problem_with(action) or ("" if action["role"] == "assistant" else f"a message with role {action['role']!r}, but the policy speaks as assistant")
    if problem:
        raise EnvError(f"{env_id}: step needs text or an assistant message and was given {problem}")
    return action


def _as_text(reply: Any, where: str) -> Any:
    """A tool may return whatever JSON can write; text and messages stay what they are."""
    if isinstance(reply, str) or problem_with(reply) is None:
        return reply
    if reply is None:
        raise EnvError(f"{where} returned None; return text, anything JSON can write, or rollstream.Turn")
    try:
        return json.dumps(reply.tolist() if isinstance(reply, np.generic | np.ndarray) else reply, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise EnvError(f"{where} returned {type(reply).__name__}, which is neither text nor JSON ({error}); return text or rollstream.Turn") from error


def _score(turn: Turn) -> float | None:
    if turn.reward is None:
        return float(sum(turn.reward_parts.values())) if turn.reward_parts else None
    return float(turn.reward)


def _add_up(episode: _Episode, turn: Turn) -> None:
    for name, value in turn.reward_parts.items():
        episode.reward_parts[name] = episode.reward_parts.get(name, 0.0) + float(value)
    for name, value in turn.metrics.items():
        episode.metrics[name] = float(value) if name == "success" else episode.metrics.get(name, 0.0) + float(value)
