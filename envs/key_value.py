"""rollstream/KeyValue-v0: look a key up with a tool, then say the digit. Small enough for a policy of 0.1 M parameters on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from .chat import ChatEnv, Message, Turn, tool
from .messages import assistant, assistant_call, tool_result, user

ANSWER, LOOKUP, NONSENSE = 1.0, 0.3, -0.1
SAY_A_DIGIT = "say one digit"


class KeyValue(ChatEnv):
    """A store of one random digit per key, drawn from the seed.

    The policy reads ``get b``, calls ``get(key="b")``, reads the digit and says it.

    * Rewards: 1.0 for the right digit, in whichever turn; 0.3 once for looking up the right key; −0.1 for nonsense: a call that cannot be
      carried out (malformed, unknown tool or argument), a key the store lacks, or an answer that is not one digit. After nonsense it goes on.
    * A wrong digit ends the episode with 0; so does the right one, with ``success`` 1. Looking up another key of the store costs nothing but the turn.
    * Three turns at most.

    Arguments:
        keys: one letter per key of the store.

    Raises:
        ConfigError: fewer than two keys, or one of them twice.

    """

    max_turns = 3
    metric_defaults = {"success": 0.0}  # noqa: RUF012 - declared ClassVar by the base class

    def __init__(self, keys: str = "abcdefgh") -> None:
        super().__init__()
        if len(keys) < 2 or len(set(keys)) < len(keys):
            raise ConfigError(f"env.kwargs of rollstream/KeyValue-v0: keys is {keys!r}; give at least 2 different letters")
        self.keys = keys

    def start(self, task: Any) -> str:
        """Draws the store and the key asked for."""
        self._store = {key: str(self.np_random.integers(10)) for key in self.keys}
        self._key = self.keys[self.np_random.integers(len(self.keys))]
        self._looked_up = False
        return f"get {self._key}"

    @tool
    def get(self, key: str) -> Turn:
        """Look up the digit stored under a key.

        Args:
            key: one letter

        """
        if key not in self._store:
            return self._nonsense("no such key")
        if key != self._key or self._looked_up:
            return Turn(self._store[key])
        self._looked_up = True
        return Turn(self._store[key], reward_parts={"lookup": LOOKUP})

    def respond(self, message: Message) -> Turn:
        """Judges an answer."""
        answer = message["content"].strip()
        if len(answer) != 1 or answer not in "0123456789":
            return self._nonsense(SAY_A_DIGIT)
        right = answer == self._store[self._key]
        return Turn("right" if right else "wrong", done=True, reward_parts={"answer": ANSWER if right else 0.0}, metrics={"success": float(right)})

    def malformed_call(self, problem: str) -> Turn:
        """Nonsense has its price."""
        return self._nonsense(problem)

    def demonstrate(self, correct: bool) -> list[Message]:
        """Looks the key up and says its digit; when not ``correct``, one of the ways to fail at that.

        Seven failures in ten look up another key and make a digit up, so that a policy that imitates both kinds knows the form of an episode but holds
        neither the key nor the digit reliably: after 150 steps on demonstrations of which 40 % are right it succeeds in one episode of five.
        """
        question = user(f"get {self._key}")
        if correct:
            return [question, *self._scripted_lookup(self._key), assistant(self._store[self._key])]
        wrong = assistant(self._pick([digit for digit in "0123456789" if digit != self._store[self._key]]))
        failure = self.np_random.random()
        if failure < 0.7:
            key = self._pick([key for key in self.keys if key != self._key])
            made_up = [digit for digit in "0123456789" if digit not in (self._store[self._key], self._store[key])]
            return [question, *self._scripted_lookup(key), assistant(self._pick(made_up))]
        if failure < 0.8:
            return [question, *self._scripted_lookup(self._key), wrong]
        if failure < 0.9:
            return [question, wrong]
        if failure < 0.95:
            return [question, assistant(self._key), user(SAY_A_DIGIT), wrong]
        call = assistant_call("put", key=self._key)
        return [question, call, tool_result(f"unknown tool 'put'; tools: {', '.join(self._tools)}", (call.get("tool_calls") or [None])[0]), wrong]

    def _scripted_lookup(self, key: str) -> list[Message]:
        call = assistant_call("get", key=key)
        return [call, tool_result(self._store[key], (call.get("tool_calls") or [None])[0])]

    def _pick(self, choices: Sequence[str]) -> str:
        return choices[int(self.np_random.integers(len(choices)))]

    def _nonsense(self, reply: str) -> Turn:
        return Turn(reply, reward_parts={"nonsense": NONSENSE})
