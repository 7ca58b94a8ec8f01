"""What one step reports, as sums and extremes that merge over micro-batches and ranks; never means of means (algorithms, section 9).

Over the active tokens after filters, ``N`` of them. R = exp d(x, old), rho = exp d(p, u), w the correction weight, s sequence sums of log ratios.
Everything is float64 on the device of the tokens until :meth:`Stats.result`, so that no micro-batch waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .losses.registry import PerToken
from .ratios import bounded_exp
from .segments import Segments

SUMS = (
    "tokens", "dropped_nonfinite", "rows", "clip_high", "clip_low", "clip_dual", "clip_any", "trust_masked",
    "ratio", "ratio_sq", "ratio_seq", "ratio_seq_sq", "kl_old_k1", "kl_old_k3",
    "is", "is_sq", "is_seq", "is_seq_sq", "is_geo", "kl_mu_k1", "kl_mu_k3",
    "w", "w_sq", "w_hit", "w_zero", "kl_ref",
    "drift", "drift_sq", "drift_k1", "drift_k3", "entropy",
)  # fmt: skip
SPREAD = ("is_mean", "is_m2")
EXTREMES = ("ratio_max", "is_max", "is_neg_min")
NAMES = (*SUMS, *SPREAD, *EXTREMES)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a micro-batch is measured on; all ``[P]`` float64 and detached, over ``rows.mask``. ``kl`` and ``entropy`` only where there are any."""

    rows: Segments
    d_old: Tensor
    d_rho: Tensor
    d_mu: Tensor
    weight: Tensor
    hit: Tensor
    per_token: PerToken
    dropped: Tensor
    kl: Tensor | None
    entropy: Tensor | None


class Stats:
    """Sums, extremes, and mean with squared deviations of rho, of one micro-batch or of many. Holds what it was told about: ``has`` names optional metrics."""

    def __init__(self, values: Tensor | None = None, has: frozenset[str] = frozenset()) -> None:
        """``Stats()`` has seen nothing: merging it changes nothing, and the device follows what it is merged with."""
        self._values = values
        self.has = has

    @classmethod
    def measure(cls, m: Measured) -> Stats:
        """The numbers of one micro-batch."""
        mask = m.rows.mask
        ratio, rho, drift = torch.exp(m.d_old), torch.exp(m.d_rho), torch.exp(m.d_mu)
        non_empty = m.rows.non_empty
        seq = torch.where(non_empty, bounded_exp(m.rows.sum(m.d_old)), 0.0)
        is_seq = torch.where(non_empty, bounded_exp(m.rows.sum(m.d_rho)), 0.0)
        is_geo = torch.where(non_empty, torch.exp(m.rows.mean(m.d_rho)), 0.0)
        never = torch.zeros_like(mask)
        high, low, dual = (never if flags is None else flags for flags in (m.per_token.clipped_high, m.per_token.clipped_low, m.per_token.clipped_dual))
        trusted = ~never if m.per_token.trust is None else m.per_token.trust
        zero = torch.zeros_like(m.d_old)

        def total(values: Tensor) -> Tensor:
            return torch.where(mask, values.to(torch.float64), zero).sum()

        tokens = mask.sum().to(torch.float64)
        is_sum = total(rho)
        is_mean = is_sum / tokens.clamp(min=1.0)
        sums = {
            "tokens": tokens, "dropped_nonfinite": m.dropped.sum(), "rows": non_empty.sum(),
            "clip_high": total(high), "clip_low": total(low), "clip_dual": total(dual), "clip_any": total(high | low | dual), "trust_masked": total(~trusted),
            "ratio": total(ratio), "ratio_sq": total(ratio**2), "ratio_seq": seq.sum(), "ratio_seq_sq": (seq**2).sum(),
            "kl_old_k1": total(-m.d_old), "kl_old_k3": total(torch.expm1(m.d_old) - m.d_old),
            "is": is_sum, "is_sq": total(rho**2), "is_seq": is_seq.sum(), "is_seq_sq": (is_seq**2).sum(), "is_geo": is_geo.sum(),
            "kl_mu_k1": total(-m.d_rho), "kl_mu_k3": total(torch.expm1(m.d_rho) - m.d_rho),
            "w": total(m.weight), "w_sq": total(m.weight**2), "w_hit": total(m.hit), "w_zero": total(m.weight == 0),
            "kl_ref": total(zero if m.kl is None else m.kl),
            "drift": total(drift), "drift_sq": total(drift**2), "drift_k1": total(-m.d_mu), "drift_k3": total(torch.expm1(m.d_mu) - m.d_mu),
            "entropy": total(zero if m.entropy is None else m.entropy),
            "is_mean": is_mean, "is_m2": total((rho - is_mean) ** 2),
            "ratio_max": _largest(ratio, mask), "is_max": _largest(rho, mask), "is_neg_min": _largest(-rho, mask),
        }  # fmt: skip
        present = {"trust": m.per_token.trust, "kl_ref": m.kl, "entropy": m.entropy}
        values = torch.stack([sums[name].to(torch.float64) for name in NAMES])
        return cls(values, frozenset(name for name, value in present.items() if value is not None))

    def merge(self, other: Stats) -> Stats:
        """Both together. The deviation of rho merges by its mean and squared deviations (Chan, Golub, LeVeque 1979): sums of squares would cancel."""
        ours, theirs = self._values, other._values
        if ours is None or theirs is None:
            return Stats(theirs if ours is None else ours, self.has | other.has)
        merged = ours + theirs
        n_ours, n_theirs = ours[0], theirs[0]
        gap = theirs[_at("is_mean")] - ours[_at("is_mean")]
        share = n_theirs / (n_ours + n_theirs).clamp(min=1.0)
        merged[_at("is_mean")] = ours[_at("is_mean")] + gap * share
        merged[_at("is_m2")] += gap**2 * n_ours * share
        merged[-len(EXTREMES) :] = torch.maximum(ours[-len(EXTREMES) :], theirs[-len(EXTREMES) :])
        return Stats(merged, self.has | other.has)

    def pack(self) -> Tensor:
        """Everything as one float64 vector, for an all_gather over ranks; ``Stats.merge_packed`` puts the ranks together."""
        return _nothing() if self._values is None else self._values

    @classmethod
    def merge_packed(cls, packed: list[Tensor], has: frozenset[str]) -> Stats:
        """The ranks' packed vectors as one; ``has`` is the same on every rank, as it follows from the configuration."""
        merged = cls(None, has)
        for values in packed:
            merged = merged.merge(cls(values))
        return merged

    def result(self) -> dict[str, float | int | bool]:
        """Every metric of algorithms section 9, then ``drift_mu_*`` (x against mu) and ``entropy``; an empty step gives only active_tokens and skip_step."""
        v = dict(zip(NAMES, self.pack().tolist(), strict=True))
        n, rows = v["tokens"], v["rows"]
        if n == 0:
            return {"active_tokens": 0, "skip_step": True}
        metrics: dict[str, float | int | bool] = {
            "active_tokens": int(n),
            "skip_step": False,
            "dropped_nonfinite": int(v["dropped_nonfinite"]),
            "clip_frac_high": v["clip_high"] / n,
            "clip_frac_low": v["clip_low"] / n,
            "clip_frac_dual": v["clip_dual"] / n,
            "clip_frac": v["clip_any"] / n,
            "ratio_mean": v["ratio"] / n,
            "ratio_max": v["ratio_max"],
            "ratio_ess": _ess(v["ratio"], v["ratio_sq"], n),
            "ratio_seq_ess": _ess(v["ratio_seq"], v["ratio_seq_sq"], rows),
            "kl_old_k1": v["kl_old_k1"] / n,
            "kl_old_k3": v["kl_old_k3"] / n,
            "is_mean": v["is"] / n,
            "is_std": (v["is_m2"] / n) ** 0.5,
            "is_min": -v["is_neg_min"],
            "is_max": v["is_max"],
            "is_ess": _ess(v["is"], v["is_sq"], n),
            "is_seq_ess": _ess(v["is_seq"], v["is_seq_sq"], rows),
            "is_geo_mean": v["is_geo"] / rows,
            "w_mean": v["w"] / n,
            "w_ess": _ess(v["w"], v["w_sq"], n),
            "w_hit_frac": v["w_hit"] / n,
            "w_zero_frac": v["w_zero"] / n,
            "kl_mu_k1": v["kl_mu_k1"] / n,
            "kl_mu_k3": v["kl_mu_k3"] / n,
        }
        if "trust" in self.has:
            metrics["trust_masked_frac"] = v["trust_masked"] / n
        if "kl_ref" in self.has:
            metrics["kl_ref"] = v["kl_ref"] / n
        metrics["drift_mu_k1"] = v["drift_k1"] / n
        metrics["drift_mu_k3"] = v["drift_k3"] / n
        metrics["drift_mu_ess"] = _ess(v["drift"], v["drift_sq"], n)
        if "entropy" in self.has:
            metrics["entropy"] = v["entropy"] / n
        return metrics


def _nothing() -> Tensor:
    values = torch.zeros(len(NAMES), dtype=torch.float64)
    values[-len(EXTREMES) :] = float("-inf")
    return values


def _at(name: str) -> int:
    return NAMES.index(name)


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """The largest active value, -inf where there is none (also without any token)."""
    return torch.cat([torch.where(mask, values, float("-inf")), values.new_full((1,), float("-inf"))]).max()


def _ess(total: float, squares: float, count: float) -> float:
    """Effective sample size as a share, (sum)^2 / (N sum of squares); 0 for an all-zero vector."""
    return total**2 / (count * squares) if squares > 0 else 0.0
