"""What a resumed run may change, and what it keeps.

Recorded batches keep their meaning only under the settings they were made with, so on ``--resume`` those settings are the recorded ones, whether or not
the command line repeats the overrides of the first start. Everything else (length of the run, actors, checkpoints, launcher) is what the file and the
overrides say now. A fork begins another history from a checkpoint: it keeps what the run is about, and may change how it is trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import RunFolderError
from .overrides import named_keys
from .schema import Config

LASTING = ("seed", "model", "env", "warmup", "learner.value", "learner.policy.lora", "actors.sampling.temperature")
"""Keys and sections that a fork keeps too: the tasks that were leased, what was played and the weights that were saved belong to them."""
FIXED = (
    *LASTING,
    "imports",
    *("learner.batch_groups", "learner.group_size", "learner.preset", "learner.loss", "learner.advantage"),
    *("learner.optimizer", "learner.updates", "learner.policy"),
    *("buffer.depth", "buffer.max_lag", "buffer.degenerate", "buffer.max_refill"),
)
"""Keys and sections that a resumed run keeps."""
LAYOUT = tuple(f"learner.policy.{name}" for name in ("ranks", "reshard_after_forward", "reduce", "start_timeout_s"))
"""Keys inside them that may change all the same: how the policy is spread over processes."""


def resumed_config(given: Config, recorded: Config, overrides: Iterable[str], *, fork: bool = False) -> Config:
    """``given`` with the recorded values of everything in :data:`FIXED`; with ``fork`` of what is :data:`LASTING`.

    Raises :class:`RunFolderError` where an override of this very command asks for another value: silence would ignore it.
    """
    asked = [key for override in overrides for key in named_keys(override)]
    wanted, kept = given.model_dump(), recorded.model_dump()
    if _get(wanted, "learner.policy.kind") == _get(kept, "learner.policy.kind"):
        for path in LAYOUT:
            if _get(wanted, path) is not None:
                _set(kept, path, _get(wanted, path))
    for path in LASTING if fork else FIXED:
        changed = [leaf for leaf in _leaves(path, _get(kept, path), _get(wanted, path)) if any(_covers(key, leaf) for key in asked)]
        for leaf in changed:
            forks = fork or any(_covers(path, leaf) or path == leaf for path in LASTING)
            other = "" if forks else "add --fork to go on under the new value as another lineage, "
            raise RunFolderError(
                f"{leaf} is {_get(kept, leaf)!r} in the run's record and {_get(wanted, leaf)!r} now: recorded batches would change their meaning; "
                f"leave it out to go on as recorded, {other}or start under another name (name=NEW)"
            )
        if _get(kept, path) is not None or _get(wanted, path) is not None:  # a kind of policy may not have the key at all
            _set(wanted, path, _get(kept, path))
    return Config.model_validate(wanted)


def changed_keys(before: Config, after: Config) -> list[str]:
    """Dotted keys among the fixed ones whose values differ."""
    old, new = before.model_dump(), after.model_dump()
    return [leaf for path in FIXED for leaf in _leaves(path, _get(old, path), _get(new, path))]


def kept_as_recorded(given: Config, resumed: Config, shown: int = 5) -> str:
    """What a run goes on with although the configuration that was ``given`` says otherwise, in one line; empty where nothing differs."""
    keys, said, kept = changed_keys(given, resumed), given.model_dump(), resumed.model_dump()
    named = [f"{key} {_get(kept, key)!r} (given: {_get(said, key)!r})" for key in keys[:shown]]
    more = f" and {len(keys) - shown} more" if len(keys) > shown else ""
    return f"goes on as recorded: {', '.join(named)}{more}" if keys else ""


def _leaves(path: str, before: Any, after: Any) -> list[str]:
    """Dotted keys at and below ``path`` whose values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [leaf for key in sorted(before.keys() | after.keys()) for leaf in _leaves(f"{path}.{key}", before.get(key), after.get(key))]
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
