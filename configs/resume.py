"""What a resumed run may change, and what it keeps.

Recorded batches keep their meaning only under the settings they were made with, so on ``--resume`` those settings are the recorded ones, whether or not
the command line repeats the overrides of the first start. Everything else (length of the run, actors, checkpoints, launcher) is what the file and the
overrides say now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import RunFolderError
from .schema import Config

FIXED = (
    *("seed", "imports", "model", "env", "warmup"),
    *("learner.batch_groups", "learner.group_size", "learner.preset", "learner.loss", "learner.advantage", "learner.value"),
    *("learner.optimizer", "learner.updates", "learner.policy"),
    *("buffer.depth", "buffer.max_lag", "buffer.degenerate", "buffer.max_refill"),
)
"""Keys and sections that a resumed run keeps."""


def resumed_config(given: Config, recorded: Config, overrides: Iterable[str]) -> Config:
    """``given`` with the recorded values of everything in :data:`FIXED`.

    Raises :class:`RunFolderError` where an override of this very command asks for another value: silence would ignore it.
    """
    asked = [override.partition("=")[0] for override in overrides]
    wanted, kept = given.model_dump(), recorded.model_dump()
    for path in FIXED:
        changed = [leaf for leaf in _leaves(path, _get(kept, path), _get(wanted, path)) if any(_covers(key, leaf) for key in asked)]
        for leaf in changed:
            raise RunFolderError(
                f"{leaf} is {_get(kept, leaf)!r} in the run's record and {_get(wanted, leaf)!r} now: recorded batches would change their meaning; "
                "leave it out to go on as recorded, or start under another name (name=NEW)"
            )
        _set(wanted, path, _get(kept, path))
    return Config.model_validate(wanted)


def _leaves(path: str, before: Any, after: Any) -> list[str]:
    """Dotted keys at and below ``path`` whose values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [leaf for key in before.keys() | after.keys() for leaf in _leaves(f"{path}.{key}", before.get(key), after.get(key))]
    return [path] if before != after else []


def _covers(key: str, leaf: str) -> bool:
    """Whether the override of ``key`` sets ``leaf``, or a part of it (a leaf may be a list); a preset sets whatever it likes, but is named itself."""
    return leaf == key or leaf.startswith(f"{key}.") or key.startswith(f"{leaf}.")


def _get(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        values = values[key]
    values[last] = value
