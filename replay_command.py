"""``rollstream replay``: what the command checks and prints. The computing is done by ``learner/replay.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from .configs.checks import check_config
from .configs.loader import overridden
from .configs.run_folder import Run
from .configs.schema import Config
from .envs.registry import load_imports
from .errors import ConfigError
from .learner.replay import DIGEST, Figure, Replayed, replay

CHANGEABLE = ("learner.loss", "learner.advantage")
"""What ``--what-if`` may change: how a batch is scored. Corrections belong to the loss."""


def replay_lines(run: Run, version: int, lineage: int | None = None, *, what_if: Sequence[str] = (), as_json: bool = False) -> tuple[list[str], bool]:
    """Replays a step; gives the lines to print, and whether everything agreed (a question of what-if has nothing to agree on).

    Raises :class:`ConfigError` for what cannot be replayed or asked.
    """
    load_imports(run.config.imports)
    if what_if:
        _changed(run.config, what_if)  # so that what cannot be asked is refused before anything is computed
    replayed = replay(run, version, lineage, (lambda config: _changed(config, what_if)) if what_if else None)
    if as_json:
        return [_json(replayed, what_if)], bool(what_if) or not replayed.differing
    return list(_words(replayed, what_if)), bool(what_if) or not replayed.differing


def _changed(config: Config, what_if: Sequence[str]) -> Config:
    for change in what_if:
        key = change.partition("=")[0]
        if not any(key == section or key.startswith(f"{section}.") for section in CHANGEABLE):
            raise ConfigError(f"--what-if {key} is not about how a batch is scored; keys of {' and '.join(CHANGEABLE)} can be asked about")
    changed = overridden(config, what_if)
    check_config(changed)
    return changed


def _words(replayed: Replayed, what_if: Sequence[str]) -> Iterator[str]:
    redone = replayed.version - 1 - replayed.checkpoint
    through = f" and {redone} redone {'batch' if redone == 1 else 'batches'}" if redone else ""
    yield f"version {replayed.version} of lineage {replayed.lineage}, from checkpoint v{replayed.checkpoint:06d}{through}"
    if what_if:
        yield f"what if {', '.join(what_if)}: the same batch and the same weights, nothing of it is kept"
        if replayed.differing:
            yield from _table(replayed, replayed.differing, ("recorded", "what if"))
        yield f"{len(replayed.names) - len(replayed.differing)} other figures are the same" if replayed.differing else "every figure is the same"
    elif replayed.differing:
        yield from _table(replayed, replayed.differing, ("recorded", "replayed"))
        yield f"{len(replayed.differing)} of {len(replayed.names)} figures differ ({_within(replayed)})"
    else:
        digest = ", the digest of the weights among them" if DIGEST in replayed.names else ""
        yield f"all {len(replayed.names)} figures agree{digest} ({_within(replayed)})"


def _within(replayed: Replayed) -> str:
    return f"compared within {replayed.tolerance:g} of their size" if replayed.tolerance else "compared to the last digit recorded"


def _table(replayed: Replayed, names: Sequence[str], sides: tuple[str, str]) -> Iterator[str]:
    rows = [("figure", *sides, "difference")]
    for name in names:
        recorded, found = replayed.recorded.get(name), replayed.found.get(name)
        rows.append((name, _text(recorded), _text(found), _difference(recorded, found)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, *cells in rows:
        yield "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]).rstrip()


def _text(value: Figure | None) -> str:
    return "–" if value is None else value if isinstance(value, str) else f"{value:.9g}"


def _difference(recorded: Figure | None, found: Figure | None) -> str:
    if recorded == found or not isinstance(recorded, int | float) or not isinstance(found, int | float):
        return ""
    return f"{found - recorded:+.3g}"


def _json(replayed: Replayed, what_if: Sequence[str]) -> str:
    other = "what_if" if what_if else "replayed"
    figures = {name: {"recorded": replayed.recorded.get(name), other: replayed.found.get(name)} for name in replayed.names}
    head: dict[str, object] = {"version": replayed.version, "lineage": replayed.lineage, "checkpoint": replayed.checkpoint}
    if what_if:
        return json.dumps({**head, "what_if": list(what_if), "figures": figures}, indent=1)
    verdict = {"tolerance": replayed.tolerance, "agree": not replayed.differing, "differing": replayed.differing}
    return json.dumps({**head, **verdict, "figures": figures}, indent=1)
