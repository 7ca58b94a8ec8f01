"""How old what was sampled is for the learner that trains on it, and what is too old to train: one rule, for the books and for the audit of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .lineages import Lineages

Ints = npt.NDArray[np.int64]


def lags(lineages: Lineages, learner: int, version: int, lineage: Ints, oldest: Ints, newest: Ints) -> Ints:
    """Lag of each trajectory, ``[M]``, for a learner that holds ``version`` of lineage ``learner``.

    ``lineage``, ``oldest`` and ``newest``, ``[M]``, say which versions sampled it; where ``oldest`` is above ``newest`` nothing was sampled, and the lag is 0.
    """
    reckoned = oldest.copy()
    for at in np.flatnonzero(lineage != learner).tolist():  # only what was carried over a fork
        reckoned[at] = lineages.reckoned(int(lineage[at]), int(oldest[at]), int(newest[at]), learner)
    return np.where(oldest > newest, 0, version - reckoned)


def too_old(found: Ints, bound: int) -> tuple[npt.NDArray[np.bool_], int]:
    """Which trajectories of a batch with the lags ``found``, ``[M]``, are withheld under ``bound``, and the largest lag of the others."""
    withheld = found > bound
    return withheld, int(found[~withheld].max(initial=0))
