"""Correction weight w = prod_k f_k(statistic of rho): what makes up for the sampler having been another policy.

rho = exp d(sg p, u), p the proximal and u the recorded behaviour log-probability, so w is frozen. Bounds are on the ratio trainer / engine itself. A level
says which statistic of rho is judged, a mode what is done with it; usual names: token truncate = TIS, token mask = IcePop, sequence mask = MIS.
Denominators do not change when w is 0: a rejected token is a zero-weight sample and not a missing one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..configs.learner_schema import Correction
from ..errors import ConfigError
from .ratios import bounded_exp
from .registered import calling, tensor_like
from .segments import Segments

CorrectionLevel = Callable[[Tensor, Segments], Tensor]
CorrectionMode = Callable[[Tensor, float, float], tuple[Tensor, Tensor]]
_LEVELS: dict[str, CorrectionLevel] = {}
_MODES: dict[str, CorrectionMode] = {}


class CorrectionWeight(NamedTuple):
    """``weight [P] float64``, 0 at inactive tokens; ``hit [P] bool``: some rule's statistic lies outside its bounds."""

    weight: Tensor
    hit: Tensor


def register_level(name: str) -> Callable[[CorrectionLevel], CorrectionLevel]:
    """Registers ``level(log_rho [P], units) -> statistic [P]`` under ``name`` for ``correction.level``."""

    def keep(level: CorrectionLevel) -> CorrectionLevel:
        _LEVELS[name] = level
        return level

    return keep


def register_mode(name: str) -> Callable[[CorrectionMode], CorrectionMode]:
    """Registers ``mode(statistic [P], low, high) -> (factor [P], outside [P] bool)`` under ``name`` for ``correction.mode``."""

    def keep(mode: CorrectionMode) -> CorrectionMode:
        _MODES[name] = mode
        return mode

    return keep


def check_rule(rule: Correction) -> None:
    """Refuses a rule that cannot mean anything.

    Raises :class:`ConfigError`: an unknown level or mode, bounds that are missing, crossed, or unused.
    """
    if rule.level not in _LEVELS:
        raise ConfigError(f"correction level is {rule.level!r}, known are {', '.join(sorted(_LEVELS))}: choose one or register yours with register_level")
    if rule.mode not in _MODES:
        raise ConfigError(f"correction mode is {rule.mode!r}, known are {', '.join(sorted(_MODES))}: choose one or register yours with register_mode")
    if rule.mode == "truncate" and (rule.high is None or rule.low is not None):
        raise ConfigError(f"correction mode truncate has low={rule.low} and high={rule.high}: it needs high and ignores low; use clip for two bounds")
    if rule.low is None and rule.high is None:
        raise ConfigError(f"correction mode {rule.mode} has neither low nor high: give at least one bound on the ratio trainer / engine")
    if rule.low is not None and rule.high is not None and rule.low > rule.high:
        raise ConfigError(f"correction bounds low={rule.low} > high={rule.high}: nothing lies between them; swap them")


def correction_weight(log_rho: Tensor, units: Segments, rules: Sequence[Correction]) -> CorrectionWeight:
    """The product of all rules, ``log_rho [P]`` = d(sg p, u). ``units`` are rows or whole trajectories; without rules w is 1.

    Raises :class:`ConfigError`: a registered level or mode gave what does not fit.
    """
    weight = units.mask.to(torch.float64)
    hit = torch.zeros_like(units.mask)
    for rule in rules:
        low = float("-inf") if rule.low is None else rule.low
        high = float("inf") if rule.high is None else rule.high
        with calling("correction level", rule.level):
            given = _LEVELS[rule.level](log_rho, units)
        statistic = tensor_like(given, log_rho, "a statistic", "correction level", rule.level)
        with calling("correction mode", rule.mode):
            factor, outside = _MODES[rule.mode](statistic, low, high)
        for value, what in ((factor, "a factor"), (outside, "flags")):
            tensor_like(value, log_rho, what, "correction mode", rule.mode)
        weight = weight * torch.where(units.mask, factor, torch.zeros_like(factor))
        hit = hit | (outside & units.mask)
    return CorrectionWeight(weight, hit)


def self_normalised(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight over its mean, w / mean(w), over the active tokens of the global batch; all zero stays all zero."""
    mean = weight.sum() / mask.sum().clamp(min=1)
    return torch.where(mean > 0, weight / torch.where(mean > 0, mean, torch.ones_like(mean)), weight)


@register_level("token")
def token_level(log_rho: Tensor, units: Segments) -> Tensor:
    """rho_t."""
    return torch.exp(log_rho)


@register_level("sequence")
def sequence_level(log_rho: Tensor, units: Segments) -> Tensor:
    """The exponential of the SUM of log rho over the unit's active tokens, the sum bounded again."""
    return units.spread(bounded_exp(units.sum(log_rho)))


@register_level("geometric")
def geometric_level(log_rho: Tensor, units: Segments) -> Tensor:
    """The exponential of the MEAN of log rho over the unit's active tokens."""
    return units.spread(torch.exp(units.mean(log_rho)))


@register_level("min")
def min_level(log_rho: Tensor, units: Segments) -> Tensor:
    """The smallest rho of the unit: one token can veto."""
    return units.spread(torch.exp(units.extreme(log_rho, "amin")))


@register_level("max")
def max_level(log_rho: Tensor, units: Segments) -> Tensor:
    """The largest rho of the unit: one token can veto."""
    return units.spread(torch.exp(units.extreme(log_rho, "amax")))


@register_mode("truncate")
def truncate(statistic: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The smaller of rho and high: truncated importance sampling, TIS."""
    return statistic.clamp(max=high), statistic > high


@register_mode("clip")
def clip(statistic: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Rho clipped to [low, high]: two-sided TIS."""
    return statistic.clamp(low, high), _outside(statistic, low, high)


@register_mode("mask")
def mask(statistic: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Rho inside its bounds, else 0: IcePop on tokens, MIS on sequences."""
    outside = _outside(statistic, low, high)
    return torch.where(outside, torch.zeros_like(statistic), statistic), outside


@register_mode("reject")
def reject(statistic: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """1 inside the bounds, else 0: pure rejection."""
    outside = _outside(statistic, low, high)
    return (~outside).to(statistic.dtype), outside


def _outside(statistic: Tensor, low: float, high: float) -> Tensor:
    return (statistic < low) | (statistic > high)
