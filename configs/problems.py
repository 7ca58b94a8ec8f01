"""What is wrong with a configuration, in words: the key, the value, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .explain import Key, Part, parts

_UNIONS = {"model", "sampler", "env", "launcher"}
_KINDS = {"tiny", "folder", "torch", "scripted", "one", "several", "local", "ray"}
_SHOWN = 80
"""Characters of a refused value that are repeated."""
_ARTICLES = {"integer": "an integer", "number": "a number", "list": "a list"}
_LISTED = frozenset({"literal_error", "union_tag_invalid", "union_tag_not_found"})
"""Errors whose message lists what may be given."""


def problems_of(error: ValidationError) -> str:
    """Every problem in one line."""
    known = tuple(parts())
    return "; ".join(_describe(item, known) for item in error.errors(include_url=False))


def _describe(item: ErrorDetails, known: tuple[Part, ...]) -> str:
    path = _path(item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key; {_nearest(path, known)}"
    key = _key_at(path, known)
    if item["type"] == "missing":
        return f"{path}: is required{f': {_meaning(key)}' if key is not None and key.meaning else ''}"
    message = (item["msg"][0].lower() + item["msg"][1:]).removeprefix("value error, ")
    given = repr(item["input"])
    given = given if len(given) <= _SHOWN else f"{given[:_SHOWN]}…"
    remedy = f"; {_wanted(key)}" if key is not None and item["type"] not in _LISTED else ""
    return f"{path or 'the file'}: {message} (got {given}){remedy}"


def _path(loc: tuple[int | str, ...]) -> str:
    """The key as a person writes it: pydantic puts the kind of a tagged union into the path."""
    return ".".join(str(part) for place, part in enumerate(loc) if not (place and part in _KINDS and loc[place - 1] in _UNIONS))


def _key_at(path: str, known: Iterable[Part]) -> Key | None:
    """The key of the schema at ``path``, whose numbers are places in lists."""
    plain = [part for part in path.split(".") if not part.isdigit()]
    for part in known:
        for key in part.keys:
            if [name.removesuffix("[]") for name in key.path.split(".")] == plain:
                return key
    return None


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
    kinds = [part.kind for part in known for key in part.keys if key.path == path]
    if kinds:
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
