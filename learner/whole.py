"""The tokens of a whole step as one: all micro-batches of a rank, and of all ranks, for terms that need every one of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from .ranks import Ranks
from .tokens import Tokens

_FLOATS = ("adv", "agg", "mu", "prox", "ref")


def joined(parts: Sequence[Tokens]) -> Tokens:
    """All micro-batches as one; rows are numbered on."""
    starts = [0, *itertools.accumulate(part.num_rows for part in parts)]

    def join(name: str) -> torch.Tensor | None:
        values = [value for part in parts if (value := getattr(part, name)) is not None]
        return torch.cat(values) if values else None

    rest = {name: join(name) for name in ("mu", "prox", "ref", "row_trajectory")}
    return Tokens(
        row=torch.cat([part.row + start for part, start in zip(parts, starts, strict=False)]),
        num_rows=starts[-1],
        mask=torch.cat([part.mask for part in parts]),
        adv=torch.cat([part.adv for part in parts]),
        agg=torch.cat([part.agg for part in parts]),
        names=[name for part in parts for name in part.names or [""] * part.num_rows],
        **rest,
    )


def of_all_ranks(x: torch.Tensor, tokens: Tokens, names: Sequence[str], ranks: Ranks) -> tuple[torch.Tensor, Tokens, int]:
    """``x`` and ``tokens`` of all ranks, in the order of the ranks, and where this rank's begin. ``names`` ``[N]`` are those of the trajectories.

    What one rank has not, none has: it follows from the configuration.
    """
    if ranks.num == 1:
        return x, tokens, 0
    every_x = ranks.gather(x)
    begin = sum(len(part) for part in every_x[: ranks.rank])
    num_rows = [int(count) for count in ranks.gather(torch.tensor([float(tokens.num_rows)]))]
    first_rows = [0, *itertools.accumulate(num_rows)]
    rows = [part.to(torch.int64) + first for part, first in zip(ranks.gather(tokens.row), first_rows, strict=False)]
    trajectories = None if tokens.row_trajectory is None else torch.cat(ranks.gather(tokens.row_trajectory)).to(torch.int64)
    floats = {name: None if (value := getattr(tokens, name)) is None else torch.cat(ranks.gather(value)) for name in _FLOATS}
    whole = Tokens(
        row=torch.cat(rows),
        num_rows=first_rows[-1],
        mask=torch.cat(ranks.gather(tokens.mask)) != 0,
        row_trajectory=trajectories,
        names=None if trajectories is None or not names else [names[int(trajectory)] for trajectory in trajectories],
        **floats,  # type: ignore[arg-type]
    )
    return torch.cat(every_x), whole, begin
