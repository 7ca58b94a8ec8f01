"""What the books need to know of the rows they store, and whether those rows may be stored at all.

Numbers that the learner would refuse are refused here, before they are stored: a group that can be served and never trained would end the run for ever.
Tokens are looked at in NumPy, over a whole record batch at once; what a row has few of (turns, versions) in plain lists, which at these sizes cost far less.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import DataRefused
from .blobs import is_digest
from .columns import SCHEMA, Rows
from .types import MAX_LOGPROB, Status

Key = tuple[int, int, int, int]
Segment = tuple[int, list[tuple[int, int]]]
"""Of one row: its tokens, and its runs of equal version as (version, tokens that our policy sampled in it)."""

_ENDINGS = {
    ("terminated", "terminated"),
    *(("truncated", reason) for reason in ("length", "turns", "time")),
    *(("failed", reason) for reason in ("infra", "env")),
}
_ALL_VALUES_GIVEN = [field.name for field in SCHEMA if not field.nullable]
_VALUES_GIVEN_INSIDE = ("token_ids", "loss_mask", "behaviour_logprobs", "version_starts", "version_values", "turn_starts", "turn_roles", "media")


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
    segments: Sequence[Segment] = ()


class Lists(NamedTuple):
    """A list column, end to end: where each of its ``N`` rows begins in ``values`` and the last one ends, ``[N + 1]``."""

    bounds: list[int]
    values: npt.NDArray[Any]

    @classmethod
    def of(cls, array: pa.ListArray) -> Lists:
        """The lists of a column whose values are plain numbers."""
        bounds = array.offsets.to_numpy().tolist()
        values = array.values.to_numpy()[bounds[0] : bounds[-1]]
        return cls([bound - bounds[0] for bound in bounds] if bounds[0] else bounds, values)

    @property
    def lengths(self) -> list[int]:
        """How many values each row has, ``[N]``."""
        return list(map(operator.sub, self.bounds[1:], self.bounds))

    def row_of(self, place: int) -> int:
        """The row that value number ``place`` belongs to."""
        return bisect.bisect_right(self.bounds, place) - 1


def facts(rows: Rows, temperature: float | None = None, vocabulary: int | None = None) -> list[Fact]:
    """Checks ``rows`` and sums up their trajectories, in row order.

    Training rows have to be sampled at ``temperature``, all token ids to be below ``vocabulary``; None asks for neither.

    Raises:
        DataRefused: a row that must not be stored; the message names it.

    """
    num_rows = rows.batch.num_rows
    if num_rows == 0:
        raise DataRefused("a record batch without rows")
    _refuse_nulls(rows)
    small = {name: rows.listed(name) for name in _SMALL}
    keys = list(zip(*(small[name] for name in ("lineage", "group_id", "member", "attempt")), strict=True))
    firsts = _first_rows(keys, small["segment"])
    check = _Check(keys, small["segment"])
    _check_endings(check, small)
    _check_sampling(check, small, temperature)
    mask = _check_tokens(check, rows, vocabulary)
    lengths = mask.lengths
    _check_turns(check, lengths, rows)
    starts, values = rows.listed("version_starts"), rows.listed("version_values")
    _check_versions(check, lengths, starts, values)
    if len(rows["media"].values):
        _check_media(check, mask, rows["media"])
    segments = segments_of(mask, starts, values)
    endings = list(zip(*(small[name] for name in ("reward", "status", "stop_reason")), strict=True))
    found: list[Fact] = []
    for first, stop in itertools.pairwise([*firsts, num_rows]):
        runs = [run for _, its_runs in segments[first:stop] for run in its_runs if run[1]]
        versions = [version for version, _ in runs]
        low, high = (min(versions), max(versions)) if versions else (None, None)
        sizes = sum(lengths[first:stop]), sum(count for _, count in runs)
        found.append(Fact._make((*keys[first], *endings[first], *sizes, low, high, first, stop - first, segments[first:stop])))
    return found


def segments_of(mask: Lists, starts: Sequence[Sequence[int]], values: Sequence[Sequence[int]]) -> list[Segment]:
    """What each row is made of; ``mask`` is the loss_mask column, ``starts`` and ``values`` are the version runs."""
    ours = mask.values.view(np.bool_)
    found: list[Segment] = []
    for (begin, end), its_starts, its_values in zip(itertools.pairwise(mask.bounds), starts, values, strict=True):
        edges = [*(begin + start for start in its_starts), end]
        counts = [int(np.count_nonzero(ours[first:stop])) for first, stop in itertools.pairwise(edges)]
        found.append((end - begin, list(zip(its_values, counts, strict=True))))
    return found


# --- the checks ---------------------------------------------------------------------------------------------------------------------

_SMALL = ("lineage", "group_id", "member", "attempt", "segment", "reward", "status", "stop_reason", "purpose", "temperature", "top_p", "top_k")


class _Check:
    """Refuses a batch by the name of its first wrong row."""

    def __init__(self, keys: Sequence[Key], segments: Sequence[int]) -> None:
        self._keys = keys
        self._segments = segments

    def rows(self, wrong: Iterable[bool], what: str) -> None:
        """Refuses if any row is wrong, ``[N]``."""
        for row, is_wrong in enumerate(wrong):
            if is_wrong:
                self.refuse(row, what)

    def values(self, column: Lists, wrong: npt.NDArray[np.bool_], what: str) -> None:
        """Refuses if any value of a list column is wrong, ``[P]``."""
        if wrong.any():
            self.refuse(column.row_of(int(wrong.argmax())), what)

    def refuse(self, row: int, what: str) -> None:
        """Refuses the batch for this row."""
        raise DataRefused(f"{_name(self._keys[row], self._segments[row])} {what}")


def _name(key: Key, segment: int) -> str:
    _, group_id, member, attempt = key
    return f"group {group_id} member {member} attempt {attempt} segment {segment}"


def _refuse_nulls(column: Rows) -> None:
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
        check.rows((ending in unknown for ending in endings), f"ended as {min(unknown)}, which is none of {sorted(_ENDINGS)}")
    if set(small["purpose"]) - {"train", "eval"}:
        check.rows((purpose not in ("train", "eval") for purpose in small["purpose"]), "has a purpose other than train or eval")
    for row, (reward, (status, _)) in enumerate(zip(small["reward"], endings, strict=True)):
        if reward is not None and (status == "failed" or not math.isfinite(reward)):
            what = "failed and yet has a reward; a failed episode is not scored" if status == "failed" else "has a reward that is not finite"
            check.refuse(row, f"{what} (null means not scored)")


def _check_sampling(check: _Check, small: dict[str, list[Any]], temperature: float | None) -> None:
    """What trains was sampled from the whole distribution, at the temperature it is scored at."""
    ours = [purpose == "train" for purpose in small["purpose"]]
    check.rows(
        (mine and (top_p < 1.0 or top_k > 0) for mine, top_p, top_k in zip(ours, small["top_p"], small["top_k"], strict=True)),
        "was sampled with top_p below 1 or a top_k: its behaviour_logprobs are of a truncated distribution, which does not train",
    )
    if temperature is not None:
        others = (mine and found != temperature for mine, found in zip(ours, small["temperature"], strict=True))
        check.rows(others, f"was sampled at another temperature than actors.sampling.temperature, {temperature:g}, at which this run trains")


def _check_tokens(check: _Check, column: Rows, vocabulary: int | None) -> Lists:
    """The loss masks, once they and the log-probabilities fit the tokens."""
    tokens, mask, logprobs = (Lists.of(column[name]) for name in ("token_ids", "loss_mask", "behaviour_logprobs"))
    for name, other in (("loss_mask", mask), ("behaviour_logprobs", logprobs)):
        if other.bounds != tokens.bounds:
            check.rows(map(operator.ne, other.lengths, tokens.lengths), f"has {name} and token_ids of different length")
    check.rows((length == 0 for length in tokens.lengths), "has no tokens")
    if mask.values.max() > 1:
        check.values(mask, mask.values > 1, "has a loss_mask that is neither 0 nor 1")
    lowest, highest = float(logprobs.values.min()), float(logprobs.values.max())
    if not math.isfinite(lowest) or not math.isfinite(highest):
        check.values(mask, ~np.isfinite(logprobs.values), "has behaviour_logprobs that are not finite")
    if highest > MAX_LOGPROB:
        check.values(mask, logprobs.values > MAX_LOGPROB, "has behaviour_logprobs above 0, which no probability has; were they negated?")
    if tokens.values.min() < 0:
        check.values(mask, tokens.values < 0, "has a negative token id")
    if vocabulary is not None and tokens.values.max() >= vocabulary:
        what = f"has token id {tokens.values.max()}: the policy knows 0 to {vocabulary - 1}; was it sampled from another?"
        check.values(mask, tokens.values >= vocabulary, what)
    if (firsts := mask.values[mask.bounds[:-1]] == 1).any():
        check.rows(firsts, "trains on its first token, which nothing before it scores; its loss_mask has to be 0 there")
    unsampled = (logprobs.values != 0) > mask.values.view(np.bool_)
    check.values(mask, unsampled, "has behaviour_logprobs at tokens the policy did not sample (loss_mask 0); they must be 0 there")
    return mask


def _check_turns(check: _Check, num_tokens: list[int], column: Rows) -> None:
    turns = column.listed("turn_starts")
    num_turns = list(map(len, turns))
    for name in ("turn_roles", "turn_rewards"):
        bounds = column[name].offsets.to_numpy().tolist()
        if (lengths := list(map(operator.sub, bounds[1:], bounds))) != num_turns:
            check.rows(map(operator.ne, lengths, num_turns), f"has {name} and turn_starts of different length")
    for row, (starts, length) in enumerate(zip(turns, num_tokens, strict=True)):
        if starts != sorted(starts):
            check.refuse(row, "has turn_starts that fall")
        if starts and not 0 <= starts[0] <= starts[-1] <= length:
            check.refuse(row, "has a turn that starts outside its tokens")
    rewards = column["turn_rewards"]
    if not all(reward is None or math.isfinite(reward) for reward in rewards.values.to_pylist()):
        wrong = (any(reward is not None and not math.isfinite(reward) for reward in its_rewards) for its_rewards in column.listed("turn_rewards"))
        check.rows(wrong, "has a turn_reward that is not finite (null means not scored)")


def _check_versions(check: _Check, num_tokens: list[int], every_start: list[list[int]], every_version: list[list[int]]) -> None:
    for row, (starts, versions, length) in enumerate(zip(every_start, every_version, num_tokens, strict=True)):
        if len(versions) != len(starts):
            check.refuse(row, "has version_starts and version_values of different length")
        if not starts:
            check.refuse(row, "has no policy version")
        if starts[0] != 0:
            check.refuse(row, "has version_starts that do not begin at 0")
        if starts != sorted(set(starts)):
            check.refuse(row, "has version_starts that do not rise")
        if starts[-1] >= length:
            check.refuse(row, "has a version that starts after its last token")
        if versions != sorted(versions):
            check.refuse(row, "has policy versions that fall")
        if versions[0] < 0:
            check.refuse(row, "has a negative policy version")


def _check_media(check: _Check, mask: Lists, media: pa.ListArray) -> None:
    """Each image names its blob by digest, and lies whole inside tokens that the policy did not sample, behind the image before it."""
    spans = media.flatten()
    if any(spans.field(name).null_count for name in ("digest", "mime", "start", "length")):
        raise DataRefused("media holds spans with nulls inside")
    for row, its_spans in enumerate(media.to_pylist()):
        ours, end = mask.values[mask.bounds[row] : mask.bounds[row + 1]], 0
        for span in its_spans:
            start, stop = span["start"], span["start"] + span["length"]
            if not is_digest(span["digest"]):
                check.refuse(row, "names an image by something other than a BLAKE3 hash in 64 hex digits")
            if start < 0 or stop <= start or stop > len(ours):
                check.refuse(row, "has an image outside its tokens")
            if start < end:
                check.refuse(row, "has images that overlap or are out of order")
            if ours[start:stop].any():
                check.refuse(row, "has an image at tokens the policy sampled (loss_mask 1)")
            end = stop
