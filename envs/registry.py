"""The registry: versioned ids under which environments are found, on top of Gymnasium's own.

An environment becomes known by :func:`register`, called when a module is imported: one named in ``imports:`` of the run's configuration (a module or a
``.py`` file), one named in the id itself (``"pkg.module:ns/Name-v0"``), or one an installed package offers under the entry-point group
``rollstream.envs``. The same holds in every process, spawned ones too: nothing is inherited, everything is imported again.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import registry as _gymnasium

from ..errors import ConfigError, EnvError, RollstreamError, UnknownEnv
from .blame import name_and_text, user_line
from .chat import ChatEnv

logger = logging.getLogger(__name__)

ENTRY_POINTS = "rollstream.envs"
Entry = type[ChatEnv] | Callable[..., ChatEnv] | str
_ID = re.compile(r"[\w-]+/[\w.-]+-v\d+")


@dataclass(frozen=True, slots=True)
class Registration:
    """What is known about an id. Limits left at None are the class's own."""

    env_id: str
    entry: Entry
    max_turns: int | None = None
    step_timeout_s: float | None = None
    episode_timeout_s: float | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


_registrations: dict[str, Registration] = {}
_broken_plugins: dict[str, str] = {}


def register(
    env_id: str,
    entry: Entry,
    *,
    max_turns: int | None = None,
    step_timeout_s: float | None = None,
    episode_timeout_s: float | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Makes an environment known under a versioned id, here and to ``gymnasium.make``. Repeating it, as a repeated import does, is fine.

    Args:
        env_id: ``namespace/Name-vN``.
        entry: the class, a function that returns an instance, or ``"module:Class"``, imported when first made.
        max_turns: turns of the policy before the episode is truncated.
        step_timeout_s: seconds one reset or step may take.
        episode_timeout_s: seconds an episode may take.
        kwargs: arguments of the constructor; those of the configuration come on top.

    Raises:
        ConfigError: an id without namespace or version, a limit that is not positive, an id somebody else holds, or an entry that makes no ChatEnv.

    """
    if not _ID.fullmatch(env_id):
        raise ConfigError(f"{env_id!r} is not an environment id; write namespace/Name-vN, for example demo/{_suggest_name(env_id)}-v0")
    for name, limit in (("max_turns", max_turns), ("step_timeout_s", step_timeout_s), ("episode_timeout_s", episode_timeout_s)):
        if limit is not None and not limit > 0:
            raise ConfigError(f"{env_id}: {name} is {limit}; it must be greater than 0, or left out")
    if isinstance(entry, type) and not issubclass(cast(type, entry), ChatEnv):
        raise ConfigError(f"{env_id}: {entry.__name__} is not a rollstream.ChatEnv; derive it from ChatEnv")
    if isinstance(entry, str) and not re.fullmatch(r"[\w.]+:\w+", entry):
        raise ConfigError(f"{env_id}: entry {entry!r} does not name a class; write 'package.module:Class'")
    held = _registrations.get(env_id)
    if held is not None and _name_of(held.entry) != _name_of(entry):
        raise ConfigError(f"{env_id} is registered already, by {_name_of(held.entry)}; give {_name_of(entry)} another name or a new version")
    if held is None and env_id in _gymnasium:
        raise ConfigError(f"{env_id} is registered already, with gymnasium; give {_name_of(entry)} another name or a new version")
    registration = Registration(env_id, entry, max_turns, step_timeout_s, episode_timeout_s, dict(kwargs or {}))
    _gymnasium.pop(env_id, None)
    gymnasium.register(env_id, entry_point=functools.partial(_create, registration), kwargs=dict(registration.kwargs))
    _registrations[env_id] = registration


def registered_ids() -> list[str]:
    """Every known id, sorted: built-in ones, those of installed packages, and whatever was imported so far."""
    _load_plugins()
    return sorted(_registrations)


def spec_of(env_id: str) -> Registration:
    """What is known about an id, ``"pkg.module:ns/Name-v0"`` imports the module first.

    Raises:
        UnknownEnv: nothing is registered under it; the message names the closest ids.

    """
    module, _, name = env_id.rpartition(":")
    if module and name not in _registrations:
        load_imports([module])
    if name not in _registrations:
        _load_plugins()
    if name in _registrations:
        return _registrations[name]
    close = difflib.get_close_matches(name, _registrations, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(_registrations))}."
    broken = "".join(f" (The package of entry point {name} failed to import: {reason}.)" for name, reason in _broken_plugins.items())
    raise UnknownEnv(f"no environment {name!r}: {hint} If it is yours, name its module or file under imports: in the configuration{broken}")


def make(env_id: str, **kwargs: Any) -> ChatEnv:
    """A new environment, without wrappers. ``kwargs`` go to its constructor, over those it was registered with.

    Raises:
        UnknownEnv: nothing is registered under ``env_id``.
        ConfigError: arguments the constructor does not take.
        EnvError: the constructor raised.

    """
    registration = spec_of(env_id)
    spec = _gymnasium[registration.env_id]
    return cast(ChatEnv, gymnasium.make(spec, disable_env_checker=True, **kwargs).unwrapped)


def demonstrates(env_id: str, **kwargs: Any) -> bool:
    """Whether an environment has demonstrations of its own. Raises what :func:`make` raises."""
    env = make(env_id, **kwargs)
    try:
        return type(env).demonstrate is not ChatEnv.demonstrate
    finally:
        env.close()


def load_imports(imports: Iterable[str]) -> None:
    """Imports modules (``pkg.module``) and files (``path/file.py``, relative to the working folder) that register environments.

    Each is imported once per process. The folder of a file, and the working folder for a module, are searched last for what they import in turn.

    Raises:
        ConfigError: one is missing or fails to import; one line, naming it and the line that failed.

    """
    for name in imports:
        try:
            if not name.strip():
                raise ConfigError("imports: a name is empty; name a file, such as my_env.py, or a module, such as package.my_env")
            if name.endswith(".py"):
                _import_file(Path(name))
            elif os.sep in name or name.startswith((".", "~")):
                what = "a folder" if Path(name).expanduser().is_dir() else "neither a .py file nor a module"
                raise ConfigError(f"imports: {name} is {what}; name one file, such as {name.rstrip('/')}/my_env.py, or a module, such as package.my_env")
            else:
                _search_last(Path.cwd())
                importlib.import_module(name)
        except RollstreamError:
            raise
        except SystemExit as error:
            raise ConfigError(
                f"imports: {name} called sys.exit({error}){user_line(error)}; a file that is imported must not end the process: "
                "put what only a script does under if __name__ == '__main__'"
            ) from error
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise ConfigError(f"imports: no module {name!r}; install it, run from the folder it lies in, or name a file such as envs/{name}.py") from error
            raise ConfigError(f"imports: {name} failed: {_said(error)}{_line_of(error)}") from error


def _import_file(path: Path) -> None:
    full = path.expanduser().resolve()
    if not full.is_file():
        raise ConfigError(f"imports: no file {path} (looked for {full}); write its path from the working folder, or an absolute one")
    name = f"{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise ConfigError(f"imports: {path} cannot be imported as Python")
    _search_last(full.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: type hints and dataclasses look their module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _search_last(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _create(registration: Registration, **kwargs: Any) -> ChatEnv:
    """What ``gymnasium.make`` calls: the instance, with the limits it was registered with."""
    env_id = registration.env_id
    entry = _resolve(registration)
    _check_arguments(env_id, entry, kwargs)
    try:
        env: object = entry(**kwargs)
    except RollstreamError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise EnvError(f"{env_id}: its constructor raised {name_and_text(error)}{user_line(error)}") from error
    if not isinstance(env, ChatEnv):
        raise ConfigError(f"{env_id}: {_name_of(entry)} made a {type(env).__name__}, not a rollstream.ChatEnv; derive its class from ChatEnv")
    for name in ("max_turns", "step_timeout_s", "episode_timeout_s"):
        if (limit := getattr(registration, name)) is not None:
            setattr(env, name, limit)
    return env


def _resolve(registration: Registration) -> Callable[..., object]:
    if not isinstance(registration.entry, str):
        return registration.entry
    module, _, name = registration.entry.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{registration.env_id}: entry {registration.entry!r} cannot be imported: {_first_line(error)}") from error
    return cast(Callable[..., object], found)


def _check_arguments(env_id: str, entry: Callable[..., object], kwargs: dict[str, Any]) -> None:
    """Told apart from a TypeError inside the constructor by binding the arguments beforehand."""
    bound = functools.partial(entry.__init__, None) if isinstance(entry, type) else entry
    try:
        signature = inspect.signature(bound)
    except ValueError:  # some callables written in C have none
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        takes = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in signature.parameters.values())
        raise ConfigError(f"env.kwargs of {env_id}: {error}; it takes {takes or 'no arguments'}") from error


@functools.cache
def _load_plugins() -> None:
    """Imports what installed packages offer, once. A package that fails costs a warning, not every run on the machine."""
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            found = point.load()
            if callable(found):
                found()
        except Exception as error:  # noqa: BLE001 - somebody else's package may raise anything
            _broken_plugins[point.name] = f"{type(error).__name__}: {_first_line(error)}"
            logger.warning("plugin=%s state=failed error=%s", point.name, _broken_plugins[point.name])


def _name_of(entry: Callable[..., object] | str) -> str:
    """``module:Class``, the same for a class and for its name, and for a class that a notebook defines again."""
    if isinstance(entry, str):
        return entry
    named = entry if hasattr(entry, "__qualname__") else type(entry)
    return f"{named.__module__}:{named.__qualname__}"


def _suggest_name(env_id: str) -> str:
    return re.sub(r"-v\d+$", "", re.sub(r"\W", "", env_id.rpartition("/")[2])) or "Name"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _said(error: Exception) -> str:
    """What an error of an import says; a syntax error without its place, which :func:`_line_of` gives, other errors than ours and Python's with their name."""
    if isinstance(error, SyntaxError):
        return error.msg
    return _first_line(error) if isinstance(error, ImportError | NameError) else name_and_text(error)


def _line_of(error: BaseException) -> str:
    """Where user code failed, as `` (file, line n)``."""
    if line := user_line(error):
        return line
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})" if trace is not None else ""


register("rollstream/KeyValue-v0", "rollstream.envs.key_value:KeyValue")
register("rollstream/WordCount-v0", "rollstream.envs.word_count:WordCount")
