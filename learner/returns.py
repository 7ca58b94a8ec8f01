"""Token-level advantages over padded rows ``[B, T]``: whitening, GAE, V-trace, and the KL penalty inside the reward. NumPy float64.

All walk the active tokens of a row only: the value of the next active token is the bootstrap, masked positions are skipped, never read, and 0 in every output.
:mod:`.credit` calls them in training, with one row per trajectory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..buffer.types import MAX_LOGPROB
from ..errors import DataRefused

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]

LOG_RATIO_BOUND = 20.0


class Gae(NamedTuple):
    """Both ``[B, T]``."""

    advantages: Float64
    returns: Float64


class Vtrace(NamedTuple):
    """Both ``[B, T]``."""

    targets: Float64
    advantages: Float64


class KlReward(NamedTuple):
    """All ``[B, T]``."""

    token_rewards: Float64
    returns: Float64
    advantages: Float64


def whiten(values: Float64, mask: Bool) -> Float64:
    """(x - mean) / (std + 1e-8) over the active tokens of the whole batch, std with ddof 0 (REINFORCE++, arXiv 2501.03262).

    0 where fewer than two are active.
    """
    active = _active(values, mask, "advantage")
    out = np.zeros(values.shape, np.float64)
    if len(active) >= 2:
        out[mask] = (active - active.mean()) / (active.std() + 1e-8)
    return out


def gae(rewards: Float64, values: Float64, mask: Bool, bootstrap: Float64 | None = None, *, gamma: float, lam: float) -> Gae:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 11-16), returns = advantages + values.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    ``bootstrap [B]`` is the value after a row's last active token (0 for a finished episode).
    """
    rewards, values = _clean(rewards, mask, "reward"), _clean(values, mask, "value")
    following = _bootstrap(bootstrap, len(mask))
    advantage = np.zeros(len(mask))
    out = np.zeros(mask.shape)
    for t in reversed(range(mask.shape[1])):
        live = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = np.where(live, delta + gamma * lam * advantage, advantage)
        following = np.where(live, values[:, t], following)
        out[:, t] = np.where(live, advantage, 0.0)
    return Gae(out, np.where(mask, out + values, 0.0))


def vtrace(
    cur: Float64,
    mu: Float64,
    rewards: Float64,
    values: Float64,
    mask: Bool,
    bootstrap: Float64 | None = None,
    *,
    gamma: float,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Vtrace:
    """V-trace targets and policy-gradient advantages (IMPALA, arXiv 1802.01561, eq. 1 and section 4.2, with lam as in its remark 2).

    rho_t = min(rho_bar, exp d(cur, mu))        c_t = lam min(c_bar, exp d(cur, mu))
    v_t - V_t = rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})
    A_t = rho_t (r_t + gamma v_{t+1} - V_t)
    """
    rewards, values = _clean(rewards, mask, "reward"), _clean(values, mask, "value")
    log_ratio = _logprobs(cur, mask, "cur") - _logprobs(mu, mask, "mu")
    ratio = np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    rho, c = np.minimum(rho_bar, ratio), lam * np.minimum(c_bar, ratio)
    next_value = next_target = _bootstrap(bootstrap, len(mask))
    targets, advantages = np.zeros(mask.shape), np.zeros(mask.shape)
    for t in reversed(range(mask.shape[1])):
        live = mask[:, t]
        value, reward = values[:, t], rewards[:, t]
        target = value + rho[:, t] * (reward + gamma * next_value - value) + gamma * c[:, t] * (next_target - next_value)
        targets[:, t] = np.where(live, target, 0.0)
        advantages[:, t] = np.where(live, rho[:, t] * (reward + gamma * next_target - value), 0.0)
        next_value, next_target = np.where(live, value, next_value), np.where(live, target, next_target)
    return Vtrace(targets, advantages)


def kl_reward(rewards: Float64, prox: Float64, ref: Float64, mask: Bool, *, coef: float, gamma: float = 1.0) -> KlReward:
    """The k1 penalty inside the reward: -coef (p - q) on every active token, the row's reward ``[B]`` on its last one; returns, and returns whitened.

    Unbiased on-policy, unlike k1 in the loss (algorithms, section 6).

    Raises :class:`DataRefused`: a non-finite reward, or on an active token a log-probability that is not finite or above 1e-4.
    """
    if rewards.shape != (len(mask),):
        raise DataRefused(f"rewards have shape {rewards.shape}, there are {len(mask)} rows: one reward per row is needed")
    if not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise DataRefused(f"reward of row {row} is {rewards[row]}: only finite numbers train; an episode that was not scored must say so")
    token_rewards = np.where(mask, -coef * (_logprobs(prox, mask, "prox") - _logprobs(ref, mask, "ref")), 0.0)
    some = mask.any(axis=1)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1) if mask.shape[1] else np.zeros(len(mask), np.int64)
    token_rewards[some, last[some]] += rewards[some]
    returns = returns_to_go(token_rewards, mask, gamma=gamma)
    return KlReward(token_rewards, returns, whiten(returns, mask))


def returns_to_go(rewards: Float64, mask: Bool, *, gamma: float) -> Float64:
    """G_t = r_t + gamma G_{t+1} over the active tokens of each row, ``[B, T]``; nothing follows the last one."""
    rewards = _clean(rewards, mask, "reward")
    returns, running = np.zeros(mask.shape), np.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        running = np.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = np.where(mask[:, t], running, 0.0)
    return returns


def _bootstrap(values: Float64 | None, num_rows: int) -> Float64:
    if values is None:
        return np.zeros(num_rows)
    if values.shape != (num_rows,) or not np.isfinite(values).all():
        raise DataRefused(f"bootstrap has shape {values.shape} for {num_rows} rows and must be finite: one value per row, 0 where the episode ended")
    return values.astype(np.float64)


def _active(values: Float64, mask: Bool, name: str) -> Float64:
    """The values at active positions, refused when the shape differs or one is not finite."""
    if values.shape != mask.shape:
        raise DataRefused(f"{name} has shape {values.shape}, the mask {mask.shape}: every token needs one")
    active = values[mask].astype(np.float64)
    if not np.isfinite(active).all():
        row, token = (int(axis[0]) for axis in np.nonzero(mask & ~np.isfinite(values)))
        raise DataRefused(f"{name} of row {row} token {token} is {values[row, token]}: only finite numbers train")
    return active


def _logprobs(values: Float64, mask: Bool, name: str) -> Float64:
    """The values with masked positions 0; refused as well where one is no log-probability."""
    clean = _clean(values, mask, name)
    if (clean > MAX_LOGPROB).any():
        row, token = (int(axis[0]) for axis in np.nonzero(clean > MAX_LOGPROB))
        raise DataRefused(f"{name} of row {row} token {token} is {values[row, token]}: a log-probability cannot exceed 0 (by more than {MAX_LOGPROB})")
    return clean


def _clean(values: Float64, mask: Bool, name: str) -> Float64:
    """The values with masked positions 0."""
    out = np.zeros(mask.shape)
    out[mask] = _active(values, mask, name)
    return out
