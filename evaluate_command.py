"""``rollstream evaluate``: a checkpoint of a run is scored by the evaluators that score while training goes on.

It is a run of its own, in ``RUN/evaluations/vNNNNNN-K``, with a buffer, a scorer in the place of the learner, and evaluators: so it may go on beside the run
itself, which it only reads, and ``rollstream log`` and ``rollstream audit`` work on it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import evaluation_lines
from .configs.checks import check_config, check_machine
from .configs.loader import create_run, load_config
from .configs.run_folder import Run
from .configs.schema import Config
from .envs import registry
from .envs.trial import try_out
from .errors import ConfigError, RoleFailed, RollstreamError
from .log_command import aligned
from .processes import LocalLauncher, scoring_roles_of
from .supervisor import Supervisor
from .tail import read_rows
from .watch import View

LAST = "last"


@dataclass(frozen=True, slots=True)
class Scored:
    """What came out: ``rows`` as in ``evaluations.jsonl``, and the run that has the trajectories. ``error`` says why there are none."""

    run: Run
    rows: list[dict[str, Any]]
    exit_code: int
    error: RollstreamError | None


def score(run: Run, version: str, overrides: Sequence[str], view: View) -> Scored:
    """Scores a version of ``run``: the number of a kept checkpoint, or ``last``. ``overrides`` are of the form ``evaluation.x=value``.

    Raises:
        ConfigError: there is no such checkpoint, or something other than evaluation is to be changed, or the settings contradict each other.

    """
    checkpoint = checkpoint_of(run, version)
    config = scoring_config(run, checkpoint, overrides)
    check_config(config)
    registry.load_imports(config.imports)
    for env_id, kwargs in config.evaluated_envs().items():
        try_out(env_id, kwargs)
    check_machine(Run(folder=Path(config.folder) / config.name, config=config, run_id="0" * 32))
    scoring = create_run(config, resume=False)
    outcome = Supervisor(scoring, LocalLauncher(scoring), view, scoring_roles_of(config)).supervise()
    rows = read_rows(scoring.evaluations_path)
    error = outcome.error
    if error is None and outcome.exit_code == 0 and (not rows or rows[-1]["state"] != "done"):
        error = RoleFailed(f"version {version} was not evaluated: {rows[-1]['reason'] if rows else 'nobody played it'}; see {scoring.logs_folder}")
    return Scored(scoring, rows, outcome.exit_code if error is None else max(outcome.exit_code, 1), error)


def checkpoint_of(run: Run, version: str) -> Path:
    """The checkpoint of ``version``. Raises :class:`ConfigError` where it was not kept, naming those that were."""
    kept = sorted(path for path in run.checkpoints_folder.glob("v*") if path.name[1:].isdigit())
    if not kept:
        raise ConfigError(
            f"{run.folder} has no checkpoint yet; its learner writes the first before version 1, once warmed up: wait for it, or go on with train --resume"
        )
    if version == LAST:
        return kept[-1]
    found = [path for path in kept if version.isdigit() and int(path.name[1:]) == int(version)]
    if not found:
        there = ", ".join(str(int(path.name[1:])) for path in kept)
        raise ConfigError(
            f"--version {version}: kept are the checkpoints of versions {there}; give one of them, or last (learner.checkpoint.keep_every keeps more)"
        )
    return found[0]


def scoring_config(run: Run, checkpoint: Path, overrides: Sequence[str]) -> Config:
    """The configuration of the run that scores ``checkpoint``: that of ``run``, with its own name, model, and ``evaluation``."""
    for override in overrides:
        if not override.startswith("evaluation."):
            raise ConfigError(f"{override}: only evaluation.* can be changed here; everything else is as the run was trained")
    folder = run.folder / "evaluations"
    name = next(name for place in itertools.count(1) if not (folder / (name := f"{checkpoint.name}-{place}")).exists())
    own = [f"name={name}", f"folder={json.dumps(str(folder))}", f"model={json.dumps({'kind': 'folder', 'path': str(policy_folder(run, checkpoint))})}"]
    own += ["warmup=null", "buffer.endpoint=ipc", "weights.channel=shm"]
    section = [] if run.config.evaluation is not None else ["evaluation={}"]
    return load_config(run.config_path, [*own, *section, *overrides])


def policy_folder(run: Run, checkpoint: Path) -> Path:
    """The Hugging Face folder of the policy in ``checkpoint``; adapters are merged into one of their own first, which stays for the next time."""
    if not (checkpoint / "adapter").is_dir():
        return checkpoint / "model"
    from .pretrained import export

    try:
        lineage = int(json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["lineage"])
    except (OSError, ValueError, KeyError, TypeError):
        lineage = 0  # the export says what is wrong with it
    merged = run.folder / "evaluations" / "merged" / f"lineage-{lineage:03d}" / checkpoint.name
    if not merged.is_dir():
        export(run.checkpoints_folder, int(checkpoint.name[1:]), merged)
    return merged


def lines(scored: Scored) -> Iterator[str]:
    """What is printed: a table, and where the numbers and the trajectories are."""
    yield from aligned(evaluation_lines.table(scored.rows))
    yield f"numbers       {scored.run.evaluations_path}"
    yield f"trajectories  rollstream log {scored.run.folder} --purpose eval"
