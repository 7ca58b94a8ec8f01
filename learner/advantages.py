"""Advantages per trajectory: rewards of a group against the group's own baseline. NumPy float64, pure functions registered by name.

Statistics are over trajectories, each once, and are broadcast to rows and tokens afterwards. Group sizes vary (failed rollouts, staleness), so groups are ids.
Modes per token (GAE, V-trace, whitened returns) are in :mod:`.token_advantages`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..buffer.shaping import is_degenerate
from ..configs.learner_schema import Advantage
from ..errors import ConfigError, DataRefused
from .registered import array_like, calling

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a mode sees. All per trajectory, ``[N]``; ``group`` holds dense ids ``0 .. num_groups - 1``; rewards of trajectories outside ``included`` are 0.

    ``degenerate`` marks groups without signal and everything not included: whatever a mode returns there is replaced by 0.
    """

    rewards: Float64
    group: Int64
    num_groups: int
    included: Bool
    degenerate: Bool
    lengths: Int64
    config: Advantage

    def group_sum(self, values: Float64) -> Float64:
        """Sum over the included members of the group each trajectory belongs to, ``[N]``."""
        sums = np.bincount(self.group, weights=np.where(self.included, values, 0.0), minlength=self.num_groups)
        return sums[self.group].astype(np.float64)

    def group_size(self) -> Float64:
        """Included members of each trajectory's group, ``[N]``."""
        return self.group_sum(np.ones(len(self.rewards)))

    def centred(self) -> Float64:
        """R - mean_g, exactly 0 where degenerate, ``[N]``."""
        mean = self.group_sum(self.rewards) / np.maximum(self.group_size(), 1.0)
        return np.where(self.degenerate, 0.0, self.rewards - mean)


AdvantageMode = Callable[[Scores], Float64]
_MODES: dict[str, AdvantageMode] = {}
_KEY = "learner.advantage.mode"


def register_advantage(name: str) -> Callable[[AdvantageMode], AdvantageMode]:
    """Registers ``mode(scores) -> advantages [N]`` under ``name`` for ``learner.advantage.mode``."""

    def keep(mode: AdvantageMode) -> AdvantageMode:
        _MODES[name] = mode
        return mode

    return keep


def advantage_named(name: str) -> AdvantageMode:
    """The mode registered under ``name``.

    Raises :class:`ConfigError`: there is none.
    """
    if name not in _MODES:
        raise ConfigError(f"learner.advantage.mode is {name!r}, known are {', '.join(sorted(_MODES))}: choose one or register yours with register_advantage")
    return _MODES[name]


def advantage_names() -> list[str]:
    """Every registered mode per trajectory, sorted."""
    return sorted(_MODES)


def compute_advantages(
    rewards: npt.NDArray[np.floating],
    groups: npt.NDArray[np.integer],
    config: Advantage,
    *,
    included: Bool | None = None,
    lengths: npt.NDArray[np.integer] | None = None,
    names: tuple[str, ...] = (),
) -> tuple[Float64, Bool]:
    """Advantages and which trajectories carry none, ``([N] float64, [N] bool)``.

    A group is degenerate with fewer than two included members, or when its rewards differ by no more than 1e-9 relative: its advantages are exactly 0, so a
    singleton never keeps its raw reward. Trajectories outside ``included`` are flagged as well, get 0, and their reward is never read.
    ``lengths`` are tokens per trajectory, for ``opo``.

    Raises :class:`DataRefused`: a non-finite advantage or a non-finite reward of an included trajectory, by name; shapes that disagree.
    Raises :class:`ConfigError`: an unknown mode, or one that gave what does not fit.
    """
    mode = advantage_named(config.mode)
    num = len(rewards)
    included = np.ones(num, np.bool_) if included is None else included
    if rewards.ndim != 1 or groups.shape != (num,) or included.shape != (num,) or (lengths is not None and lengths.shape != (num,)):
        raise DataRefused(f"rewards have shape {rewards.shape}, groups {groups.shape}, included {included.shape}: one of each per trajectory is needed")
    refuse_non_finite("reward", rewards, included, names)
    unique, group = np.unique(groups, return_inverse=True)
    clean = np.where(included, rewards, 0.0).astype(np.float64)
    degenerate = ~included
    for index in range(len(unique)):
        members = group == index
        if is_degenerate(clean[members], included[members]):
            degenerate = degenerate | members
    if config.mode == "opo" and lengths is None:
        raise DataRefused("learner.advantage.mode opo weighs rewards by length and the batch carries no lengths")
    sizes = np.ones(num, np.int64) if lengths is None else lengths.astype(np.int64)
    scores = Scores(clean, group.astype(np.int64), len(unique), included, degenerate, sizes, config)
    with np.errstate(divide="ignore", invalid="ignore"), calling(_KEY, config.mode):
        given = mode(scores)
    advantages = np.where(degenerate, 0.0, array_like(given, (num,), "advantages", _KEY, config.mode))
    refuse_non_finite("advantage", advantages, np.ones(num, np.bool_), names)
    return advantages, degenerate


def refuse_non_finite(what: str, values: npt.NDArray[np.floating], where: Bool, names: tuple[str, ...]) -> None:
    """Raises :class:`DataRefused` naming the first trajectory in ``where`` whose value is not finite."""
    bad = np.flatnonzero(where & ~np.isfinite(values))
    if len(bad):
        at = int(bad[0])
        name = names[at] if names else str(at)
        raise DataRefused(f"{what} of trajectory {name} is {values[at]}: only finite numbers train; an episode that was not scored must say so")


def _group_std(scores: Scores) -> Float64:
    """Deviation of each trajectory's group, ``[N]``; live groups have at least two members, so ddof 1 is defined."""
    squares = scores.group_sum(scores.centred() ** 2)
    return np.sqrt(squares / np.maximum(scores.group_size() - scores.config.ddof, 1.0))


@register_advantage("mean")
def mean(scores: Scores) -> Float64:
    """A = R - mean_g (Dr. GRPO, arXiv 2503.20783)."""
    return scores.centred()


@register_advantage("grpo")
def grpo(scores: Scores) -> Float64:
    """A = (R - mean_g) / (std_g + eps) (GRPO, arXiv 2402.03300, section 4.1.2); ``ddof`` is explicit."""
    return scores.centred() / (_group_std(scores) + scores.config.eps)


@register_advantage("rloo")
def rloo(scores: Scores) -> Float64:
    """A = R - mean of the others = n / (n - 1) (R - mean_g) (RLOO, arXiv 2402.14740, section 2.2)."""
    size = scores.group_size()
    return scores.centred() * size / np.maximum(size - 1.0, 1.0)


@register_advantage("opo")
def opo(scores: Scores) -> Float64:
    """A = R - sum(len R) / sum(len) over the group, the variance-optimal baseline under equal token gradients (OPO, arXiv 2505.23585).

    A group whose members all have length 0 has no tokens to train, and takes the plain mean.
    """
    lengths = scores.lengths.astype(np.float64)
    total = scores.group_sum(lengths)
    baseline = scores.group_sum(lengths * scores.rewards) / np.where(total > 0, total, 1.0)
    return np.where(total > 0, scores.rewards - baseline, scores.centred())


@register_advantage("batch_std")
def batch_std(scores: Scores) -> Float64:
    """A = (R - mean_g) / (std over the batch of centred rewards + eps) (ScaleRL, arXiv 2510.13786).

    ``std_over: all`` counts the zeros of degenerate groups, ``live`` leaves them out. The deviation is round the batch's own mean.
    """
    counted = scores.included if scores.config.std_over == "all" else ~scores.degenerate
    centred = scores.centred()
    values = centred[counted]
    if len(values) <= scores.config.ddof:
        return np.zeros_like(centred)
    return centred / (values.std(ddof=scores.config.ddof) + scores.config.eps)


@register_advantage("none")
def none(scores: Scores) -> Float64:
    """A = R as it is (a reward that is already an advantage)."""
    return scores.rewards
