"""What the books need to know of the rows they store, and whether those rows may be stored at all.

Everything is computed over the columns of a whole record batch at once. Symbols: ``N`` rows, ``P`` tokens of all rows, ``R`` runs of equal version of all rows.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import DataRefused
from .blobs import is_digest
from .columns import SCHEMA
from .types import Status

Ints = npt.NDArray[np.int64]
Key = tuple[int, int, int, int]

_ENDINGS = {
    ("terminated", "terminated"),
    *(("truncated", reason) for reason in ("length", "turns", "time")),
    *(("failed", reason) for reason in ("infra", "env")),
}
_ALL_VALUES_GIVEN = [field.name for field in SCHEMA if not field.nullable]
_VALUES_GIVEN_INSIDE = ("token_ids", "loss_mask", "behaviour_logprobs", "version_starts", "version_values", "turn_starts", "turn_roles", "media")
_UNSAMPLED = np.iinfo(np.int32).max


class Fact(NamedTuple):
    """One trajectory as the books see it. ``min_version`` and ``max_version`` are None where our policy sampled nothing."""

    lineage: int
    group_id: int
    member: int
    attempt: int
    reward: float | None
    status: Status
    stop_reason: str
    num_tokens: int
    num_trained_tokens: int
    min_version: int | None
    max_version: int | None
    first_row: int
    num_rows: int


class Lists(NamedTuple):
    """A list column, end to end: where each row's values begin and the last row's end ``[N + 1]``, how many each row has ``[N]``, all values."""

    bounds: Ints
    lengths: Ints
    values: npt.NDArray[Any]

    @classmethod
    def of(cls, array: pa.ListArray) -> Lists:
        """The lists of a column whose values are plain numbers."""
        offsets = array.offsets.to_numpy(zero_copy_only=True)
        first, last = int(offsets[0]), int(offsets[-1])
        bounds = (offsets - first if first else offsets).astype(np.int64)
        return cls(bounds, bounds[1:] - bounds[:-1], array.values.to_numpy(zero_copy_only=True)[first:last])


def facts(batch: pa.RecordBatch) -> list[Fact]:
    """Checks ``batch`` and sums up its trajectories, in row order.

    Raises:
        DataRefused: a row that must not be stored; the message names it.

    """
    if batch.num_rows == 0:
        raise DataRefused("a record batch without rows")
    column = dict(zip(SCHEMA.names, batch.columns, strict=True))
    _refuse_nulls(column)
    small = {name: column[name].to_pylist() for name in _SMALL}
    keys = list(zip(*(small[name] for name in ("lineage", "group_id", "member", "attempt")), strict=True))
    firsts = _first_rows(keys, small["segment"])
    lists = {name: Lists.of(column[name]) for name in _NUMBER_LISTS}
    check = _Check(keys, small["segment"])
    _check_endings(check, small)
    _check_tokens(check, lists)
    _check_turns(check, lists, column)
    _check_versions(check, lists)
    if len(column["media"].values):
        _check_media(check, lists, column["media"])
    oldest, newest, trained = sampled(lists["loss_mask"], lists["version_starts"], lists["version_values"])
    lengths, spans = np.stack((lists["token_ids"].lengths, trained)), [*firsts[1:], batch.num_rows]
    if len(firsts) < batch.num_rows:
        lengths = np.add.reduceat(lengths, firsts, axis=1)
        oldest, newest = np.minimum.reduceat(oldest, firsts), np.maximum.reduceat(newest, firsts)
    versions = [(low, high) if low <= high else (None, None) for low, high in zip(oldest.tolist(), newest.tolist(), strict=True)]
    endings = list(zip(*(small[name] for name in ("reward", "status", "stop_reason")), strict=True))
    return [
        Fact._make((*keys[row], *endings[row], *length, *version, row, stop - row))
        for row, stop, length, version in zip(firsts, spans, lengths.T.tolist(), versions, strict=True)
    ]


def sampled(mask: Lists, starts: Lists, values: Lists) -> tuple[Ints, Ints, Ints]:
    """Oldest version, newest version and number of sampled tokens of each row, ``[N]`` each; oldest is above newest where none was sampled.

    ``mask`` is the loss_mask column, ``starts`` and ``values`` the version runs; each row has at least one of either.
    """
    offset = np.repeat(mask.bounds[:-1], starts.lengths)
    begins = (starts.values + offset).tolist()
    ours = mask.values.view(np.bool_)
    counts = [np.count_nonzero(ours[start:stop]) for start, stop in itertools.pairwise([*begins, len(ours)])]  # far cheaper than a sum over every token
    num_sampled = np.array(counts, np.int64)
    oldest = np.minimum.reduceat(np.where(num_sampled > 0, values.values, _UNSAMPLED), starts.bounds[:-1])
    newest = np.maximum.reduceat(np.where(num_sampled > 0, values.values, -1), starts.bounds[:-1])
    return oldest.astype(np.int64), newest.astype(np.int64), np.add.reduceat(num_sampled, starts.bounds[:-1])


# --- the checks ---------------------------------------------------------------------------------------------------------------------

_SMALL = ("lineage", "group_id", "member", "attempt", "segment", "reward", "status", "stop_reason", "purpose")
_NUMBER_LISTS = ("token_ids", "loss_mask", "behaviour_logprobs", "version_starts", "version_values", "turn_starts")


class _Check:
    """Refuses a batch by the name of its first wrong row."""

    def __init__(self, keys: Sequence[Key], segments: Sequence[int]) -> None:
        self._keys = keys
        self._segments = segments

    def rows(self, wrong: npt.NDArray[np.bool_], what: str) -> None:
        """Refuses if any row is wrong, ``[N]``."""
        if wrong.any():
            row = int(wrong.argmax())
            raise DataRefused(f"{_name(self._keys[row], self._segments[row])} {what}")

    def values(self, bounds: Ints, wrong: npt.NDArray[np.bool_], what: str) -> None:
        """Refuses if any value of a list column is wrong, ``[P]``."""
        if wrong.any():
            row = int(bounds.searchsorted(int(wrong.argmax()), side="right")) - 1
            raise DataRefused(f"{_name(self._keys[row], self._segments[row])} {what}")

    def rising(self, column: Lists, what: str, *, strictly: bool) -> None:
        """Refuses if values fall (or, strictly, do not rise) within a row."""
        wrong = column.values[1:] <= column.values[:-1] if strictly else column.values[1:] < column.values[:-1]
        if wrong.any():
            starts = column.bounds[1:-1]
            wrong[starts[(starts > 0) & (starts <= len(wrong))] - 1] = False  # from one row to the next
            self.values(column.bounds[:-1], np.concatenate(([False], wrong)), what)


def _name(key: Key, segment: int) -> str:
    _, group_id, member, attempt = key
    return f"group {group_id} member {member} attempt {attempt} segment {segment}"


def _refuse_nulls(column: dict[str, Any]) -> None:
    for name in _ALL_VALUES_GIVEN:
        if column[name].null_count:
            raise DataRefused(f"{name} holds {column[name].null_count} nulls; only reward may be null")
    for name in _VALUES_GIVEN_INSIDE:
        if column[name].values.null_count:
            raise DataRefused(f"{name} holds lists with nulls inside")
    for name in ("reward_parts", "env_metrics"):
        if column[name].items.null_count:
            raise DataRefused(f"{name} holds values that are null; leave the name out")


def _first_rows(keys: Sequence[Key], segments: Sequence[int]) -> list[int]:
    """The first row of each trajectory; its segments must follow, numbered from 0."""
    firsts: list[int] = []
    for row, (key, segment) in enumerate(zip(keys, segments, strict=True)):
        if min(key) < 0:
            raise DataRefused(f"{_name(key, segment)} has a negative identity")
        if segment == 0:
            firsts.append(row)
        elif row == 0 or key != keys[row - 1] or segment != segments[row - 1] + 1:
            raise DataRefused(f"{_name(key, segment)} does not follow the segment before it (each trajectory: 0, 1, 2, …)")
    if len({keys[row] for row in firsts}) < len(firsts):
        raise DataRefused("a record batch holds the same trajectory twice")
    return firsts


def _check_endings(check: _Check, small: dict[str, list[Any]]) -> None:
    endings = list(zip(small["status"], small["stop_reason"], strict=True))
    if unknown := set(endings) - _ENDINGS:
        check.rows(np.array([ending in unknown for ending in endings]), f"ended as {min(unknown)}, which is none of {sorted(_ENDINGS)}")
    if set(small["purpose"]) - {"train", "eval"}:
        check.rows(np.array([purpose not in ("train", "eval") for purpose in small["purpose"]]), "has a purpose other than train or eval")
    for row, (reward, (status, _)) in enumerate(zip(small["reward"], endings, strict=True)):
        if reward is not None and (status == "failed" or not math.isfinite(reward)):
            what = "failed and yet has a reward; a failed episode is not scored" if status == "failed" else "has a reward that is not finite"
            check.rows(np.arange(len(endings)) == row, f"{what} (null means not scored)")


def _check_tokens(check: _Check, lists: dict[str, Lists]) -> None:
    tokens, mask, logprobs = lists["token_ids"], lists["loss_mask"], lists["behaviour_logprobs"]
    check.rows(mask.lengths != tokens.lengths, "has loss_mask and token_ids of different length")
    check.rows(logprobs.lengths != tokens.lengths, "has behaviour_logprobs and token_ids of different length")
    check.rows(tokens.lengths == 0, "has no tokens")
    if mask.values.max() > 1:
        check.values(tokens.bounds, mask.values > 1, "has a loss_mask that is neither 0 nor 1")
    if not math.isfinite(float(logprobs.values.sum())):
        check.values(tokens.bounds, ~np.isfinite(logprobs.values), "has behaviour_logprobs that are not finite")
    unsampled = (logprobs.values != 0) > mask.values.view(np.bool_)
    check.values(tokens.bounds, unsampled, "has behaviour_logprobs at tokens the policy did not sample (loss_mask 0); they must be 0 there")


def _check_turns(check: _Check, lists: dict[str, Lists], column: dict[str, Any]) -> None:
    turns = lists["turn_starts"]
    for name in ("turn_roles", "turn_rewards"):
        offsets = column[name].offsets.to_numpy(zero_copy_only=True)
        check.rows(offsets[1:] - offsets[:-1] != turns.lengths, f"has {name} and turn_starts of different length")
    check.rising(turns, "has turn_starts that fall", strictly=False)
    outside = (turns.values < 0) | (turns.values > np.repeat(lists["token_ids"].lengths, turns.lengths))
    check.values(turns.bounds, outside, "has a turn that starts outside its tokens")


def _check_versions(check: _Check, lists: dict[str, Lists]) -> None:
    starts, values = lists["version_starts"], lists["version_values"]
    check.rows(values.lengths != starts.lengths, "has version_starts and version_values of different length")
    check.rows(starts.lengths == 0, "has no policy version")
    firsts, lasts = starts.bounds[:-1], starts.bounds[1:] - 1
    check.rows(starts.values[firsts] != 0, "has version_starts that do not begin at 0")
    check.rising(starts, "has version_starts that do not rise", strictly=True)
    check.rows(starts.values[lasts] >= lists["token_ids"].lengths, "has a version that starts after its last token")
    check.rising(values, "has policy versions that fall", strictly=False)
    check.rows(values.values[firsts] < 0, "has a negative policy version")


def _check_media(check: _Check, lists: dict[str, Lists], media: pa.ListArray) -> None:
    """Each image names its blob by digest, and lies whole inside tokens that the policy did not sample, behind the image before it."""
    bounds = media.offsets.to_numpy(zero_copy_only=True).astype(np.int64)
    spans, owner = media.flatten(), np.repeat(np.arange(len(media)), bounds[1:] - bounds[:-1])
    if any(spans.field(name).null_count for name in ("digest", "mime", "start", "length")):
        raise DataRefused("media holds spans with nulls inside")
    bounds = bounds - bounds[0]
    named = np.array([is_digest(digest) for digest in spans.field("digest").to_pylist()], bool)
    check.values(bounds, ~named, "names an image by something other than a sha256 in 64 hex digits")
    starts, lengths = (spans.field(name).to_numpy().astype(np.int64) for name in ("start", "length"))
    ends = starts + lengths
    check.values(bounds, (starts < 0) | (lengths < 1) | (ends > lists["token_ids"].lengths[owner]), "has an image outside its tokens")
    overlaps = np.concatenate(([False], (starts[1:] < ends[:-1]) & (owner[1:] == owner[:-1])))
    check.values(bounds, overlaps, "has images that overlap or are out of order")
    mask = lists["loss_mask"]
    ours = np.array([mask.values[first:last].any() for first, last in zip(mask.bounds[owner] + starts, mask.bounds[owner] + ends, strict=True)], bool)
    check.values(bounds, ours, "has an image at tokens the policy sampled (loss_mask 1)")
