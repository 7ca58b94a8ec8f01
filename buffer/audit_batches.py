"""Reckons every recorded batch again from the rows of its members: its largest lag, what had to be withheld, and the bound it was formed under."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..configs.loader import load_lineage, load_run
from .audit_members import MEMBERS, Played
from .audit_report import AuditReport, EnvBias, note
from .lags import Ints, lags, too_old
from .lineages import Lineages
from .tables import BatchRow


def check_batches(played: Played, batches: list[BatchRow], lineages: Lineages, lost: Ints, failed: Ints, report: AuditReport) -> None:
    """Recomputes the lag of everything that was trained, and compares what was trained with what was played.

    ``lost`` are keys of members whose rows are not in the log, ``failed`` of those that failed.
    """
    trained = np.zeros(len(played.key), bool)
    without_cause: list[str] = []
    for batch in batches:
        report.lag_bound = max(report.lag_bound, batch.lag_bound)
        report.num_age_drops += len(batch.withheld)
        groups = np.sort(np.array(batch.groups, np.int64))
        spans = zip(np.searchsorted(played.key, groups * MEMBERS).tolist(), np.searchsorted(played.key, (groups + 1) * MEMBERS).tolist(), strict=True)
        inside = np.concatenate([np.arange(start, stop) for start, stop in spans]) if batch.groups else np.empty(0, np.int64)
        keys = played.key[inside]
        found = lags(lineages, batch.lineage, batch.version - 1, played.lineage[inside], played.oldest[inside], played.newest[inside])
        withheld = np.isin(keys, [group_id * MEMBERS + member for group_id, member in batch.withheld])
        lag = int(found[~withheld].max(initial=0))
        if lag > batch.lag_bound:
            note(report, [f"batch {batch.version} trains a lag of {lag}, allowed were {batch.lag_bound}"])
        if lag != batch.max_lag:
            note(report, [f"batch {batch.version} has a lag of {lag} by its rows, recorded was {batch.max_lag}"])
        if batch.withheld:
            without_cause += _without_cause(batch, keys, found, lost)
        if batch.version <= report.version:
            report.max_lag_trained = max(report.max_lag_trained, lag)
            trained[inside[~withheld]] = True
    note(report, without_cause)
    trained &= ~np.isin(played.key, failed)
    report.num_trained = int(np.count_nonzero(trained))
    for code, name in enumerate(played.env_names):
        here = played.env == code
        report.bias[name] = EnvBias(
            int(np.count_nonzero(here)),
            int(np.count_nonzero(here & trained)),
            *(_mean(column[chosen]) for column in (played.num_tokens, played.reward, played.success) for chosen in (here, here & trained)),
        )


def _without_cause(batch: BatchRow, keys: Ints, found: Ints, lost: Ints) -> list[str]:
    """Members that a batch withholds although they are young enough, or not in it; ``keys`` and ``found`` are its members and their lags."""
    old, _ = too_old(found, batch.lag_bound)
    lag_of = dict(zip(keys.tolist(), found.tolist(), strict=True))
    allowed = {*keys[old].tolist(), *lost.tolist()}
    wrong: list[str] = []
    for (group_id, member), times in Counter(batch.withheld).items():
        key, name = group_id * MEMBERS + member, f"batch {batch.version} withholds group {group_id} member {member}"
        if group_id not in batch.groups or (key not in lag_of and key not in allowed):
            wrong.append(f"{name}, which is not in it")
        elif key not in allowed:
            wrong.append(f"{name}, whose lag is {lag_of[key]} by its rows, allowed were {batch.lag_bound}")
        if times > 1:
            wrong.append(f"{name} {times} times")
    return wrong


def check_bounds(folder: Path, batches: Iterable[BatchRow], report: AuditReport) -> None:
    """Every batch was formed under the ``buffer.max_lag`` of its lineage, which stays as it is until a fork."""
    if not (folder / "config.yaml").is_file():
        return  # a stream without a run
    run = load_run(folder)
    bounds: dict[int, int] = {}
    wrong: list[str] = []
    for batch in batches:
        if batch.lineage not in bounds:
            bounds[batch.lineage] = load_lineage(run, batch.lineage).config.buffer.max_lag
        bound = bounds[batch.lineage]
        if batch.lag_bound != bound:
            name = f"batch {batch.version} of lineage {batch.lineage}"
            wrong.append(f"{name} has lag_bound {batch.lag_bound}, the configuration of that lineage says buffer.max_lag {bound}")
    note(report, wrong)


def _mean(values: npt.NDArray[np.float64]) -> float:
    """Mean of the values that are given, NaN where none is."""
    given = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    return float(given.mean()) if len(given) else float("nan")
