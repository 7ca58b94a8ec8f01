"""Advantages per token: from rewards of tokens and turns, and values, to one advantage for each token. NumPy float64, pure functions registered by name.

They share one space of names with the modes per trajectory (:mod:`.advantages`). :mod:`.credit` lays the batch out for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..configs.learner_schema import Advantage, Learner
from ..errors import ConfigError
from .advantages import advantage_names
from .returns import gae, returns_to_go, vtrace

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a mode sees: ``M`` trajectories, each a row of the ``L`` tokens or fewer of it that train, in order, all its segments end to end.

    All float64 ``[M, L]``, 0 where ``mask [M, L] bool`` is not set: ``rewards`` of each token (that of a turn lies on its last token, what the trajectory got
    beyond its turns on its last, a KL term in the reward on all), ``mu`` the recorded log-probability, ``prox`` that under the weights at the start of the
    update, ``values`` V of the state each token was drawn in, under the same weights. ``bootstrap [M]`` is V after the last token of a trajectory that was
    cut, 0 for one that ended. ``prox`` and ``values`` are zeros unless the mode was registered to need them.
    """

    rewards: Float64
    mask: Bool
    mu: Float64
    prox: Float64
    values: Float64
    bootstrap: Float64
    config: Advantage


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Both ``[M, L]``; ``targets`` are what the values learn, None where a mode teaches them nothing."""

    advantages: Float64
    targets: Float64 | None = None


TokenMode = Callable[[TokenScores], TokenAdvantages]


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A registered mode, and what has to be computed for it."""

    function: TokenMode
    needs_values: bool
    needs_prox: bool


_MODES: dict[str, TokenEntry] = {}


def register_token_advantage(name: str, *, needs_values: bool = False, needs_prox: bool = False) -> Callable[[TokenMode], TokenMode]:
    """Registers ``mode(scores) -> TokenAdvantages`` under ``name`` for ``learner.advantage.mode``.

    ``needs_values`` asks for the value head (``learner.value``), ``needs_prox`` for log-probabilities under the weights at the start of the update.
    """

    def keep(mode: TokenMode) -> TokenMode:
        _MODES[name] = TokenEntry(mode, needs_values, needs_prox)
        return mode

    return keep


def token_mode(name: str) -> TokenEntry | None:
    """The mode per token registered under ``name``; None where ``name`` is one per trajectory.

    Raises :class:`ConfigError`: there is neither.
    """
    if name not in _MODES and name not in advantage_names():
        known = ", ".join(sorted({*advantage_names(), *_MODES}))
        raise ConfigError(
            f"learner.advantage.mode is {name!r}, known are {known}: choose one or register yours with register_advantage or register_token_advantage"
        )
    return _MODES.get(name)


def check_mode(learner: Learner) -> None:
    """Refuses an advantage mode that nobody registered, or that needs values where there is no value head.

    Raises :class:`ConfigError`.
    """
    entry = token_mode(learner.advantage.mode)
    if entry is not None and entry.needs_values and learner.value is None:
        raise ConfigError(f"learner.advantage.mode {learner.advantage.mode} needs values and learner.value is null; add learner.value: {{}}")


@register_token_advantage("gae", needs_values=True)
def gae_mode(scores: TokenScores) -> TokenAdvantages:
    """Generalised advantage estimation, targets A + V (arXiv 1506.02438)."""
    found = gae(scores.rewards, scores.values, scores.mask, scores.bootstrap, gamma=scores.config.gamma, lam=scores.config.lam)
    return TokenAdvantages(found.advantages, found.returns)


@register_token_advantage("vtrace", needs_values=True, needs_prox=True)
def vtrace_mode(scores: TokenScores) -> TokenAdvantages:
    """V-trace (IMPALA, arXiv 1802.01561): the advantage carries the ratio to the policy that sampled already, so the loss must not."""
    config = scores.config
    found = vtrace(
        scores.prox, scores.mu, scores.rewards, scores.values, scores.mask, scores.bootstrap,
        gamma=config.gamma, lam=config.lam, rho_bar=config.rho_bar, c_bar=config.c_bar,
    )  # fmt: skip
    return TokenAdvantages(found.advantages, found.targets)


@register_token_advantage("whiten")
def whiten_mode(scores: TokenScores) -> TokenAdvantages:
    """Discounted returns, which :mod:`.credit` whitens over the whole batch (REINFORCE++, arXiv 2501.03262)."""
    return TokenAdvantages(returns_to_go(scores.rewards, scores.mask, gamma=scores.config.gamma))
