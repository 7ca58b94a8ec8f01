"""The tokens of one micro-batch as the objective takes them, and the refusal of what must not train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..buffer.types import MAX_LOGPROB
from ..errors import DataRefused
from .ratios import log_ratio
from .segments import Segments


@dataclass(frozen=True, slots=True)
class Tokens:
    """``P`` tokens of whole rows, flat: packed, or padded with ``mask`` False. Values at masked tokens are never read, NaN included.

    * ``row [P] int64`` in ``0 .. num_rows - 1``; ``mask [P] bool``; ``adv [P]`` advantage A; ``agg [P]`` weight a (read where ``mask``).
    * ``mu [P]`` recorded behaviour log-probability u; ``prox [P]`` proximal p; ``ref [P]`` reference q: None where there is none. All are frozen.
    * ``targets [P]``, ``values [P]``: the returns a value head learns, and its values at the start of the batch; None: none learns.
    * ``weight``, ``hit``, ``trust`` ``[P]``: from :meth:`.objective.Objective.batch_terms`, for objectives that need the whole batch.
    * ``row_trajectory [num_rows] int64``: trajectory of each row, read by ``batch_terms`` with ``correction_unit: trajectory``; None: each row is its own.
    * ``names``: how an error calls each row; default its number.
    """

    row: Tensor
    num_rows: int
    mask: Tensor
    adv: Tensor
    agg: Tensor
    mu: Tensor | None = None
    prox: Tensor | None = None
    ref: Tensor | None = None
    targets: Tensor | None = None
    values: Tensor | None = None
    weight: Tensor | None = None
    hit: Tensor | None = None
    trust: Tensor | None = None
    row_trajectory: Tensor | None = None
    names: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Anchored:
    """The same tokens after refusals: float64, 0 at inactive tokens, anchors resolved.

    ``mask`` excludes what drop mode dropped, ``dropped`` names it. ``x`` is differentiable; ``adv``, ``agg``, ``p`` and ``log_mu`` are frozen.
    ``d_old`` = d(x, old) and ``d_mu`` = d(x, u) differentiate, ``d_rho`` = d(sg p, u) does not.
    """

    x: Tensor
    adv: Tensor
    agg: Tensor
    log_mu: Tensor
    d_old: Tensor
    d_mu: Tensor
    d_rho: Tensor
    mask: Tensor
    dropped: Tensor
    rows: Segments


def anchor(x: Tensor, tokens: Tokens, *, old: str, drop: bool, extra: dict[str, Tensor | None]) -> Anchored:
    """Checks the tokens and resolves which policy is old, proximal and behaviour.

    Missing inputs (algorithms, section 13): p = u with old mu, else sg(x); u = old. ``extra`` are further quantities that must be finite on active tokens
    (reference log-probabilities, entropy). With ``drop`` a token with a non-finite quantity leaves the mask instead of being refused.

    Raises :class:`DataRefused`: shapes that disagree, a non-finite quantity or a log-probability above 1e-4 on an active token.
    """
    live = x.detach()
    logprobs = {"cur": live, "prox": tokens.prox, "mu": tokens.mu, "ref": extra.get("ref")}
    mask, dropped = _checked_mask(x, tokens, logprobs, extra.get("entropy"), drop)

    def select(values: Tensor) -> Tensor:
        return torch.where(mask, values.to(torch.float64), 0.0)

    cur = select(x)
    frozen = cur.detach()
    log_mu = None if tokens.mu is None else select(tokens.mu.detach())
    prox = None if tokens.prox is None else select(tokens.prox.detach())
    if prox is None:
        prox = log_mu if old == "mu" and log_mu is not None else frozen
    if old == "mu":
        assert log_mu is not None, "the objective refuses old mu without mu"
        before = log_mu
    else:
        before = prox if old == "prox" else frozen
    if log_mu is None:
        log_mu = before
    return Anchored(
        x=cur,
        adv=select(tokens.adv.detach()),
        agg=select(tokens.agg.detach()),
        log_mu=log_mu,
        d_old=log_ratio(cur, before),
        d_mu=log_ratio(cur, log_mu),
        d_rho=log_ratio(prox, log_mu),
        mask=mask,
        dropped=dropped,
        rows=Segments(tokens.row, tokens.num_rows, mask),
    )


def _checked_mask(x: Tensor, tokens: Tokens, logprobs: dict[str, Tensor | None], entropy: Tensor | None, drop: bool) -> tuple[Tensor, Tensor]:
    """The mask without dropped tokens, and those; raises on everything that is refused."""
    given = {name: values for name, values in logprobs.items() if values is not None}
    shaped = {**given, "row": tokens.row, "mask": tokens.mask, "adv": tokens.adv, "agg": tokens.agg}
    for name, values in shaped.items():
        if values.shape != x.shape:
            raise DataRefused(f"{name} has shape {tuple(values.shape)}, the log-probabilities {tuple(x.shape)}: every token needs one")
    if tokens.mask.dtype != torch.bool:
        raise DataRefused(f"mask has dtype {tokens.mask.dtype}: pass booleans (masks.as_mask refuses what is neither 0 nor 1)")
    finite = given if entropy is None else {**given, "entropy": entropy}
    bad = torch.zeros_like(tokens.mask)
    for values in finite.values():
        bad = bad | ~torch.isfinite(values.detach())
    bad = bad & tokens.mask
    mask = tokens.mask & ~bad if drop else tokens.mask
    positive = torch.zeros_like(mask)
    for values in given.values():
        positive = positive | (values.detach() > MAX_LOGPROB)
    wrong = (mask & (bad | positive)) | (tokens.mask & ~torch.isfinite(tokens.adv))
    if wrong.any():
        _refuse(wrong, tokens, {**finite, "adv": tokens.adv})
    return mask, bad if drop else torch.zeros_like(bad)


def _refuse(wrong: Tensor, tokens: Tokens, values: dict[str, Tensor]) -> None:
    """Names the first offending token: what, where, and what to do."""
    at = int(torch.nonzero(wrong)[0])
    row = int(tokens.row[at])
    where = f"token {int((tokens.row[:at] == row).sum())} of row {tokens.names[row] if tokens.names else row}"
    for name, tensor in values.items():
        value = float(tensor.detach()[at])
        if not torch.isfinite(tensor.detach()[at]):
            remedy = "" if name == "adv" else "; learner.loss.nonfinite: drop takes such tokens out and counts them"
            raise DataRefused(f"{name} is {value} at {where}: an active token needs a finite number{remedy}")
        if name not in ("adv", "entropy") and value > MAX_LOGPROB:
            raise DataRefused(f"{name} is {value} at {where}: a log-probability cannot exceed 0 (by more than {MAX_LOGPROB}); was it negated?")
