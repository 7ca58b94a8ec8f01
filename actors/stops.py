"""Which tokens end a turn, for many rows at once."""

from __future__ import annotations

from typing import Any

import numpy as np


class StopSets:
    """The distinct sets of stop tokens in use, as one table ``[S, V] bool``, so that a whole step is checked by one look-up."""

    def __init__(self, vocab_size: int) -> None:
        self._table = np.zeros((0, vocab_size), bool)
        self._index: dict[frozenset[int], int] = {}

    def index(self, stop_ids: frozenset[int]) -> int:
        """The row of the table for a set; ids outside the vocabulary cannot be sampled and are left out."""
        found = self._index.get(stop_ids)
        if found is None:
            found = self._index[stop_ids] = len(self._table)
            row = np.zeros((1, self._table.shape[1]), bool)
            row[0, [token for token in stop_ids if 0 <= token < row.shape[1]]] = True
            self._table = np.concatenate([self._table, row])
        return found

    def hit(self, sets: np.ndarray[Any, np.dtype[np.int64]], token_ids: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each token (``[B]``) is in its row's set (``[B]``)."""
        return self._table[sets, token_ids]
