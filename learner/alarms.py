"""Alarms: figures of a batch that warn, or stop the run before a parameter changes (``learner.alarms``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ..configs.learner_schema import Alarms
from ..errors import RoleFailed

logger = logging.getLogger(__name__)

_FAR = "the data are too far from the policy that learns"
_STEER = "lower learner.optimizer.learning_rate or buffer.max_lag in a new run"


@dataclass(frozen=True, slots=True)
class _Watch:
    """Bounds on the worst of the ``figures`` that a row has: the smallest with ``below``, else the largest. A bound that is None is off."""

    key: str
    warn: float | None
    stop: float | None
    figures: tuple[str, ...]
    meaning: str
    remedy: str
    below: bool = False

    def beyond(self, value: float, bound: float | None) -> bool:
        return bound is not None and (value < bound if self.below else value > bound)


def _watches(alarms: Alarms) -> tuple[_Watch, ...]:
    sizes, drifts = ("loss/ratio_ess", "loss/is_ess", "loss/drift_mu_ess"), ("loss/kl_old_k3", "loss/kl_mu_k3", "loss/drift_mu_k3")
    wider = f"{_STEER}, or widen learner.loss.delta there"
    return (
        _Watch("ess", alarms.ess_warn, alarms.ess_stop, sizes, _FAR, _STEER, below=True),
        _Watch("kl", alarms.kl_warn, alarms.kl_stop, drifts, _FAR, _STEER),
        _Watch("trust_masked", alarms.trust_masked_warn, alarms.trust_masked_stop, ("loss/trust_masked_frac",), _FAR, wider),
        _Watch(
            *("invalid", alarms.invalid_warn, alarms.invalid_stop, ("train/invalid_share",)),
            *("too many episodes of the batch failed", "see why with rollstream log RUN --failed"),
        ),
    )


def check_alarms(figures: Mapping[str, float], alarms: Alarms, version: int) -> None:
    """Warns of, or stops at, figures of the batch that makes ``version``; called before any parameter changes. Figures it does not have are not judged.

    Raises :class:`RoleFailed` where one is beyond its ``*_stop``.
    """
    for watch in _watches(alarms):
        found = {name: figures[name] for name in watch.figures if name in figures}
        if not found:
            continue
        name = min(found, key=found.__getitem__) if watch.below else max(found, key=found.__getitem__)
        value = found[name]
        if watch.beyond(value, watch.stop):
            raise RoleFailed(
                f"version {version}: {name} is {value:.3g}, bound learner.alarms.{watch.key}_stop {watch.stop:g}: {watch.meaning}; {watch.remedy}, "
                f"or go on with --resume and another learner.alarms.{watch.key}_stop (null is off)"
            )
        if watch.beyond(value, watch.warn):
            logger.warning("version=%d alarm=%s value=%.3g bound=%g", version, name, value, watch.warn)
