"""Masks: which tokens train."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import DataRefused

Bool = npt.NDArray[np.bool_]


def as_mask(values: npt.ArrayLike, name: str = "loss_mask") -> Bool:
    """The same values as booleans; anything but 0 and 1 is refused, since a fractional mask is a weight somebody meant for elsewhere.

    Raises :class:`DataRefused`: a value is neither 0 nor 1 (NaN included), naming it and where it is.
    """
    array = np.asarray(values)
    if array.dtype == np.bool_:
        return array
    wrong = (array != 0) & (array != 1)
    if wrong.any():
        where = tuple(int(axis[0]) for axis in np.nonzero(wrong))
        raise DataRefused(f"{name} at {where} is {array[where]}: a mask holds 0 and 1 only; give weights to tokens through loss.agg or the advantage")
    return array.astype(np.bool_)


def response_mask(tokens: Sequence[int] | npt.NDArray[np.integer], prompt_len: int, eos_ids: Collection[int]) -> Bool:
    """Marks the response up to and including its first end-of-sequence token, ``[T] bool``.

    Several stop ids may exist, and one may equal the pad id, so nothing is compared with a pad id; end tokens inside the prompt do not count.
    For a stream recorded with masks this is never needed: there the sampler's own finish position decides.
    """
    tokens = np.asarray(tokens)
    mask = np.zeros(len(tokens), np.bool_)
    ends = np.flatnonzero(np.isin(tokens[prompt_len:], sorted(eos_ids)))
    mask[prompt_len : prompt_len + int(ends[0]) + 1 if len(ends) else len(tokens)] = True
    return mask
