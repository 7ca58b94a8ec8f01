"""What ``rollstream train --resume --fork`` does before any role starts: chooses the checkpoint, and puts aside what lies beyond it.

A fork is asked for in ``config.yaml``, in one rename; the buffer carries it out in the ledger when it starts, once. Killed at any instant between the two, the
next ``--resume`` finds the wish and goes on: :func:`make_way` may be repeated.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

from .buffer.log import refuse_without_ledger
from .buffer.recorded import open_ledger
from .configs.loader import load_run
from .configs.resume import changed_keys
from .configs.run_folder import ForkPoint, Run
from .configs.schema import Config
from .errors import ConfigError

_CHECKPOINT = re.compile(r"v(\d{6,})")


def plan_fork(folder: Path, config: Config, from_version: int | None) -> ForkPoint:
    """Where the run in ``folder`` forks to go on under ``config``: after ``from_version``, by default its newest checkpoint.

    Raises :class:`ConfigError` where no such checkpoint is kept or nothing would be left to train, :class:`RunFolderError` where nothing was streamed yet.
    """
    run = load_run(folder)
    ledger = open_ledger(run.folder)
    try:
        lineages = ledger.lineages()
        recorded = ledger.last_batch(lineages.current)
    finally:
        ledger.close()
    kept = sorted(version for version, lineage in _checkpoints(run) if lineages.shares(lineage, version) and version <= recorded)
    if not kept:
        raise ConfigError(f"{folder} has no checkpoint to fork from: go on with --resume, or start a new run")
    if from_version is not None and from_version not in kept:
        raise ConfigError(
            f"--from-version {from_version}: no checkpoint of it is kept; there are {', '.join(map(str, kept))} (learner.checkpoint.keep_every keeps more)"
        )
    begin = kept[-1] if from_version is None else from_version
    if config.learner.versions <= begin:
        raise ConfigError(
            f"learner.versions {config.learner.versions}: a fork after version {begin} would have nothing to train; "
            f"raise it above {begin}, or fork from an older checkpoint (kept are {', '.join(map(str, kept))})"
        )
    changed = changed_keys(run.config, config)
    reason = f"changed {', '.join(changed)}" if changed else "asked for"
    return ForkPoint(uuid.uuid4().hex, lineages.current + 1, begin, reason)


def check_length(folder: Path, config: Config) -> None:
    """Refuses to resume a run at a length it has passed already; one that is exactly as long may have evaluations to finish.

    Raises :class:`ConfigError`, or :class:`RunFolderError` for a run whose ledger was lost.
    """
    if not (folder / "ledger.sqlite").is_file():
        refuse_without_ledger(folder / "stream", folder / "ledger.sqlite")
        return
    wish = load_run(folder).fork
    ledger = open_ledger(folder)
    try:
        undone = wish is not None and ledger.meta("forked") != wish.fork_id
        trained = wish.version if wish is not None and undone else ledger.last_batch(ledger.lineages().current)
    finally:
        ledger.close()
    if config.learner.versions < trained:
        raise ConfigError(
            f"learner.versions {config.learner.versions}: version {trained} is recorded already; give at least that, or go back (--fork --from-version N)"
        )


def make_way(run: Run) -> None:
    """Puts aside checkpoints and rows of metrics beyond the fork of ``run``, if the buffer has not carried it out yet."""
    if run.fork is None:
        return
    ledger = open_ledger(run.folder)
    try:
        done, left = ledger.meta("forked") == run.fork.fork_id, ledger.lineages().current
    finally:
        ledger.close()
    if not done:
        _put_rows_aside(run, run.fork.version)
        _put_checkpoints_aside(run, run.fork.version, left)


def _checkpoints(run: Run) -> list[tuple[int, int]]:
    """(version, lineage) of every checkpoint that can be read; the learner checks every byte of the one it starts from."""
    found: list[tuple[int, int]] = []
    for path in run.checkpoints_folder.iterdir():
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / "manifest.json").is_file():
            manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
            found.append((int(match[1]), int(manifest["lineage"])))
    return found


def _put_checkpoints_aside(run: Run, version: int, lineage: int) -> None:
    aside = run.abandoned_checkpoints_folder / f"lineage-{lineage:03d}"
    for path in sorted(run.checkpoints_folder.iterdir(), reverse=True):
        if (match := _CHECKPOINT.fullmatch(path.name)) and int(match[1]) > version:
            aside.mkdir(parents=True, exist_ok=True)
            path.rename(aside / path.name)


def _put_rows_aside(run: Run, version: int) -> None:
    """First into the one file, then out of the other: a row that a kill leaves in both is the same row."""
    rows, abandoned = _lines(run.metrics_path), _lines(run.abandoned_metrics_path)
    beyond = [line for line in rows if _version(line) > version]
    if beyond:
        _replace(run.abandoned_metrics_path, [*abandoned, *(line for line in beyond if line not in set(abandoned))])
        _replace(run.metrics_path, [line for line in rows if _version(line) <= version])


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _version(line: str) -> int:
    try:
        return int(json.loads(line)["version"])
    except (ValueError, KeyError, TypeError):
        return 0


def _replace(path: Path, lines: list[str]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
