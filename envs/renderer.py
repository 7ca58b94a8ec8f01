"""The renderer: from messages to token ids and back, append-only.

A conversation is tokenized once, piece by piece. What the policy sampled stays as it was sampled, token by token; the renderer only says which ids come
before it and after it. So what is trained is what the sampler was given, whatever a second rendering of the same messages would look like.

The generic renderer knows no model family. It finds out what a chat template puts after an assistant turn by rendering probe conversations and
comparing them, and refuses a template whose rendering of a longer conversation does not begin with that of the shorter one.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ..errors import TemplateError
from .messages import Message, ToolCall, assistant, tool_result, user
from .tool_calls import parser_for, read

_QUESTION, _ANSWER, _THOUGHT, _RESULT = "probequestionq", "probeanswerz", "probethoughtk", "proberesultw"
_MEMORY = 256


class Tokenizer(Protocol):
    """What the renderer needs of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, /, **kwargs: Any) -> Any:
        """Renders messages."""
        ...

    def encode(self, text: Any, /, **kwargs: Any) -> Any:
        """Text to ids."""
        ...

    def decode(self, token_ids: Any, /, **kwargs: Any) -> Any:
        """Ids to text."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Every token by its text."""
        ...


@dataclass(frozen=True, slots=True)
class _EndOfTurn:
    """The token that ends an assistant turn, and its text."""

    token_id: int
    text: str


class Renderer:
    """Renders conversations for one tokenizer and one set of tools.

    Attributes:
        stop_ids: tokens that end a turn when the policy samples them.

    Raises:
        TemplateError: no chat template, one that is not append-only, one without an end-of-turn token, or tools in a format nobody parses.

    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self._template = _template_of(tokenizer, bool(self._tools))
        self._parser = parser_for(self._template)
        if self._tools and self._parser is None:
            raise TemplateError(
                "the chat template writes tool calls in a format that is not known here; "
                'use a model whose template writes <tool_call>{"name": …}</tool_call>, or an environment without tools'
            )
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._memory: dict[bytes, list[int]] = {}
        self._checked: set[tuple[str, ...]] = set()
        self._end = self._find_end_of_turn()
        eos = tokenizer.eos_token_id
        self.stop_ids: frozenset[int] = frozenset({self._end.token_id} | ({int(eos)} if eos is not None else set()))
        self._check_appending([user(_QUESTION)], thinking=False)
        if self._tools:
            self._check_appending([tool_result(_RESULT, _probe_calls(self._tools, 1)[0])], thinking=False)

    # --- messages to ids ------------------------------------------------------------------------------------------------------------

    def initial(self, messages: Sequence[Message], *, limit: int | None = None) -> list[int]:
        """Ids of the first messages and the generation prompt: what the policy continues. Beyond ``limit`` ids there may be fewer than there are."""
        return list(self._remember(f"initial {limit}", messages, functools.partial(self._initial, messages, limit)))

    def extend(self, new_messages: Sequence[Message], *, closed: bool, limit: int | None = None) -> list[int]:
        """Ids to append after what the policy sampled: the separator, the new messages, the generation prompt.

        ``closed`` is False when the policy did not sample a token of ``stop_ids`` at the end: the missing end of turn is then part of what is appended.
        Where these are more than ``limit`` ids, what is given are only some of them, more than ``limit`` too.

        Raises:
            TemplateError: after these messages the template would rewrite what came before, for example drop earlier reasoning.

        """
        return list(self._remember(f"extend {closed} {limit}", new_messages, functools.partial(self._extend, new_messages, closed, limit)))

    def _initial(self, messages: Sequence[Message], limit: int | None) -> list[int]:
        return self._encode(self._render(messages, prompt=True), limit)

    def _extend(self, new_messages: Sequence[Message], closed: bool, limit: int | None) -> list[int]:
        if not new_messages or new_messages[0]["role"] == "assistant":
            raise TemplateError("extend needs at least one new message of the environment, which starts with system, user or tool")
        roles = tuple(message["role"] for message in new_messages)
        if roles not in self._checked:
            self._check_appending(new_messages, thinking=self._reasons)
            self._checked.add(roles)
        text = self._render([user(_QUESTION), self._probe_before(new_messages), *new_messages], prompt=True)
        tail = text[self._end_of_probe(text) :]
        return self._encode(tail[len(self._end.text) :] if closed else tail, limit)

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Ids and loss mask of a scripted conversation, both ``[T]``.

        The mask is 1 on the tokens of every assistant message and its end of turn, the very tokens a policy would have to sample, and 0 elsewhere.
        """
        ids: list[int] = []
        mask: list[int] = []
        for index, (before, answer) in enumerate(_split_at_assistant(messages)):
            ids += self.extend(before, closed=True) if index else self.initial(before)
            mask += [0] * (len(ids) - len(mask))
            if answer is not None:
                ids += self._remember("sampled", [answer], functools.partial(self._sampled, answer))
                mask += [1] * (len(ids) - len(mask))
        return ids, mask

    # --- ids to messages ------------------------------------------------------------------------------------------------------------

    def parse(self, ids: Sequence[int]) -> Message:
        """The assistant message of sampled ``ids``, with or without their end of turn. A call nobody can read is marked ``malformed``; nothing raises."""
        kept = list(ids)
        while kept and kept[-1] in self.stop_ids:
            kept.pop()
        text = self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return read(text, self._parser, reasons=self._reasons)

    # --- what the template does ----------------------------------------------------------------------------------------------------------

    @property
    def _reasons(self) -> bool:
        return "</think>" in self._template

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        plain = [_for_template(message) for message in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(plain, tools=self._tools or None, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(f"the chat template refuses a conversation of {roles}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        return text

    def _remember(self, what: str, messages: Sequence[Message], compute: Callable[[], list[int]]) -> list[int]:
        """The members of a group ask for the same ids, and Jinja takes longer than a tiny policy: the newest answers are kept."""
        key = hashlib.blake2b(f"{what} {json.dumps(messages)}".encode()).digest()
        ids = self._memory.pop(key, None) or compute()
        self._memory[key] = ids
        if len(self._memory) > _MEMORY:
            del self._memory[next(iter(self._memory))]
        return ids

    def _encode(self, text: str, limit: int | None = None) -> list[int]:
        """Ids of ``text``. A page of megabytes of which so many ids can never fit is not tokenized to its end: that would stall every episode of the actor."""
        most = len(text) if limit is None else (limit + 2) * self._longest_token
        ids = list(self._tokenizer.encode(text[:most], add_special_tokens=False))
        if most < len(text) and limit is not None and len(ids) <= limit:  # a tokenizer that folds its text: only all of it tells
            return self._encode(text)
        return ids

    def _sampled(self, message: Message) -> list[int]:
        """What a policy samples to say ``message``, end of turn included."""
        prompt = self._render([user(_QUESTION)], prompt=True)
        text = self._render([user(_QUESTION), message], prompt=False)
        body = text[len(prompt) : text.rindex(self._end.text)]
        return [*self._encode(body), self._end.token_id]

    def _find_end_of_turn(self) -> _EndOfTurn:
        """The first token that is no ordinary text in what the template puts after an answer."""
        prompt = self._render([user(_QUESTION)], prompt=True)
        text = self._render([user(_QUESTION), assistant(_ANSWER)], prompt=False)
        if not text.startswith(prompt) or _ANSWER not in text:
            raise TemplateError(
                "the chat template is not append-only: an answer does not follow its generation prompt; "
                "use a template whose assistant turns begin with the generation prompt"
            )
        tail = text[text.rindex(_ANSWER) + len(_ANSWER) :]
        for token_id in self._encode(tail):
            piece: str = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if piece and not self._tokenizer.decode([token_id], skip_special_tokens=True, clean_up_tokenization_spaces=False):
                return _EndOfTurn(token_id, piece)
        raise TemplateError(f"the chat template puts no end-of-turn token after an answer, only {tail!r}; add one (usually the tokenizer's eos token)")

    def _probe_before(self, new_messages: Sequence[Message], thought: str = "") -> Message:
        """An assistant message that ``new_messages`` may follow: tool results follow calls."""
        probe = assistant(f"<think>\n{thought}\n</think>\n\n{_ANSWER}" if thought else _ANSWER)
        num_results = next((index for index, message in enumerate(new_messages) if message["role"] != "tool"), len(new_messages))
        if num_results and self._tools:
            calls = _probe_calls(self._tools, num_results)
            for call, result in zip(calls, new_messages, strict=False):
                call["function"]["name"] = result.get("name", call["function"]["name"])
                call["id"] = result.get("tool_call_id", "call_00000")
            probe["tool_calls"] = calls
        return probe

    def _end_of_probe(self, text: str) -> int:
        """Where the probe's turn ends: at the end-of-turn token after the probe's answer."""
        if _ANSWER not in text:
            raise TemplateError("the chat template leaves out the content of an answer that also calls a tool; use one that renders both")
        return text.index(self._end.text, text.index(_ANSWER))

    def _check_appending(self, new_messages: Sequence[Message], *, thinking: bool) -> None:
        """Compares renderings before and after ``new_messages``; whatever was there must stay as it was.

        Raises:
            TemplateError: it does not.

        """
        roles = ", ".join(message["role"] for message in new_messages)
        said: list[Message] = [{**message, "content": _RESULT} for message in new_messages]
        probe = [user(_QUESTION), self._probe_before(said)]
        before, after = self._render(probe, prompt=False), self._render([*probe, *said], prompt=True)
        cut = self._end_of_probe(before)
        if not after.startswith(before[:cut]):
            raise TemplateError(f"the chat template is not append-only: {roles} after an answer changes what came before; use one that only appends")
        if after.count(_RESULT, cut) < len(said):
            raise TemplateError(f"the chat template leaves out the content of {roles}; use one that renders these roles")
        pieces = [*self._encode(after[:cut]), self._end.token_id, *self._encode(after[cut + len(self._end.text) :])]
        if self._encode(after) != pieces:
            raise TemplateError(f"the tokenizer joins an answer with what follows it ({roles}), so turns cannot be appended token by token")
        if thinking:
            thought = [user(_QUESTION), self._probe_before(said, _THOUGHT)]
            if _THOUGHT not in self._render([*thought, *said], prompt=True):
                raise TemplateError(
                    f"the chat template drops earlier reasoning once {roles} follows, so it is not append-only; "
                    "use a template that keeps <think> in earlier turns, or an environment of one turn"
                )


def _template_of(tokenizer: Tokenizer, with_tools: bool) -> str:
    """The template's text; of several, the one that Transformers would choose."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        named = cast(dict[str, str], template)
        template = named.get("tool_use", named.get("default")) if with_tools else named.get("default")
    if not isinstance(template, str) or not template:
        raise TemplateError("the tokenizer has no chat template; save one with it (chat_template.jinja), environments speak in messages")
    return template


def _for_template(message: Message) -> dict[str, Any]:
    """The message without our own marks, with arguments as the object templates expect."""
    plain = cast(dict[str, Any], {key: value for key, value in message.items() if key != "malformed"})
    if "tool_calls" in message:
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: ToolCall) -> ToolCall:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, dict):
        return call
    return {**call, "function": {"name": call["function"]["name"], "arguments": json.loads(arguments)}}


def _probe_calls(tools: Sequence[dict[str, Any]], num: int) -> list[ToolCall]:
    name = str(tools[0]["function"]["name"])
    return [{"id": f"call_{index:05d}", "type": "function", "function": {"name": name, "arguments": {}}} for index in range(num)]


def _split_at_assistant(messages: Sequence[Message]) -> list[tuple[list[Message], Message | None]]:
    """Pairs of what the environment said and what the policy answered; None where it did not answer any more."""
    turns: list[tuple[list[Message], Message | None]] = []
    said: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            said.append(message)
        elif not said:
            raise TemplateError("a scripted conversation has an assistant message with nothing said before it; begin with a user message, and alternate")
        else:
            turns.append((said, message))
            said = []
    if not turns:
        raise TemplateError("a scripted conversation has no assistant message, so there is nothing to learn from; add one")
    return [*turns, (said, None)] if said else turns
