"""What every configuration key means, taken from the schema: for the reference page of the docs and for ``rollstream show-config --explain``."""

from __future__ import annotations

import inspect
import io
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, cast

from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from .schema import Config
from .section import Section

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "multiple_of": "multiple of"}
_SIMPLE: dict[Any, str] = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null", Any: "anything"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key that holds a value: its full name, what it may hold, and what it means. ``default`` is YAML, empty where the key is required."""

    path: str
    type: str
    bound: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Part:
    """One section: where it lies, of which kind where there are several, what it is for, its keys, and whether null may stand in its place."""

    path: str
    kind: str
    text: str
    keys: tuple[Key, ...]
    may_be_null: bool


def parts(section: type[Section] = Config, path: str = "", role: str = "", may_be_null: bool = False) -> Iterator[Part]:
    """Every section of the schema from ``section`` on, outer ones first. A section in a list has ``[]`` behind its name."""
    fields = section.model_fields
    inner = {name: _sections(field.annotation) for name, field in fields.items()}
    kind = str(typing.get_args(fields["kind"].annotation)[0]) if typing.get_origin(getattr(fields.get("kind"), "annotation", None)) is Literal else ""
    keys = tuple(_key(path, name, field, section) for name, field in fields.items() if not inner[name])
    yield Part(path, kind, _plain(f"{inspect.cleandoc(section.__doc__ or '')} {role}"), keys, may_be_null)
    for name, found in inner.items():
        listed = "[]" if typing.get_origin(fields[name].annotation) is tuple else ""
        for member in found:
            below = f"{path}.{name}{listed}" if path else f"{name}{listed}"
            yield from parts(member, below, fields[name].description or "", type(None) in typing.get_args(fields[name].annotation))


def explained(section: Section) -> str:
    """``section`` as YAML text that reads back as itself, each key with its meaning as a comment."""
    return "".join(f"{line}\n" for line in _lines(section, ""))


def meaning_of(section: type[Section], name: str) -> str:
    """What a key means; of a section, and of the ``kind`` that chose it, the first sentence of its class."""
    field = section.model_fields[name]
    if field.description:
        return _plain(field.description)
    found = _sections(field.annotation)
    if name == "kind":
        return _first_sentence(section)
    return _first_sentence(found[0]) if len(found) == 1 else ""


def _lines(section: Section, indent: str) -> Iterator[str]:
    for name in type(section).model_fields:
        value: object = getattr(section, name)
        if isinstance(value, Section):
            about = meaning_of(type(section), name)
            yield f"{indent}{name}:{f'  # {about}' if about else ''}"
            yield from _lines(value, f"{indent}  ")
            continue
        about = meaning_of(type(section), name)
        first, *rest = _yaml({name: section.model_dump(mode="json", include={name})[name]})
        if rest and isinstance(value, str):
            yield f"{indent}# {about}"
            yield f"{indent}{first}"
        else:
            yield f"{indent}{first}  # {about}"
        yield from (f"{indent}{line}" for line in rest)


def _yaml(value: object) -> list[str]:
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 10_000
    yaml.dump(value, stream)
    return stream.getvalue().splitlines()


def _key(path: str, name: str, field: FieldInfo, section: type[Section]) -> Key:
    default = "" if field.is_required() else _yaml_inline(field.default)
    meaning = "Chooses this kind." if name == "kind" and not field.description else meaning_of(section, name)
    return Key(f"{path}.{name}" if path else name, _type(field.annotation), _bound(field), default, meaning)


def _yaml_inline(value: object) -> str:
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(_yaml_inline(item) for item in cast('tuple[object, ...]', value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sections(annotation: Any) -> list[type[Section]]:
    """The section classes an annotation names: one, the members of a tagged union, or those in a list."""
    if isinstance(annotation, type) and not typing.get_origin(annotation):
        return [annotation] if issubclass(annotation, Section) else []
    found = [section for member in typing.get_args(annotation) for section in _sections(member)]
    return list(dict.fromkeys(found))


def _type(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(inner[0])
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(member) for member in inner)
    if origin is tuple:
        return f"list of {_type(inner[0])}" if inner[-1] is Ellipsis else f"list of {len(inner)} × {_type(inner[0])}"
    if origin is dict:
        return "mapping"
    return _SIMPLE[annotation]


def _bound(field: FieldInfo) -> str:
    found = [*field.metadata]
    for member in typing.get_args(field.annotation):
        if typing.get_origin(member) is typing.Annotated:
            found += [item for extra in typing.get_args(member)[1:] for item in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
    texts = [
        f"{sign} {value if isinstance(value, int) else format(value, 'g')}"
        for item in found
        for name, sign in _BOUNDS.items()
        if (value := getattr(item, name, None)) is not None
    ]
    texts += [f"`{pattern}`" for item in found if (pattern := getattr(item, "pattern", None))]
    return ", ".join(dict.fromkeys(texts))


def _first_sentence(section: type[Section]) -> str:
    return _plain(inspect.cleandoc(section.__doc__ or "")).partition(". ")[0].rstrip(".") + "."


def _plain(text: str) -> str:
    """One line; docstrings mark code with two backticks, people with one."""
    return " ".join(text.replace("``", "`").split())
