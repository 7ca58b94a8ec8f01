"""Reward shaping and the test for groups that teach nothing: the one definition, used by the buffer when it forms batches and by the learner.

A *degenerate* group is one whose shaped rewards are all equal: each advantage is exactly 0. The soft overlong penalty follows DAPO (arXiv 2503.14476,
equation 13).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..configs.learner_schema import Overlong

Floats = npt.NDArray[np.float64]
_EQUAL = 1e-9


def overlong_penalty(lengths: npt.ArrayLike, overlong: Overlong) -> Floats:
    """Penalty of each length, ``[N] float64`` and never positive: 0 up to ``max_len - buffer``, linear to ``-factor`` at ``max_len``, flat after."""
    excess = np.asarray(lengths, np.float64) - (overlong.max_len - overlong.buffer)
    return -overlong.factor * np.clip(excess / overlong.buffer, 0.0, 1.0)


def shape_rewards(rewards: npt.ArrayLike, lengths: npt.ArrayLike, overlong: Overlong | None) -> Floats:
    """Rewards as the baseline sees them, ``[N] float64``.

    ``rewards`` are ``[N]``, NaN where a trajectory was not scored (it stays NaN); ``lengths`` are the tokens each trajectory's policy sampled, ``[N]``.
    """
    shaped = np.array(rewards, np.float64)
    return shaped if overlong is None else shaped + overlong_penalty(lengths, overlong)


def is_degenerate(rewards: npt.ArrayLike, included: npt.ArrayLike) -> bool:
    """Whether a group teaches nothing: fewer than two included members, or ``max - min <= 1e-9 max(1, max abs)`` over their shaped rewards.

    ``rewards`` and ``included`` are ``[G]``; a reward that is not included is never read and may be NaN.
    """
    counted = np.asarray(rewards, np.float64)[np.asarray(included, bool)]
    return len(counted) < 2 or bool(np.ptp(counted) <= _EQUAL * max(1.0, float(np.abs(counted).max())))
