"""Tools: a JSON schema from a method's type hints and docstring, and the check of what a model passes to it.

Understood hints: ``str``, ``int``, ``float``, ``bool``, ``list[T]``, ``dict[str, T]``, ``Literal``, ``Enum`` classes, unions and ``Optional``, ``Any``, and
``Annotated`` around any of them. Argument descriptions come from the ``Args:`` section of a Google-style docstring.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, cast

from ..errors import EnvError

_MARK = "__rollstream_tool__"
_SIMPLE: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTIONS = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(?P<name>\*{0,2}\w+)\s*(\([^)]*\))?:\s*(?P<text>.*)$")

Method = TypeVar("Method", bound=Callable[..., Any])


class BadCall(ValueError):
    """A call the tool cannot take. The message is for the model: it becomes an observation, never an error of the run."""


def tool(method: Method) -> Method:
    """Marks a method of a :class:`~rollstream.ChatEnv` as a tool the policy may call.

    The method may be sync or async. Every argument needs a type hint; the docstring says what the tool does and, under ``Args:``, what each
    argument means. It returns text, anything JSON can write, or a :class:`~rollstream.Turn` when it also rewards or ends the episode.
    """
    setattr(getattr(method, "__func__", method), _MARK, True)
    return method


def is_tool(owner: type, name: str) -> bool:
    """True when ``owner`` or a base of it marked the method ``name`` as a tool, so that an override stays one."""
    if not callable(getattr(owner, name, None)):
        return False
    found = (base.__dict__[name] for base in owner.__mro__ if name in base.__dict__)
    return any(getattr(getattr(value, "__func__", value), _MARK, False) for value in found)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a tool: its hint as Python sees it and its schema as the model sees it."""

    name: str
    hint: Any
    schema: dict[str, Any]
    required: bool


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: what the model is told about it and what may be passed to it."""

    name: str
    description: str
    arguments: tuple[Argument, ...]

    def schema(self) -> dict[str, Any]:
        """The tool in the OpenAI form, a fresh object at every call."""
        properties = {argument.name: dict(argument.schema) for argument in self.arguments}
        required = [argument.name for argument in self.arguments if argument.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": parameters}}

    def bind(self, passed: dict[str, Any] | str) -> dict[str, Any]:
        """Keyword arguments for the method from what the model passed (an object, or its JSON text).

        Raises:
            BadCall: an argument is missing, unknown or of the wrong type, or the text is no JSON object.

        """
        values = _object(self.name, passed) if isinstance(passed, str) else passed
        known = {argument.name: argument for argument in self.arguments}
        for name in values:
            if name not in known:
                raise BadCall(f"{self.name} has no argument {_short(name)}; it takes: {', '.join(known) or 'nothing'}")
        for argument in self.arguments:
            if argument.required and argument.name not in values:
                raise BadCall(f"{self.name}: argument {argument.name} is missing")
        return {name: _convert(value, known[name].hint, f"{self.name}: {name}") for name, value in values.items()}


def describe(name: str, method: Callable[..., Any], owner: str) -> Tool:
    """The tool of a bound method ``method``, called ``name``; ``owner`` is the class's name, for errors.

    Raises:
        EnvError: an argument without a type hint, with a hint no schema exists for, or ``*args``-like arguments.

    """
    where = f"tool {owner}.{name}"
    function = getattr(method, "__func__", method)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise EnvError(f"{where}: a type hint cannot be resolved ({error}); import it, or define it at the top level of its module") from error
    description, texts = _docstring(inspect.getdoc(function) or "")
    arguments: list[Argument] = []
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EnvError(f"{where}: argument {parameter} cannot be passed by name; give every argument a name and a type hint")
        if parameter.name not in hints:
            raise EnvError(f"{where}: argument {parameter.name} has no type hint; write for example {parameter.name}: str")
        hint = hints[parameter.name]
        schema = _schema(hint, f"{where}: argument {parameter.name}")
        if parameter.name in texts:
            schema["description"] = texts[parameter.name]
        default = parameter.default.value if isinstance(parameter.default, enum.Enum) else parameter.default
        if isinstance(default, str | int | float | bool | None):
            schema["default"] = default
        arguments.append(Argument(parameter.name, hint, schema, required=parameter.default is parameter.empty))
    return Tool(name, description, tuple(arguments))


# --- from hints to schemas --------------------------------------------------------------------------------------------------------


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _schema(inner[0], where)
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choices([member.value for member in hint], where)
    if origin is Literal:
        return _choices(list(inner), where)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(member, where) for member in inner]}
    if hint is list or origin is list:
        return {"type": "array", "items": _schema(inner[0], where)} if inner else {"type": "array"}
    if hint is dict or (origin is dict and inner[0] is str):
        return {"type": "object", "additionalProperties": _schema(inner[1], where)} if inner else {"type": "object"}
    raise EnvError(f"{where} has type {hint!r}, for which no JSON schema is known; use str, int, float, bool, list, dict[str, …], Literal, Enum or Optional")


def _choices(values: list[Any], where: str) -> dict[str, Any]:
    if not all(isinstance(value, str | int | float | bool | None) for value in values):
        raise EnvError(f"{where} offers values JSON cannot write ({_short(values)}); use text, numbers or booleans")
    names = {_SIMPLE[type(value)] for value in values}
    return {"type": names.pop(), "enum": values} if len(names) == 1 else {"enum": values}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Description (all before the first section) and argument texts of a Google-style docstring."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, current, level = "", "", 0
    for line in text.splitlines():
        if header := _SECTIONS.match(line):
            section, current = header.group(1), ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            found = _ARGUMENT.match(line.strip())
            if found and (not current or depth <= level):
                current, level = found.group("name"), depth
                arguments[current] = found.group("text").strip()
            elif current:
                arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), arguments


# --- from what the model passed to Python values --------------------------------------------------------------------------------------


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"{name}: arguments are not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadCall(f"{name}: arguments must be an object, not {_short(value)}")
    return cast(dict[str, Any], value)


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _convert(value, inner[0], where)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, inner, where)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return _choose(value, hint, where)
    if hint is list or origin is list:
        _require(isinstance(value, list), where, "a list", value)
        return [_convert(item, inner[0], f"{where}[{index}]") for index, item in enumerate(value)] if inner else value
    if hint is dict or origin is dict:
        _require(isinstance(value, dict) and all(isinstance(key, str) for key in cast(dict[Any, Any], value)), where, "an object", value)
        return {key: _convert(item, inner[1], f"{where}.{key}") for key, item in value.items()} if inner else value
    return _convert_simple(value, hint, where)


def _convert_simple(value: Any, hint: Any, where: str) -> Any:
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        _require(number, where, "a number", value)
        return float(value)
    if hint is int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        _require(whole and not isinstance(value, bool), where, "an integer", value)
        return int(value)
    article = {str: "text", bool: "true or false"}.get(hint, "null")
    _require(isinstance(value, hint), where, article, value)
    return value


def _convert_union(value: Any, members: tuple[Any, ...], where: str) -> Any:
    problems: list[str] = []
    for member in members:
        try:
            return _convert(value, member, where)
        except BadCall as problem:
            problems.append(str(problem).removeprefix(f"{where} must be ").partition(", not ")[0])
    raise BadCall(f"{where} must be {' or '.join(problems)}, not {_short(value)}")


def _choose(value: Any, hint: Any, where: str) -> Any:
    members = {_identity(member): member for member in typing.get_args(hint)} or {_identity(member.value): member for member in hint}
    _require(_identity(value) in members, where, f"one of {', '.join(name for _, name in members)}", value)
    return members[_identity(value)]


def _identity(value: Any) -> tuple[str, str]:
    """Type and text: ``1``, ``1.0`` and ``True`` are different choices although Python calls them equal."""
    return type(value).__name__, repr(value)


def _require(holds: bool, where: str, wanted: str, value: Any) -> None:
    if not holds:
        raise BadCall(f"{where} must be {wanted}, not {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
