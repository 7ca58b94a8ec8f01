"""From sampled text to an assistant message: reasoning, content, tool calls.

Two formats of tool calls are understood, and a chat template's own text says which one its model writes:

* pythonic (the tiny policy): ``<|call|>get(key="b")``, one marker per call, literals only
* JSON (Qwen, Hermes): ``<tool_call>{"name": "get", "arguments": {"key": "b"}}</tool_call>``, one block per call

Nothing sampled is ever evaluated and nothing raises: what cannot be read becomes ``message["malformed"]``, in words for the model.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any, cast

from .messages import Message, ToolCall, half_character

Parser = Callable[[str], tuple[str, list[ToolCall]]]
"""Text without its calls, and the calls. Raises :class:`Malformed`."""

CALL_MARK = "<|call|>"
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NAMED_CONSTANTS = {"true": True, "false": False, "null": None}


class Malformed(ValueError):
    """A tool call that cannot be read; the message is for the model."""


def parser_for(template: str) -> Parser | None:
    """The parser of the tool-call format a chat template writes; None where it writes none that is known."""
    if CALL_MARK in template:
        return pythonic
    if "<tool_call>" in template and "<function=" not in template:
        return json_blocks
    return None


def read(text: str, parser: Parser | None, *, reasons: bool) -> Message:
    """The assistant message of a sampled ``text``. ``reasons``: the model may think before it answers, between ``<think>`` and ``</think>``.

    A call inside the reasoning is a thought, not a call.
    """
    message: Message = {"role": "assistant", "content": text}
    if reasons and ("</think>" in text or text.lstrip().startswith("<think>")):
        thought, closed, rest = text.partition("</think>")
        message["reasoning_content"] = thought.replace("<think>", "", 1).strip()
        message["content"] = rest.lstrip("\n") if closed else ""
    if parser is None:
        return message
    try:
        content, calls = parser(message["content"])
    except Malformed as problem:
        message["malformed"] = str(problem)
        return message
    if calls:
        message["content"] = content
        message["tool_calls"] = calls
    return message


# --- pythonic -----------------------------------------------------------------------------------------------------------------------


def pythonic(text: str) -> tuple[str, list[ToolCall]]:
    """Reads ``content<|call|>name(argument=literal, …)<|call|>…``."""
    content, *calls = text.split(CALL_MARK)
    return content, [_pythonic_call(call.strip(), index) for index, call in enumerate(calls)]


def _pythonic_call(text: str, index: int) -> ToolCall:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python has opinions on the style of what a model writes
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Malformed(f"malformed call {_short(text)}; write name(argument=value)") from error
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise Malformed(f"malformed call {_short(text)}; write name(argument=value)")
    names = [keyword.arg for keyword in tree.keywords]
    if tree.args or None in names or len(set(names)) < len(names):
        raise Malformed(f"malformed call {_short(text)}; name every argument once: {tree.func.id}(argument=value)")
    try:
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in tree.keywords}
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise Malformed(f"malformed call {_short(text)}; arguments must be plain values") from error
    return _call(index, tree.func.id, arguments)


def _literal(node: ast.expr) -> Any:
    """A value JSON can write. ``true``, ``false`` and ``null`` are understood beside Python's names."""
    if isinstance(node, ast.Name) and node.id in _NAMED_CONSTANTS:
        return _NAMED_CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key that is not text")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(type(value).__name__)  # noqa: TRY004 - the caller words it for the model
    return value


# --- JSON blocks ----------------------------------------------------------------------------------------------------------------------


def json_blocks(text: str) -> tuple[str, list[ToolCall]]:
    """Reads ``content<tool_call>{"name": …, "arguments": {…}}</tool_call>…``."""
    rest = _BLOCK.sub("", text)
    if "<tool_call>" in rest or "</tool_call>" in rest:
        raise Malformed("malformed call: <tool_call> and </tool_call> do not pair up")
    return rest.strip(), [_json_call(block.strip(), index) for index, block in enumerate(_BLOCK.findall(text))]


def _json_call(text: str, index: int) -> ToolCall:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"malformed call {_short(text)}: not JSON ({error})") from error
    call = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Malformed(f'malformed call {_short(text)}; write {{"name": …, "arguments": {{…}}}}')
    return _call(index, name, cast(dict[str, Any], arguments))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _call(index: int, name: str, arguments: dict[str, Any]) -> ToolCall:
    if half := half_character(name + json.dumps(arguments, ensure_ascii=False)):
        raise Malformed(f"malformed call of {_short(name)}: {half.partition(' at ')[0]}) is no text")
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}…")
