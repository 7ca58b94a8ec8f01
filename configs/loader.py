"""Reads a configuration: YAML, presets, dotted overrides, validation; and writes or reopens a run folder.

Order of precedence, lowest first: defaults of the schema, the preset named by ``learner.preset``, the YAML file, overrides ``a.b=value``;
a mapping given as an override is merged into the section that is there (``overrides``).
YAML is 1.2 (``1e-5`` is a number, ``no`` is a word); duplicate keys are refused.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.resources
import io
import platform
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from ..errors import ConfigError, RunFolderError
from .learner_schema import Learner
from .overrides import TOO_DEEP, apply_override, merge
from .problems import problems_of
from .resume import resumed_config
from .run_folder import ForkPoint, Run
from .schema import Config, Sampling

_PACKAGE = importlib.resources.files(__name__.rpartition(".")[0])
_RECORDED_PACKAGES = ("rollstream", "torch", "transformers", "tokenizers", "pyarrow", "pyzmq", "numpy", "gymnasium")


def load_config(source: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Loads ``source``, a path or the name of a shipped recipe, applies ``overrides`` (``a.b=value``) and validates.

    Raises :class:`ConfigError` with one line per problem: the key, the value, the bound.
    """
    name, text = _read(source)
    values = _parse(text, name)
    values.pop("provenance", None)  # a run's own config.yaml is a configuration too
    for override in overrides:
        apply_override(values, override)
    return _validate(_with_lengths(_with_preset(values, name)), name)


def overridden(config: Config, overrides: Iterable[str]) -> Config:
    """``config`` with the values of ``overrides`` (``a.b=value``) in the place of its own.

    Raises :class:`ConfigError` as :func:`load_config` does.
    """
    values = config.model_dump(mode="json")
    for override in overrides:
        apply_override(values, override)
    return _validate(_with_lengths(values), "the run's configuration")


def load_run(folder: str | Path) -> Run:
    """Opens an existing run folder. Raises :class:`RunFolderError` where it is none; the message names the runs beside it."""
    folder = Path(folder).resolve()
    path = folder / "config.yaml"
    if not path.is_file():
        beside = sorted(entry.parent.name for entry in folder.parent.glob("*/config.yaml"))[:8]
        there = f"; {folder.parent} holds {', '.join(beside)}" if beside else ""
        raise RunFolderError(f"{folder} is not a run folder: it has no config.yaml{there}")
    values = _parse(_text(path), str(path))
    provenance = values.pop("provenance", None)
    if not isinstance(provenance, dict) or not isinstance(run_id := cast("dict[str, Any]", provenance).get("run_id"), str):
        raise RunFolderError(f"{path} carries no provenance.run_id: it was not written by rollstream train")
    fork = cast("dict[str, Any]", provenance).get("fork")
    return Run(folder=folder, config=_validate(values, str(path)), run_id=run_id, fork=ForkPoint(**fork) if fork else None)


def load_lineage(run: Run, lineage: int) -> Run:
    """``run`` under the configuration that ``lineage`` was trained with."""
    later = sorted((int(path.name.split(".")[1].removeprefix("before-")), path) for path in run.folder.glob("config.before-*.yaml"))
    path = next((path for first, path in later if first > lineage), None)
    if path is None:
        return run
    values = _parse(_text(path), str(path))
    values.pop("provenance", None)
    return dataclasses.replace(run, config=_validate(values, str(path)))


def create_run(config: Config, *, resume: bool, fork: ForkPoint | None = None) -> Run:
    """Makes the run folder of ``config``, or reopens it with ``resume`` (``config`` is then what :func:`load_resumed` gave).

    With ``fork`` the configuration so far is kept beside the new one, under the number of the lineage that begins.

    Raises :class:`RunFolderError` where the folder already holds a run, or holds none to resume.
    """
    folder = (Path(config.folder) / config.name).resolve()
    if resume:
        recorded = load_run(folder)
        if fork is not None and not (before := folder / f"config.before-{fork.lineage:03d}.yaml").exists():
            _write(before, recorded.config_path.read_text(encoding="utf-8"))
        run = Run(folder=folder, config=config, run_id=recorded.run_id, fork=fork or recorded.fork)
        _write_config(run)
        return run
    if folder.exists() and any(entry.name != ".lock" for entry in folder.iterdir()):
        raise RunFolderError(f"{folder} already holds a run; go on with --resume, choose another name (name=NEW), or remove the folder")
    run = Run(folder=folder, config=config, run_id=uuid.uuid4().hex)
    for path in (run.stream_folder, run.checkpoints_folder, run.logs_folder):
        path.mkdir(parents=True, exist_ok=True)
    _write_config(run)
    return run


def load_resumed(source: str | Path, overrides: Sequence[str] = (), *, fork: bool = False) -> Config:
    """The configuration to go on with: :func:`load_config`, with what the run's record fixes (less of it for a ``fork``).

    Raises :class:`RunFolderError` where there is no such run, or where an override contradicts the record.
    """
    config = load_config(source, overrides)
    folder, written = (Path(config.folder) / config.name).resolve(), Path(source).resolve().parent
    if Path(source).name == "config.yaml" and (written / "ledger.sqlite").is_file() and written != folder:
        raise RunFolderError(
            f"{source} is the record of the run in {written}, but its folder and name say {folder}; "
            f"add folder={written.parent} name={written.name} to go on with the one it lies in"
        )
    return resumed_config(config, load_run(folder).config, overrides, fork=fork)


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML text."""
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue]
    yaml.dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()


def _read(source: str | Path) -> tuple[str, str]:
    path = Path(source)
    if not str(source):
        raise ConfigError("CONFIG is empty; give a YAML file, or the name of a shipped recipe")
    try:
        if path.is_dir():
            raise ConfigError(f"{source} is a folder; give a YAML file, or the name of a shipped recipe")
        if path.is_file():
            return str(path), _text(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{str(source)[:80]!r} cannot be read: {reason}; give a YAML file, or the name of a shipped recipe") from None
    recipe = _PACKAGE / f"{source}.yaml"
    if path.name == str(source) and recipe.is_file():
        return str(source), recipe.read_text(encoding="utf-8")
    recipes = sorted(entry.name.removesuffix(".yaml") for entry in _PACKAGE.iterdir() if entry.name.endswith(".yaml"))
    raise ConfigError(f"{source}: no such file, and no shipped recipe of that name; recipes are {', '.join(recipes)}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        values: object = YAML(typ="safe", pure=True).load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{name}:{line}: {str(error.problem).splitlines()[0]}; keep one of them") from None
    except YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name}: {TOO_DEEP}") from None
    except ValueError as error:  # such as an integer of thousands of digits
        raise ConfigError(f"{name}: holds a value that cannot be read: {str(error).partition(';')[0]}") from None
    if values is None:
        raise ConfigError(f"{name} is empty; it needs at least name, env and learner, see `rollstream show-config quickstart`")
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: holds {type(values).__name__}, expected a mapping of keys such as name, env, learner")
    return cast("dict[str, Any]", values)


def _with_preset(values: dict[str, Any], name: str) -> dict[str, Any]:
    learner = values.get("learner")
    field = Learner.model_fields["preset"]
    preset = cast("dict[str, Any]", learner).get("preset", field.default) if isinstance(learner, dict) else field.default
    known = get_args(field.annotation)
    if preset not in known:
        raise ConfigError(f"{name}: learner.preset: {preset!r} is not one of {', '.join(known)}")
    fragment = _parse((_PACKAGE / "presets" / f"{preset}.yaml").read_text(encoding="utf-8"), f"presets/{preset}.yaml")
    return merge(fragment, values)


def _with_lengths(values: dict[str, Any]) -> dict[str, Any]:
    """Fills in the lengths that follow from the longest trajectory where nobody gave them: the overlong penalty's, and that of ``seq_mean_fixed``.

    Only mappings are looked at: what else stands there is for the validation to refuse.
    """
    longest = _at(values, "actors", "sampling").get("max_trajectory_tokens", Sampling.model_fields["max_trajectory_tokens"].default)
    filled: dict[str, Any] = {}
    if isinstance(overlong := _at(values, "learner", "advantage").get("overlong"), dict):
        lengths = cast("dict[str, Any]", overlong)
        max_len = lengths.get("max_len", longest)
        lengths = {"max_len": max_len, **({"buffer": max(max_len // 5, 1)} if isinstance(max_len, int) else {}), **lengths}
        filled["advantage"] = {"overlong": lengths}
    if _at(values, "learner", "loss").get("agg") == "seq_mean_fixed":
        filled["loss"] = {"agg_length": _at(values, "learner", "loss").get("agg_length") or longest}
    return merge(values, {"learner": filled}) if filled else values


def _at(values: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The section under ``keys``; empty where there is none."""
    for key in keys:
        below = values.get(key)
        values = cast("Mapping[str, Any]", below) if isinstance(below, dict) else {}
    return values


def _validate(values: dict[str, Any], name: str) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{name}: {problems_of(error)}") from None


def _write_config(run: Run) -> None:
    provenance = {
        "run_id": run.run_id,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "git": _git_commit(),
        "packages": {name: _version(name) for name in _RECORDED_PACKAGES},
        **({} if run.fork is None else {"fork": dataclasses.asdict(run.fork)}),
    }
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump({"provenance": provenance}, stream)
    _write(run.config_path, dump_config(run.config) + "# What made this run; not configuration.\n" + stream.getvalue())


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    """Commit of the working folder the run was started from, with ``-dirty`` where it had changes; empty outside a repository."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
