"""From trajectories to packed micro-batches: the one place where the shift by one happens.

    Batch ─ flatten ─► Flat (NumPy) ─ plan ─► Plan (of the whole batch) ─ pack ─► MicroBatch × M (torch, of this rank's rows)

``Flat`` has two parts. ``rows`` are those of the whole batch, from its header: every sampled token and nothing else, which is what
:func:`rollstream.learner.plan.plan` reads, alike on every rank. The rows dealt to this rank (``b`` of the ``B``) lie end to end with all their tokens (``p``).
A micro-batch is one packed row ``[1, Q]`` of those of them that have something to train. It feeds the model no more than that takes: of each row the tokens
before its last active one, since the hidden state at ``t - 1`` scores token ``t`` and nothing reads what comes after. ``source`` and ``targets`` hold
that shift; no other code shifts anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..buffer.header import header_of
from ..buffer.types import MAX_LOGPROB, Batch, Header, Segment
from ..errors import DataRefused, StreamError
from .attention import Layout, layout_of
from .masks import as_mask
from .plan import Plan, Rows, StaleLimit
from .tokens import Tokens

Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of this rank that were given a reward, all ``[K]``: where among its tokens their last one lies, the reward, and the trajectory."""

    ends: Int64
    rewards: npt.NDArray[np.float64]
    trajectory: Int64


NO_TURNS = Turns(np.zeros(0, np.int64), np.zeros(0, np.float64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class Flat:
    """A batch, laid end to end.

    ``rows`` are the plan's input: the whole batch, sampled tokens only. ``temperature`` is the sampling's. The rest is of this rank: ``mine [b]`` says which
    of the ``B`` rows it holds; of those, ``offsets [b + 1]`` cut ``token_ids``, ``loss_mask`` and ``behaviour_logprobs``, all ``[p]``.
    """

    rows: Rows
    temperature: float
    mine: Int64
    offsets: Int64
    token_ids: npt.NDArray[np.int32]
    loss_mask: Bool
    behaviour_logprobs: npt.NDArray[np.float32]
    turns: Turns = NO_TURNS

    def only(self, rows: Int64) -> Flat:
        """The same batch, held as a rank does that has only ``rows`` (indices into ``mine``, ascending). For batches without rewarded turns."""
        lengths = np.diff(self.offsets)
        tokens = np.flatnonzero(np.isin(np.repeat(np.arange(len(lengths)), lengths), rows))
        arrays = (self.token_ids[tokens], self.loss_mask[tokens], self.behaviour_logprobs[tokens])
        return Flat(self.rows, self.temperature, self.mine[rows], np.concatenate([[0], np.cumsum(lengths[rows])]), *arrays)

    def trained(self, plan: Plan) -> Bool:
        """Which of this rank's tokens train under ``plan``, ``[p]``."""
        lengths = np.diff(self.rows.offsets)[self.mine]
        before = np.repeat(np.cumsum(lengths) - lengths, lengths)
        sampled = np.repeat(self.rows.offsets[:-1][self.mine], lengths) + np.arange(len(before)) - before  # of each sampled token here, its place in ``rows``
        mask = np.zeros(len(self.loss_mask), np.bool_)
        mask[self.loss_mask] = plan.mask[sampled]
        return mask


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of ``Q`` tokens in ``R`` segments, of which ``N`` tokens train.

    What the model sees: ``input_ids`` and ``position_ids`` ``[1, Q] int64`` (positions start again in each segment), ``cu_seqlens`` ``[R + 1] int32``,
    ``max_length``, ``layout`` (see :mod:`rollstream.learner.attention`). What is scored: hidden state ``source[n]`` scores ``targets[n]``, both
    ``[N] int64``; ``scored [N] int64`` is where those targets lie among this rank's tokens. What the loss sees: ``tokens``, ``[N]`` each, active tokens only.
    ``lengths [R]`` are those of the segments, on the host. For bootstraps: ``after [K] int64`` are the hidden states after the last active token of the
    trajectories ``after_trajectory [K] int64``.
    """

    lengths: Int64
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_length: int
    layout: Layout
    source: torch.Tensor
    targets: torch.Tensor
    scored: torch.Tensor
    tokens: Tokens
    after: torch.Tensor
    after_trajectory: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Q, what the model computes."""
        return int(self.input_ids.shape[1])


def flatten(batch: Batch, max_lag: int, *, vocabulary: int | None = None, drop: bool = False) -> Flat:
    """Lays ``batch`` end to end.

    ``vocabulary`` is how many token ids the policy has, None where nobody asks. With ``drop`` (``learner.loss.nonfinite``) log-probabilities that are not
    finite pass here: the objective takes their tokens out.

    Raises :class:`DataRefused`, naming the trajectory, for what must not train: mixed temperatures, sampling from a truncated distribution, arrays of
    different length, masks that are neither 0 nor 1, unknown token ids, a trained first token, log-probabilities that are none. Raises
    :class:`StreamError` for rows that are not those the header describes.
    """
    header = header_of(batch)
    if not header.group_ids:
        raise DataRefused(f"batch {batch.version} has no trajectories: nothing to train on")
    names = tuple(f"group {group_id} member {member}" for group_id, member in zip(header.group_ids, header.members, strict=True))
    rows = _rows(batch, header, names, max_lag)
    mine = _rows_of(batch, header)
    segments = [segment for trajectory in batch.trajectories for segment in trajectory.segments]
    for row, segment in zip(mine.tolist(), segments, strict=True):
        _check_arrays(segment, names[rows.row_trajectory[row]])
    offsets = np.concatenate([[0], np.cumsum([segment.num_tokens for segment in segments], dtype=np.int64)])
    flat = Flat(
        rows,
        _sampling_temperature(header, names),
        mine,
        offsets,
        _joined([segment.token_ids for segment in segments], np.int32),
        _joined([segment.loss_mask for segment in segments], np.uint8) != 0,
        _joined([segment.behaviour_logprobs for segment in segments], np.float32),
        _rewarded_turns(segments, offsets, rows.row_trajectory[mine], names),
    )
    expected = np.array(header.segment_tokens, np.int64)[mine], np.diff(rows.offsets)[mine]
    found = np.diff(flat.offsets), np.array([segment.num_trained_tokens for segment in segments], np.int64)
    if not all(map(np.array_equal, found, expected)):
        raise StreamError(f"batch {batch.version}: rows came that are not as long as its header says; run `rollstream audit`")
    _check_tokens(flat, vocabulary, drop=drop)
    return flat


def _check_arrays(segment: Segment, name: str) -> None:
    """Refuses arrays that do not describe the same tokens: laid end to end they would shift all that follow."""
    lengths = {len(segment.token_ids), len(segment.loss_mask), len(segment.behaviour_logprobs)}
    if len(lengths) > 1:
        raise DataRefused(
            f"{name} has {len(segment.token_ids)} token ids, {len(segment.loss_mask)} of loss_mask and {len(segment.behaviour_logprobs)} "
            "behaviour log-probabilities in a segment: one of each per token is needed"
        )
    as_mask(segment.loss_mask, f"loss_mask of {name}")


def _rewarded_turns(segments: list[Segment], offsets: Int64, row_trajectory: npt.NDArray[np.integer], names: tuple[str, ...]) -> Turns:
    found: list[tuple[int, float, int]] = []
    for row, segment in enumerate(segments):
        ends = np.append(segment.turn_starts[1:], segment.num_tokens) - 1 + offsets[row]
        found += [(int(end), reward, int(row_trajectory[row])) for end, reward in zip(ends, segment.turn_rewards, strict=True) if reward is not None]
    for _, reward, trajectory in found:
        if not np.isfinite(reward):
            raise DataRefused(f"{names[trajectory]} has a turn with reward {reward}: only finite numbers train; a turn that was not scored must say so")
    ends, rewards, trajectories = zip(*found, strict=True) if found else ((), (), ())
    return Turns(np.array(ends, np.int64), np.array(rewards, np.float64), np.array(trajectories, np.int64))


def _rows(batch: Batch, header: Header, names: tuple[str, ...], max_lag: int) -> Rows:
    """The plan's input: the sampled tokens of the whole batch."""
    run_rows = np.repeat(np.arange(len(header.run_counts)), header.run_counts)
    sampled = np.bincount(run_rows, weights=header.run_sampled, minlength=len(header.run_counts)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(sampled)])
    return Rows(
        offsets=offsets,
        mask=np.ones(int(offsets[-1]), np.bool_),
        row_trajectory=np.repeat(np.arange(len(names)), header.segment_counts),
        rewards=np.array([np.nan if reward is None else reward for reward in header.rewards], np.float64),
        groups=np.array(header.group_ids, np.int64),
        truncated=np.array([status == "truncated" for status in header.statuses]),
        scored=np.array([reward is not None and status != "failed" for reward, status in zip(header.rewards, header.statuses, strict=True)]),
        withheld=np.array([key in batch.withheld for key in zip(header.group_ids, header.members, strict=True)]),
        versions=np.repeat(np.array(header.run_versions, np.int64), header.run_sampled),
        stale=StaleLimit(current=batch.version - 1, limit=max_lag, level="trajectory"),
        names=names,
    )


def _rows_of(batch: Batch, header: Header) -> Int64:
    """Which rows of the header this rank's trajectories are, ``[b]``."""
    place = {key: index for index, key in enumerate(zip(header.group_ids, header.members, strict=True))}
    first = np.cumsum(header.segment_counts) - header.segment_counts
    found: list[int] = []
    for trajectory in batch.trajectories:
        index = place.get((trajectory.key.group_id, trajectory.key.member))
        if index is None or len(trajectory.segments) != header.segment_counts[index]:
            raise StreamError(f"batch {batch.version}: {trajectory.key} is not as its header says; run `rollstream audit`")
        found += range(int(first[index]), int(first[index]) + len(trajectory.segments))
    return np.array(found, np.int64)


def _joined(arrays: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _sampling_temperature(header: Header, names: tuple[str, ...]) -> float:
    first = header.temperatures[0]
    for name, temperature, top_p, top_k in zip(names, header.temperatures, header.top_ps, header.top_ks, strict=True):
        if top_p < 1.0 or top_k > 0:
            raise DataRefused(
                f"{name} was sampled with top_p {top_p:g} and top_k {top_k}: its log-probabilities are of a truncated distribution; "
                "set actors.sampling.top_p: 1 and top_k: 0"
            )
        if temperature != first:
            raise DataRefused(f"{name} was sampled at temperature {temperature:g}, others of its batch at {first:g}: one batch needs one temperature")
    return first


def _check_tokens(flat: Flat, vocabulary: int | None, *, drop: bool) -> None:
    """Refuses what no later step could see: a first token that trains has nothing before it that scores it."""
    offsets, mask, logprobs = flat.offsets, flat.loss_mask, flat.behaviour_logprobs

    def name_of(place: int) -> tuple[str, int]:
        row = int(np.searchsorted(offsets, place, side="right")) - 1
        return flat.rows.names[flat.rows.row_trajectory[flat.mine[row]]], place - int(offsets[row])

    starts = offsets[:-1][np.diff(offsets) > 0]
    first = mask[starts]
    if first.any():
        name, _ = name_of(int(starts[first][0]))
        raise DataRefused(f"{name} trains on the first token of a segment: nothing scores it; its loss_mask has to be 0 there")
    unknown = (flat.token_ids < 0) | (flat.token_ids >= (np.iinfo(np.int32).max if vocabulary is None else vocabulary))
    if unknown.any():
        at = int(np.flatnonzero(unknown)[0])
        name, token = name_of(at)
        raise DataRefused(
            f"{name} has token id {flat.token_ids[at]} at token {token}: the policy knows 0 to {(vocabulary or 0) - 1}; was it sampled from another?"
        )
    finite = np.isfinite(logprobs)
    wrong = mask & np.where(finite, logprobs > MAX_LOGPROB, not drop)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        name, token = name_of(at)
        raise DataRefused(f"{name} has behaviour log-probability {logprobs[at]} at token {token}: it has to be finite and at most 0")


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


def pack(flat: Flat, plan: Plan, tokens_per_micro_batch: int, device: torch.device | str = "cpu", *, bootstraps: bool = False) -> list[MicroBatch]:
    """The micro-batches of this rank's rows under ``plan``; rows without an active token are in none. Empty where nothing of them trains.

    With ``bootstraps`` the last active token of each trajectory that was cut is fed as well, so that there is a hidden state after it.
    """
    mask = flat.trained(plan)
    active = np.flatnonzero(mask)
    token_row = np.repeat(np.arange(len(flat.mine)), np.diff(flat.offsets))
    ends = np.zeros(len(flat.mine), np.int64)
    ends[token_row[active]] = active - flat.offsets[token_row[active]]  # ascending, so the last one stays
    live = np.flatnonzero(plan.row_counts[flat.mine])
    further = np.zeros(len(ends), np.int64)
    if bootstraps and flat.rows.truncated is not None:
        last = np.full(len(flat.rows.rewards), -1)
        last[flat.rows.row_trajectory[flat.mine[live]]] = live  # ascending, so the last live row stays
        further[last[(last >= 0) & (flat.rows.truncated != 0)]] = 1
    bins = bins_of((ends + further)[live], tokens_per_micro_batch)
    return [_micro_batch(flat, plan, mask, live[members], ends[live[members]], further[live[members]], torch.device(device)) for members in bins]


def idle(device: torch.device | str = "cpu") -> MicroBatch:
    """A micro-batch without a scored token: the model computes one token, and every gradient of it is 0."""
    nothing, zero = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    values = torch.zeros(0, device=device)
    tokens = Tokens(row=nothing, num_rows=1, mask=nothing.bool(), adv=values, agg=values, mu=values, row_trajectory=zero, names=[""])
    lengths = torch.tensor([0, 1], dtype=torch.int32, device=device)
    layout = layout_of(np.ones(1, np.int64), device)
    return MicroBatch(
        np.zeros(1, np.int64), zero[None], zero[None], lengths, 1, layout, nothing, nothing, nothing, tokens, after=nothing, after_trajectory=nothing
    )


def _micro_batch(flat: Flat, plan: Plan, mask: Bool, rows: Int64, ends: Int64, further: Int64, device: torch.device) -> MicroBatch:
    """Packs ``rows`` (indices into ``flat.mine``), feeding the tokens before ``ends``, the last active one, and that one too where ``further`` is 1."""

    def put(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    lengths = ends + further
    cu_seqlens = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    position = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    local_row = np.repeat(np.arange(len(rows)), lengths)
    place = flat.offsets[rows][local_row] + position  # of each fed token among this rank's
    before = position < ends[local_row]
    source = np.flatnonzero(before)[mask[place[before] + 1]]  # the shift: fed token n scores the one after it
    cut = np.flatnonzero(further)
    scored = place[source] + 1
    row = local_row[source]
    mine = flat.mine[rows]
    tokens = Tokens(
        row=put(row),
        num_rows=len(rows),
        mask=torch.ones(len(source), dtype=torch.bool, device=device),
        adv=put(plan.row_advantage[mine][row]),
        agg=put(plan.row_weight[mine][row]),
        mu=put(flat.behaviour_logprobs[scored]),
        row_trajectory=put(flat.rows.row_trajectory[mine].astype(np.int64)),
        names=[flat.rows.names[trajectory] for trajectory in flat.rows.row_trajectory[mine]] if flat.rows.names else None,
    )
    return MicroBatch(
        lengths=lengths,
        input_ids=put(flat.token_ids[place].astype(np.int64))[None],
        position_ids=put(position)[None],
        cu_seqlens=put(cu_seqlens.astype(np.int32)),
        max_length=int(lengths.max()),
        layout=layout_of(lengths, device),
        source=put(source),
        targets=put(flat.token_ids[scored].astype(np.int64)),
        scored=put(scored),
        tokens=tokens,
        after=put(cu_seqlens[1:][cut] - 1),
        after_trajectory=put(flat.rows.row_trajectory[mine[cut]].astype(np.int64)),
    )
