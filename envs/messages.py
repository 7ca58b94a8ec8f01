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
    """What ``value`` is, where it is no message: a noun with its remedy, which reads well after "returned"; None when it is one."""
    if not isinstance(value, dict):
        return f"{named(value)}, which is neither text nor a message (a dict with role and content)"
    message = cast(dict[str, Any], value)
    if "role" not in message and "type" in message:
        return f"a part of type {message['type']!r}, which is no message (a dict with role and content){_no_images([message])}"
    if message.get("role") not in ROLES:
        return f"a message with role {message.get('role')!r}, which is none of {', '.join(ROLES)}"
    content = message.get("content")
    if not isinstance(content, str):
        return f"a message whose content is {named(content)}, not text{_no_images(content)}"
    if half := half_character(content):
        return f"content with {half}, which is no text; decode what you read with errors='replace'"
    if "tool_calls" in message:
        return _problem_with_calls(message["tool_calls"])
    return None


def named(value: object) -> str:
    """``value`` for a sentence: a plain number or None itself, of anything else its type with an article."""
    if value is None or isinstance(value, int | float):
        return repr(value)
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _no_images(content: object) -> str:
    """What to know about images, where ``content`` has one among its parts."""
    parts = cast("list[object]", content) if isinstance(content, list) else [content]
    types = [str(cast("dict[str, Any]", part).get("type")) for part in parts if isinstance(part, dict)]
    return "; images in observations are not there yet, say in words what there is to see" if any("image" in name for name in types) else ""


def half_character(text: str) -> str:
    """The first half of a surrogate pair that stands alone in ``text``, and where; empty where there is none. No tokenizer and no file takes one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half a character ({text[error.start]!r} at {error.start})"
    return ""


def _problem_with_calls(calls: object) -> str | None:
    if not isinstance(calls, list):
        return f"a message whose tool_calls are {named(calls)}, not a list"
    for call in cast(list[Any], calls):
        function = cast(dict[str, Any], call).get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return "a tool call that is no dict with type 'function' and function {name, arguments}"
        called = cast(dict[str, Any], function)
        if not isinstance(called.get("name"), str) or not isinstance(called.get("arguments"), dict | str):
            return "a tool call whose function has no name (text) and arguments (an object)"
    return None


def is_message(value: object) -> TypeGuard[Message]:
    """True for a well-formed message."""
    return problem_with(value) is None
