"""Replaying a step: the batch from log and ledger, the weights from the checkpoint before it, everything computed again and held against what was recorded.

From the newest checkpoint c before version N the recorded batches c + 1 … N - 1 are trained again, in memory; then step N is taken and its figures are
compared with the row that the run wrote. Nothing is written anywhere, and a live run is not disturbed. What does not follow from batch and weights alone
(times, rates, memory, the other roles) is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..buffer.recorded import Recorded
from ..buffer.types import Batch
from ..configs.learner_schema import Alarms
from ..configs.loader import load_lineage
from ..configs.run_folder import Run
from ..configs.schema import Config
from ..errors import CheckpointError, ConfigError
from .checkpoint import FIRST, Checkpoint, newest_of
from .lora import AdaptersOff
from .metrics import data_figures, row_of
from .optimizer import optimizer_of
from .policy import Policy
from .publisher import digest_of
from .ranks import Ranks
from .saving import restore_training
from .start import load, reference_of, step_settings
from .step import Stepper
from .tracker import as_written
from .updates import train_batch

ACCELERATOR_TOLERANCE = 1e-4
"""Relative difference that counts as none where sums may come in another order: on anything but a CPU, or where several ranks added them up."""
DIGEST = "weights/digest"
"""Name of the figure that is the digest of the new weights."""

_FOLLOWS = re.compile(r"(train|loss|optim|value)/(?!.*_s(_|$))")
_PACKING = "learner/padding_share"
"""How rows were packed, which several ranks do apart and a replay does as one."""
_NO_ALARMS = Alarms(ess_warn=None, ess_stop=None, kl_warn=None, trust_masked_warn=None)

Figure = float | int | str


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step computed again.

    ``checkpoint`` is the version it started from. ``recorded`` are the figures of the run, ``found`` those of now. ``tolerance`` is relative; 0 is bit for bit,
    to the nine digits that are recorded.
    """

    version: int
    lineage: int
    checkpoint: int
    recorded: Mapping[str, Figure]
    found: Mapping[str, Figure]
    tolerance: float

    @property
    def names(self) -> list[str]:
        """Every figure that either side has."""
        return sorted(self.recorded.keys() | self.found.keys())

    @property
    def differing(self) -> list[str]:
        """Figures that differ; one that only one side has differs too."""
        return [name for name in self.names if not self._agree(self.recorded.get(name), self.found.get(name))]

    def _agree(self, recorded: Figure | None, found: Figure | None) -> bool:
        if isinstance(recorded, int | float) and isinstance(found, int | float):
            return abs(recorded - found) <= self.tolerance * max(abs(recorded), abs(found))
        return recorded == found


def replay(run: Run, version: int, lineage: int | None = None, what_if: Callable[[Config], Config] | None = None) -> Replayed:
    """Computes the step that made ``version`` in the history of ``lineage`` (None is the current one) again.

    With ``what_if`` it is computed under what that makes of the run's configuration, from the same batch and the same weights.

    Raises :class:`ConfigError` where the version has no batch, no row, no rows in the log, or no checkpoint before it; :class:`Corrupt` and
    :class:`CheckpointError` for what is damaged.
    """
    with Recorded(run.folder, lineage) as source:
        last = source.batch(version)
        run = load_lineage(run, last.lineage)
        torch.set_num_threads(run.config.learner.num_threads)
        row = _recorded_row(run, last.lineage, version)
        saved = _starting_point(run, source, version)
        stepper = _stepper_at(run, saved)
        skipped = int(saved.progress["skipped"])
        for earlier in range(saved.version + 1, version):
            skipped += not _train(stepper, source.batch(earlier), skipped)[1]
        digest = source.digest(version)
    changed = stepper if what_if is None else _under(what_if(run.config), run, stepper)
    exact = run.config.learner.device == "cpu" and run.config.learner.policy.kind == "single"
    found, recorded = (_figures(figures, packing=exact) for figures in (_train(changed, last, skipped)[0], row))
    if what_if is None and exact and digest is not None:
        recorded[DIGEST], found[DIGEST] = digest, digest_of(stepper.policy.model, saved.model_folder)
    return Replayed(version, last.lineage, saved.version, recorded, found, 0.0 if exact else ACCELERATOR_TOLERANCE)


def _under(config: Config, run: Run, stepper: Stepper) -> Stepper:
    return Stepper(stepper.policy, stepper.optimizer, config, _reference(replace(run, config=config), stepper.policy))


def _train(stepper: Stepper, batch: Batch, skipped: int) -> tuple[dict[str, float], bool]:
    """Takes the step of ``batch``: its row as the run would write it, and whether the weights changed. ``skipped`` versions were before it."""
    work = stepper.prepare(batch)
    done = train_batch(stepper, work, batch.version, _NO_ALARMS, lambda: None)
    return row_of(data_figures(batch, work, stepper.config.envs), done, skipped=skipped + (not done.update.stepped), seconds={}), done.update.stepped


def _figures(row: Mapping[str, Any], *, packing: bool) -> dict[str, Figure]:
    """What follows from batch and weights, as it is written; with ``packing`` also how the rows were packed."""
    chosen = {name: value for name, value in row.items() if _FOLLOWS.match(name) or (packing and name == _PACKING)}
    return {name: as_written(value) for name, value in chosen.items() if math.isfinite(value)}


def _recorded_row(run: Run, lineage: int, version: int) -> dict[str, Any]:
    paths = [path for path in (run.abandoned_metrics_path, run.metrics_path) if path.is_file()]
    for line in reversed([line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]):
        with suppress(ValueError):
            row: dict[str, Any] = json.loads(line)
            if (row["version"], row.get("lineage", 0)) == (version, lineage):
                return row
    raise ConfigError(f"version {version} has no row in {run.metrics_path.name}: it was not trained yet, or is being redone; there is nothing to compare with")


def _starting_point(run: Run, source: Recorded, version: int) -> Checkpoint:
    """The newest checkpoint of this history before ``version`` from which every step was taken under the same settings."""
    folders = [run.checkpoints_folder, *run.abandoned_checkpoints_folder.glob("lineage-*")]
    earlier = [span for span in source.lineages.spans(source.lineage) if span.first <= version]
    begun = max((span.last for span in earlier if step_settings(load_lineage(run, span.lineage)) != step_settings(run)), default=0)

    def wanted(lineage: int, saved: int) -> bool:
        return begun <= saved < version and saved <= source.lineages.common(lineage, source.lineage)

    found = newest_of(folders, wanted)
    if found is None:
        kept = sorted(path.name for folder in folders for path in folder.glob("v*"))
        since = f" since version {begun}, where its settings began," if begun else ""
        raise ConfigError(
            f"version {version} has no checkpoint before it{since} (kept are {', '.join(kept) or 'none'}): replay a later version, "
            "or keep more with learner.checkpoint.keep_last or keep_every"
        )
    return found


def _stepper_at(run: Run, saved: Checkpoint) -> Stepper:
    """Policy and optimiser as they were when ``saved`` was written."""
    config = run.config.learner
    try:
        policy = load(saved.model_folder, run, Ranks(), saved=saved)
        optimizer = optimizer_of(policy, config)
        restore_training(saved, policy, optimizer)
    except OSError as error:
        if saved.folder.exists():
            raise
        raise CheckpointError(f"checkpoint {saved.folder.name} was removed by the live run while it was read: run the command again") from error
    return Stepper(policy, optimizer, run.config, _reference(run, policy))


def _reference(run: Run, policy: Policy) -> Policy | AdaptersOff | None:
    needs_first = run.config.learner.loss.kl is not None and run.config.learner.policy.lora is None
    if needs_first and not (run.checkpoints_folder / FIRST).is_dir():
        raise ConfigError(f"learner.loss.kl needs version 0 as its reference, and {FIRST} is not among the checkpoints that were kept: leave kl out")
    return reference_of(run, policy)
