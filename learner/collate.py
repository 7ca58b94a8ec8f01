"""From trajectories to packed micro-batches: the one place where the shift by one happens.

    Batch ─ flatten ─► Flat (whole global batch, NumPy) ─ plan ─► Plan ─ pack ─► MicroBatch × M (torch)

``Flat`` lays the tokens of all rows end to end (``P`` of them) and is what :func:`rollstream.learner.plan.plan` reads. A micro-batch is one packed row
``[1, Q]`` of those rows that have something to train. It feeds the model no more than that takes: of each row the tokens before its last active one,
since the hidden state at ``t - 1`` scores token ``t`` and nothing reads what comes after. ``source`` and ``targets`` hold that shift; no other code
shifts anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..buffer.types import Batch, Segment, Trajectory
from ..errors import DataRefused
from .attention import Layout, layout_of
from .plan import Plan, Rows, StaleLimit
from .tokens import Tokens

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Flat:
    """A whole batch, laid end to end: ``rows`` is the plan's input, ``token_ids`` and ``behaviour_logprobs`` are ``[P]``, ``temperature`` is the sampling's."""

    rows: Rows
    token_ids: npt.NDArray[np.int32]
    behaviour_logprobs: npt.NDArray[np.float32]
    temperature: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of ``Q`` tokens in ``R`` segments, of which ``N`` tokens train.

    What the model sees: ``input_ids`` and ``position_ids`` ``[1, Q] int64`` (positions start again in each segment), ``cu_seqlens`` ``[R + 1] int32``,
    ``max_length``, ``layout`` (see :mod:`rollstream.learner.attention`). What is scored: hidden state ``source[n]`` scores ``targets[n]``, both
    ``[N] int64``; ``scored [N] int64`` is where those targets lie in the flat batch. What the loss sees: ``tokens``, ``[N]`` each, active tokens only.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_length: int
    layout: Layout
    source: torch.Tensor
    targets: torch.Tensor
    scored: torch.Tensor
    tokens: Tokens

    @property
    def num_tokens(self) -> int:
        """Q, what the model computes."""
        return int(self.input_ids.shape[1])


def flatten(batch: Batch, max_lag: int) -> Flat:
    """Lays ``batch`` end to end.

    Raises :class:`DataRefused`, naming the trajectory, for what must not train: mixed temperatures, sampling from a truncated distribution, a trained
    first token, log-probabilities that are none.
    """
    trajectories = batch.trajectories
    if not trajectories:
        raise DataRefused(f"batch {batch.version} has no trajectories: nothing to train on")
    temperature = _sampling_temperature(trajectories)
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    counts = np.fromiter((len(trajectory.segments) for trajectory in trajectories), np.int64, len(trajectories))
    row_trajectory = np.repeat(np.arange(len(trajectories)), counts)
    offsets = np.zeros(len(segments) + 1, np.int64)
    np.cumsum([segment.num_tokens for segment in segments], out=offsets[1:])
    mask = np.concatenate([segment.loss_mask for segment in segments])
    logprobs = np.concatenate([segment.behaviour_logprobs for segment in segments])
    names = tuple(f"group {trajectory.key.group_id} member {trajectory.key.member}" for trajectory in trajectories)
    _check_tokens(offsets, mask, logprobs, row_trajectory, names)
    scored = np.array([trajectory.reward is not None and trajectory.status != "failed" for trajectory in trajectories])
    rows = Rows(
        offsets=offsets,
        mask=mask,
        row_trajectory=row_trajectory,
        rewards=np.array([np.nan if trajectory.reward is None else trajectory.reward for trajectory in trajectories], np.float64),
        groups=np.array([trajectory.key.group_id for trajectory in trajectories], np.int64),
        truncated=np.array([trajectory.status == "truncated" for trajectory in trajectories]),
        scored=scored,
        withheld=np.array([(trajectory.key.group_id, trajectory.key.member) in batch.withheld for trajectory in trajectories]),
        versions=_token_versions(segments, offsets),
        stale=StaleLimit(current=batch.version - 1, limit=max_lag, level="trajectory"),
        names=names,
    )
    return Flat(rows, np.concatenate([segment.token_ids for segment in segments]), logprobs, temperature)


def _token_versions(segments: list[Segment], offsets: Int64) -> npt.NDArray[np.int32]:
    """Version of every token, ``[P]``, run by run."""
    runs = np.fromiter((len(segment.version_starts) for segment in segments), np.int64, len(segments))
    starts = np.concatenate([segment.version_starts for segment in segments]) + np.repeat(offsets[:-1], runs)
    return np.repeat(np.concatenate([segment.version_values for segment in segments]), np.diff(starts, append=offsets[-1]))


def _sampling_temperature(trajectories: tuple[Trajectory, ...]) -> float:
    first = trajectories[0].temperature
    for trajectory in trajectories:
        name = f"group {trajectory.key.group_id} member {trajectory.key.member}"
        if trajectory.top_p < 1.0 or trajectory.top_k > 0:
            raise DataRefused(
                f"{name} was sampled with top_p {trajectory.top_p:g} and top_k {trajectory.top_k}: its log-probabilities are of a truncated distribution; "
                "set actors.sampling.top_p: 1 and top_k: 0"
            )
        if trajectory.temperature != first:
            raise DataRefused(
                f"{name} was sampled at temperature {trajectory.temperature:g}, others of its batch at {first:g}: one batch needs one temperature"
            )
    return first


def _check_tokens(offsets: Int64, mask: npt.NDArray[np.uint8], logprobs: npt.NDArray[np.float32], row_trajectory: Int64, names: tuple[str, ...]) -> None:
    """Refuses what no later step could see: a first token that trains has nothing before it that scores it."""
    starts = offsets[:-1][np.diff(offsets) > 0]
    first = mask[starts] != 0
    if first.any():
        row = int(np.searchsorted(offsets, starts[first][0], side="right")) - 1
        raise DataRefused(f"{names[row_trajectory[row]]} trains on the first token of a segment: nothing scores it; its loss_mask has to be 0 there")
    wrong = (mask != 0) & ~(np.isfinite(logprobs) & (logprobs <= 1e-4))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise DataRefused(
            f"{names[row_trajectory[row]]} has behaviour log-probability {logprobs[at]} at token {at - int(offsets[row])}: it has to be finite and at most 0"
        )


def bins_of(lengths: Int64, budget: int) -> list[Int64]:
    """Best-fit decreasing: which rows (indices into ``lengths``) share a micro-batch of at most ``budget`` tokens. A row above the budget gets its own.

    Deterministic: ties go to the lower index. Rows within a bin are in ascending order.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        fits = [index for index, free in enumerate(room) if free >= length]
        if fits:
            best = min(fits, key=room.__getitem__)
            bins[best].append(row)
            room[best] -= length
        else:
            bins.append([row])
            room.append(budget - length)
    return [np.array(sorted(members), np.int64) for members in bins]


def pack(flat: Flat, plan: Plan, tokens_per_micro_batch: int, device: torch.device | str = "cpu") -> list[MicroBatch]:
    """The micro-batches of ``flat`` under ``plan``; rows without an active token are in none. Empty where ``plan.skip``."""
    offsets = flat.rows.offsets.astype(np.int64)
    active = np.flatnonzero(plan.mask)
    token_row = np.repeat(np.arange(len(plan.row_counts)), np.diff(offsets))
    ends = np.zeros(len(plan.row_counts), np.int64)
    ends[token_row[active]] = active - offsets[token_row[active]]  # ascending, so the last one stays
    live = np.flatnonzero(plan.row_counts)
    return [_micro_batch(flat, plan, live[members], ends[live[members]], torch.device(device)) for members in bins_of(ends[live], tokens_per_micro_batch)]


def _micro_batch(flat: Flat, plan: Plan, rows: Int64, lengths: Int64, device: torch.device) -> MicroBatch:
    """Packs ``rows``, feeding the first ``lengths`` tokens of each."""

    def put(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    offsets = flat.rows.offsets.astype(np.int64)
    cu_seqlens = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    position = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    local_row = np.repeat(np.arange(len(rows)), lengths)
    place = offsets[rows][local_row] + position  # of each fed token in the flat batch
    source = np.flatnonzero(plan.mask[place + 1])  # the shift: fed token n scores the one after it
    scored = place[source] + 1
    row = local_row[source]
    tokens = Tokens(
        row=put(row),
        num_rows=len(rows),
        mask=torch.ones(len(source), dtype=torch.bool, device=device),
        adv=put(plan.row_advantage[rows][row]),
        agg=put(plan.row_weight[rows][row]),
        mu=put(flat.behaviour_logprobs[scored]),
        row_trajectory=put(flat.rows.row_trajectory[rows].astype(np.int64)),
        names=[flat.rows.names[trajectory] for trajectory in flat.rows.row_trajectory[rows]] if flat.rows.names else None,
    )
    return MicroBatch(
        input_ids=put(flat.token_ids[place].astype(np.int64))[None],
        position_ids=put(position)[None],
        cu_seqlens=put(cu_seqlens.astype(np.int32)),
        max_length=int(lengths.max()),
        layout=layout_of(lengths, device),
        source=put(source),
        targets=put(flat.token_ids[scored].astype(np.int64)),
        scored=put(scored),
        tokens=tokens,
    )
