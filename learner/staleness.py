"""Staleness: how far behind the learner the policy that sampled a token was, and what is dropped for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import DataRefused

Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Level = Literal["token", "row", "trajectory", "group"]


@dataclass(frozen=True, slots=True)
class Staleness:
    """Outcome of the filter.

    ``keep`` is the mask after the drop, ``[P] bool``. ``max``, ``mean`` and ``tokens_by_lag`` (how many tokens had lag 0, 1, 2, …) are over the active tokens
    before it. ``dropped_tokens`` counts active tokens that left.
    """

    keep: Bool
    max: float
    mean: float
    dropped_tokens: int
    tokens_by_lag: Int64


def drop_stale(
    versions: npt.NDArray[np.integer],
    mask: Bool,
    units: npt.NDArray[np.integer] | None,
    *,
    current: int,
    limit: int,
    name_of: Callable[[int], str] = "token {}".format,
) -> Staleness:
    """Masks out every unit whose oldest active token is more than ``limit`` versions behind ``current``; exactly ``limit`` stays.

    ``versions`` and ``mask`` are ``[P]``; ``units`` is ``[P]``, the row, trajectory or group of each token, or None to judge every token by itself. Tags at
    masked positions are ignored. s = V - v (algorithms, section 8). ``name_of`` says in errors where token number p is.

    Raises :class:`DataRefused`: an active token is newer than the learner, which is a bookkeeping error and no staleness.
    """
    if versions.shape != mask.shape:
        raise DataRefused(f"versions have shape {versions.shape}, the mask {mask.shape}: every token needs its version")
    lag = np.where(mask, current - versions.astype(np.int64), 0)
    if (lag < 0).any():
        at = int(np.flatnonzero(lag < 0)[0])
        raise DataRefused(
            f"{name_of(at)} was sampled by version {int(versions[at])}, newer than the learner at {current}: the stream and the learner disagree on the lineage"
        )
    oldest = lag
    if units is not None:
        per_unit = np.zeros(int(units.max(initial=-1)) + 1, np.int64)
        np.maximum.at(per_unit, units, lag)
        oldest = per_unit[units]
    keep = mask & (oldest <= limit)
    active = lag[mask]
    return Staleness(
        keep=keep,
        max=float(active.max(initial=0)),
        mean=float(active.mean()) if len(active) else 0.0,
        dropped_tokens=int(mask.sum() - keep.sum()),
        tokens_by_lag=np.bincount(active, minlength=1).astype(np.int64),
    )
