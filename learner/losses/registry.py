"""What a loss sees, what it returns, and the names under which losses are known.

A loss of your own, from a module named in ``imports:``::

    from rollstream.learner.losses import PerToken, Terms, register_loss

    @register_loss("tempered")
    def tempered(t: Terms) -> PerToken:
        return PerToken(-t.adv * t.ratio() ** 0.5)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...configs.learner_schema import Loss
from ...errors import ConfigError
from ..segments import Segments


@dataclass(frozen=True, slots=True)
class Terms:
    """The active tokens of one micro-batch of whole rows; everything is ``[P]``, float64, and a harmless 0 at inactive tokens.

    ``x`` live log-probability (the only differentiated input) · ``adv`` A · ``log_mu`` u · ``d_old`` = d(x, old) and ``d_mu`` = d(x, u), both
    differentiable · ``mask`` active tokens · ``rows`` sums over rows · ``trust`` M for losses whose mask needs the whole batch.
    """

    x: Tensor
    adv: Tensor
    log_mu: Tensor
    d_old: Tensor
    d_mu: Tensor
    mask: Tensor
    rows: Segments
    config: Loss
    trust: Tensor | None = None

    def ratio(self) -> Tensor:
        """R = exp d(x, old), differentiable."""
        return torch.exp(self.d_old)


@dataclass(frozen=True, slots=True)
class PerToken:
    """``ell [P]``, and what the metrics count: tokens clipped high, low, or by the dual cap, and ``trust`` M (False = dropped by a trust region)."""

    ell: Tensor
    clipped_high: Tensor | None = None
    clipped_low: Tensor | None = None
    clipped_dual: Tensor | None = None
    trust: Tensor | None = None


LossFunction = Callable[[Terms], PerToken]
TrustFunction = Callable[[Tensor, Tensor, Tensor, Loss], Tensor]
"""``(d_mu, adv, mask, config) -> M``, all ``[P]`` of the whole global batch."""
ConfigCheck = Callable[[Loss], None]


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A registered loss. ``batch_trust`` computes M once per global batch; ``check`` refuses a configuration at construction."""

    name: str
    function: LossFunction
    batch_trust: TrustFunction | None = None
    check: ConfigCheck | None = None


_LOSSES: dict[str, LossEntry] = {}


def register_loss(name: str, *, batch_trust: TrustFunction | None = None, check: ConfigCheck | None = None) -> Callable[[LossFunction], LossFunction]:
    """Registers ``loss(terms) -> PerToken`` under ``name`` for ``learner.loss.kind``."""

    def keep(function: LossFunction) -> LossFunction:
        _LOSSES[name] = LossEntry(name, function, batch_trust, check)
        return function

    return keep


def loss_named(name: str) -> LossEntry:
    """The loss registered under ``name``.

    Raises :class:`ConfigError`: there is none.
    """
    if name not in _LOSSES:
        raise ConfigError(f"learner.loss.kind is {name!r}, known are {', '.join(loss_names())}: choose one or register yours with register_loss")
    return _LOSSES[name]


def loss_names() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_LOSSES)
