"""What is wrong with a configuration, in words: the key, the value, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .explain import Key, Part, parts

_ENV_FORMS = frozenset({("env", "one"), ("env", "several")})
"""Tags of ``env``, which comes alone or as a list."""
_SHOWN = 80
"""Characters of a refused value that are repeated."""
_ARTICLES = {"integer": "an integer", "number": "a number", "list": "a list"}
_LISTED = frozenset({"literal_error", "union_tag_invalid", "union_tag_not_found"})
"""Errors whose message lists what may be given."""
_NO_SECTION = frozenset({"model_type", "model_attributes_type", "truth_value"})
"""Errors of a value that may stand where a section belongs."""
_WORDS = {"None": "null", "True": "true", "False": "false"}


def problems_of(error: ValidationError) -> str:
    """Every problem in one line."""
    known = tuple(parts())
    return "; ".join(_describe(item, known) for item in error.errors(include_url=False))


def _describe(item: ErrorDetails, known: tuple[Part, ...]) -> str:
    path = _path(item["loc"], known)
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key; {_nearest(path, known)}"
    key = _key_at(path, known)
    if item["type"] == "missing":
        return f"{path}: is required{f': {_meaning(key)}' if key is not None and key.meaning else ''}"
    message = (item["msg"][0].lower() + item["msg"][1:]).removeprefix("value error, ")
    given = repr(item["input"])
    given = given if len(given) <= _SHOWN else f"{given[:_SHOWN]}…"
    section = _section_at(path, known) if item["type"] in _NO_SECTION else None
    if section is not None:
        return f"{path}: {_WORDS.get(given, given)} is no section; give {_example(section)}{', or null' if section.may_be_null else ''}"
    remedy = f"; {_wanted(key)}" if key is not None and item["type"] not in _LISTED else ""
    return f"{path or 'the file'}: {message} (got {given}){remedy}"


def _path(loc: tuple[int | str, ...], known: Iterable[Part]) -> str:
    """The key as a person writes it: pydantic puts the kind of a tagged union into the path, behind the name of the section."""
    tags = _ENV_FORMS | {(part.path.rpartition(".")[2], part.kind) for part in known if part.kind}
    return ".".join(str(part) for place, part in enumerate(loc) if not (place and (loc[place - 1], part) in tags))


def _plain(path: str) -> list[str]:
    """The names of a key's path: neither places in lists nor the mark of a list."""
    return [name.removesuffix("[]") for name in path.split(".") if not name.isdigit()]


def _section_at(path: str, known: Iterable[Part]) -> Part | None:
    """The section of the schema at ``path``, the first kind of it."""
    return next((part for part in known if part.path and _plain(part.path) == _plain(path)), None)


def _example(section: Part) -> str:
    """How a section is written: with the keys it requires, else with its first that has a default."""
    names = {key.path.rpartition(".")[2]: key.default for key in section.keys}
    required = [name for name, default in names.items() if not default and name != "kind"]
    if required:
        return f"a section with {', '.join(required)}"
    shown = next((f" such as {{{name}: {default}}}" for name, default in names.items() if default not in ("", "null", "[]", "{}")), "")
    return f"a section{shown or ', a mapping of keys'}"


def _key_at(path: str, known: Iterable[Part]) -> Key | None:
    """The key of the schema at ``path``, whose numbers are places in lists."""
    plain = _plain(path)
    return next((key for part in known for key in part.keys if _plain(key.path) == plain), None)


def _wanted(key: Key) -> str:
    """What the key takes: its type, its bounds, its default; of a text with a pattern what it means, since few people read those."""
    if "`" in key.bound:
        return f"it is {_meaning(key)}"
    type_ = key.type.removesuffix(" or null")
    null = ", or null" if type_ != key.type else ""
    default = f", such as its default {key.default}" if key.default not in ("", "null", "[]") else ""
    return f"give {_ARTICLES.get(type_, type_)}{f' {key.bound}' if key.bound else ''}{null}{default}"


def _meaning(key: Key) -> str:
    text = key.meaning.replace("`", "").rstrip(".")
    return text[0].lower() + text[1:]


def _nearest(path: str, known: Iterable[Part]) -> str:
    """Which key was most likely meant: one of that name elsewhere, one of a similar name beside it, one of a similar whole path."""
    if kinds := list(_kinds_with(path, known)):
        section = path.rpartition(".")[0]
        return f"it belongs to {section}.kind {' and '.join(kinds)}"
    names = [name.replace("[]", ".0") for part in known for name in (part.path, *(key.path for key in part.keys)) if name]
    parent, _, leaf = path.rpartition(".")
    elsewhere = [name for name in names if name.rpartition(".")[2] == leaf]
    below = [name for name in elsewhere if name.startswith(f"{parent}.")]
    beside = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == parent}
    close = [beside[name] for name in difflib.get_close_matches(leaf, beside, n=1)]
    likely = [" or ".join(below[:3])] if below else difflib.get_close_matches(path, elsewhere, n=1, cutoff=0.0)
    found = [*likely, *close, *difflib.get_close_matches(path, names, n=1)]
    listed = "`rollstream show-config` lists every key there is"
    return f"did you mean {found[0]}? {listed}" if found else f"check the spelling; {listed}"


def _kinds_with(path: str, known: Iterable[Part]) -> Iterator[str]:
    """Kinds of the section around ``path`` that have this key, or this section."""
    kind, section = "", path.rpartition(".")[0]
    for part in known:
        kind = part.kind if part.path == section else kind
        if kind and (part.path == path or any(key.path == path for key in part.keys)):
            yield kind
