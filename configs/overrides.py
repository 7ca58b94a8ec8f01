"""Overrides ``a.b=value`` of the command line: read, and laid over the values of a file.

A mapping is merged into the section that is there, key by key, so ``learner.optimizer={weight_decay: 0.1}`` leaves its learning rate alone. Where a section
comes in kinds and the override names another kind than the one there, it takes its place: keys of one kind mean nothing in another. Lists and all other
values replace what is there, ``null`` among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ..errors import ConfigError
from .explain import parts

TOO_DEEP = "brackets or sections lie too deep in one another; a configuration has a handful of levels"


def apply_override(values: dict[str, Any], override: str) -> None:
    """Lays ``override`` over ``values``, in place. Raises :class:`ConfigError` where it is none, or leads nowhere."""
    keys, value = _read(override)
    _set_at(values, keys, lambda there: merge(there, value, ".".join(key for key in keys if not key.isdigit())), override)


def named_keys(override: str) -> list[str]:
    """Dotted keys that ``override`` sets: of a mapping those in it, since it leaves the others alone.

    Raises :class:`ConfigError` as :func:`apply_override` does.
    """
    keys, value = _read(override)
    return list(_leaves(".".join(keys), value))


def merge(below: object, above: object, path: str = "") -> Any:
    """``above`` over ``below``, mappings key by key; ``path`` is where they lie. Neither is changed."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    there, given = cast("dict[str, Any]", below), cast("dict[str, Any]", above)
    if path in _in_kinds() and "kind" in there and given.get("kind", there["kind"]) != there["kind"]:
        return above
    merged = dict(there)
    for key, value in given.items():
        merged[key] = merge(there.get(key), value, f"{path}.{key}" if path else str(key))
    return merged


@cache
def _in_kinds() -> frozenset[str]:
    """Sections that are a choice between kinds with keys of their own. ``learner.loss`` is none: its ``kind`` is a key like the others."""
    return frozenset(part.path for part in parts() if part.kind)


def _read(override: str) -> tuple[list[str], object]:
    path, separator, text = override.partition("=")
    keys = path.split(".")
    if not separator or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form a.b=value")
    try:
        value: object = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"override {override[:80]!r}: {TOO_DEEP}") from None
    return keys, value


def _set_at(node: object, keys: Sequence[str], change: Callable[[object], Any], override: str, above: str = "") -> None:
    """Changes what lies under ``keys`` below ``node``, which lies at ``above``; a number is a place in a list."""
    place: Any = keys[0]
    if isinstance(node, list):
        if not keys[0].isdigit() or int(keys[0]) >= len(cast("list[Any]", node)):
            last = len(cast("list[Any]", node)) - 1
            raise ConfigError(f"override {override!r}: {above} is a list; name a place in it, {above}.0 to {above}.{last}")
        place = int(keys[0])
    elif not isinstance(node, dict):
        raise ConfigError(f"override {override!r}: {above} is {node!r}, not a section with keys of its own")
    inner: Any = node
    if len(keys) == 1:
        inner[place] = change(inner[place] if isinstance(node, list) else inner.get(place))
        return
    if isinstance(node, dict):
        inner.setdefault(place, {})
    _set_at(inner[place], keys[1:], change, override, keys[0])


def _leaves(path: str, value: object) -> Iterator[str]:
    if not isinstance(value, Mapping) or not value:
        yield path
        return
    for key, inner in cast("Mapping[str, Any]", value).items():
        yield from _leaves(f"{path}.{key}", inner)
