"""Messages: what an environment says and what a policy answers, in the OpenAI form."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict, TypeGuard, cast

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


class Function(TypedDict):
    """Which tool is called with what. ``arguments`` is an object; its JSON text (as OpenAI clients send it) is understood too."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict):
    """One call of a tool inside an assistant message."""

    type: Literal["function"]
    function: Function
    id: NotRequired[str]


class Message(TypedDict):
    """One message. ``name`` and ``tool_call_id`` belong to tool results, ``tool_calls`` to assistant messages.

    ``reasoning_content`` is what the policy thought before it answered. ``malformed`` says, in words for the model, why a tool call could not be
    understood: none of the message's calls is carried out, and ``content`` keeps the text as it was sampled.
    """

    role: Role
    content: str
    tool_calls: NotRequired[list[ToolCall]]
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]
    malformed: NotRequired[str]


def user(content: str) -> Message:
    """What the environment says."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """A plain answer of the policy."""
    return {"role": "assistant", "content": content}


def assistant_call(name: str, /, **arguments: object) -> Message:
    """An assistant message that makes one tool call and says nothing else."""
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def tool_result(content: str, call: ToolCall | None = None) -> Message:
    """What a tool answered; ``call`` is the call it answers, None where the call could not be understood."""
    message: Message = {"role": "tool", "content": content}
    if call is not None:
        message["name"] = call["function"]["name"]
        if "id" in call:
            message["tool_call_id"] = call["id"]
    return message


def problem_with(value: object) -> str | None:
    """Why ``value`` is not a message, in one line; None when it is one."""
    if not isinstance(value, dict):
        return f"a message is a dict with role and content, not {type(value).__name__}"
    message = cast(dict[str, Any], value)
    if message.get("role") not in ROLES:
        return f"role {message.get('role')!r} is none of {', '.join(ROLES)}"
    if not isinstance(message.get("content"), str):
        return f"content of a message is text, not {type(message.get('content')).__name__}"
    if half := half_character(message["content"]):
        return f"content with {half}, which is no text; decode what you read with errors='replace'"
    if "tool_calls" in message:
        return _problem_with_calls(message["tool_calls"])
    return None


def half_character(text: str) -> str:
    """The first half of a surrogate pair that stands alone in ``text``, and where; empty where there is none. No tokenizer and no file takes one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half a character ({text[error.start]!r} at {error.start})"
    return ""


def _problem_with_calls(calls: object) -> str | None:
    if not isinstance(calls, list):
        return f"tool_calls is a list, not {type(calls).__name__}"
    for call in cast(list[Any], calls):
        function = cast(dict[str, Any], call).get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return "a tool call is a dict with type 'function' and function {name, arguments}"
        called = cast(dict[str, Any], function)
        if not isinstance(called.get("name"), str) or not isinstance(called.get("arguments"), dict | str):
            return "the function of a tool call has a name (text) and arguments (an object)"
    return None


def is_message(value: object) -> TypeGuard[Message]:
    """True for a well-formed message."""
    return problem_with(value) is None
