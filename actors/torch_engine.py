"""The synchronous heart of ``torch_sampler``: rows of sessions, one step at a time.

Each session owns a row: its tokens, how many of them have keys and values in the cache, and the request that runs on it. A row with one uncached token
decodes, with several it prefills; there is nothing else. :meth:`Engine.step` prefills what waits, decodes what runs, draws one token for each, and hands
back the requests that ended. Decoding rows are kept among the first rows, so that the cache is read in place. Per-row work happens when a request starts
and when it ends; in between everything is arrays. Not thread-safe: one thread calls it, outside the event loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import WeightsError
from .decoder import Decoder
from .draw import draw
from .kv_cache import Forward, RowCache
from .sampler import Completion, EndOfTurn, Int32, SamplingParams
from .stops import StopSets

if TYPE_CHECKING:
    from collections.abc import Iterable


UNIFORM_CHUNK = 64
"""How many random numbers of a request are drawn at a time."""

PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward, so that a long queue does not hold up the rows that decode."""


@dataclass(eq=False, slots=True)
class Request:
    """One completion: what was asked, then where it runs."""

    session: str
    prompt_ids: Int32
    params: SamplingParams
    future: Any = None
    stream: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        """Opens the request's own stream of random numbers."""
        self.stream = np.random.Generator(np.random.Philox(key=self.params.seed))


class Engine:
    """Rows, cache and model. ``version`` is stamped on every token drawn."""

    def __init__(self, model: torch.nn.Module, *, max_rows: int) -> None:
        self.model: Any = model
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.decoder: Decoder | None = None
        self.version = 0
        self.admitting = True
        self.counters = {"tokens": 0.0, "decode_steps": 0.0, "prefill_tokens": 0.0}
        self.waiting: deque[Request] = deque()
        self._cache = RowCache()
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self._stops = StopSets(self.vocab_size)
        self._max_rows = max_rows
        self._row_of: dict[str, int] = {}
        self._sessions: list[str | None] = [None] * max_rows
        self._requests: list[Request | None] = [None] * max_rows
        self._running = np.zeros(max_rows, bool)
        self._length = np.zeros(max_rows, np.int64)
        self._cached = np.zeros(max_rows, np.int64)
        self._start = np.zeros(max_rows, np.int64)
        self._limit = np.zeros(max_rows, np.int64)
        self._used = np.zeros(max_rows, np.int64)
        self._temperature = np.ones(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float64)
        self._stop_set = np.zeros(max_rows, np.int64)
        self._uniforms = np.zeros((max_rows, UNIFORM_CHUNK), np.float64)
        self._tokens = np.zeros((max_rows, 0), np.int32)
        self._logprobs = np.zeros((max_rows, 0), np.float32)
        self._versions = np.zeros((max_rows, 0), np.int32)
        self._mask = torch.zeros((0, 0))
        self._clock = 0

    # --- requests -------------------------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return int(np.count_nonzero(self._running))

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running.any()) or (self.admitting and bool(self.waiting))

    def submit(self, request: Request) -> None:
        """Queues a request; it gets a row at the next step that has one."""
        self.waiting.append(request)

    def admit(self) -> None:
        """Gives rows to waiting requests, first come first served; idle sessions lose theirs, the longest unused first."""
        while self.admitting and self.waiting:
            row = self._row_for(self.waiting[0].session)
            if row is None:
                return
            self._begin(self.waiting.popleft(), row)

    def abort(self, session: str) -> list[tuple[Request, Completion]]:
        """Ends the session's request, running or waiting, with what it has so far."""
        for request in self.waiting:
            if request.session == session:
                self.waiting.remove(request)
                empty = np.zeros(0, np.int32)
                return [(request, Completion(empty, np.zeros(0, np.float32), empty, "abort"))]
        row = self._row_of.get(session)
        return [self._end(row, "abort")] if row is not None and self._running[row] else []

    def release(self, session: str) -> None:
        """Frees the session's row."""
        row = self._row_of.pop(session, None)
        if row is not None:
            self._sessions[row] = self._requests[row] = None
            self._running[row] = False
            self._length[row] = self._cached[row] = self._used[row] = 0

    def take_all(self) -> list[Request]:
        """Gives up every request, waiting and running: the engine failed."""
        running = [request for request in self._requests if request is not None]
        for request in running:
            self.release(request.session)
        waiting = list(self.waiting)
        self.waiting.clear()
        return running + waiting

    def forget_cache(self, *, running: bool, idle: bool) -> None:
        """Declares cached keys and values void: those rows prefill everything again when they next need it."""
        self._cached[self._running & running] = 0
        self._cached[~self._running & idle] = 0

    # --- one step -------------------------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Request, Completion]]:
        """Prefills, decodes, draws one token per running row. Returns the requests that ended with it."""
        self.admit()
        pending = np.where(self._running, self._length - self._cached, 0)
        self._compact(pending)
        pending = np.where(self._running, self._length - self._cached, 0)
        rows: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        logits: list[torch.Tensor] = []
        for prefill in self._prefill_groups(pending):
            rows.append(prefill)
            logits.append(self._prefill(prefill))
        decode = np.flatnonzero(pending == 1)
        if len(decode):
            rows.append(decode)
            logits.append(self._decode(decode))
            self.counters["decode_steps"] += 1
        if not rows:
            return []
        drawn = np.concatenate(rows)
        self._cached[drawn] = self._length[drawn]
        return self._draw(drawn, torch.cat(logits) if len(logits) > 1 else logits[0])

    def _draw(self, rows: np.ndarray[Any, np.dtype[np.int64]], logits: torch.Tensor) -> list[tuple[Request, Completion]]:
        position = self._length[rows]
        offset = (position - self._start[rows]) % UNIFORM_CHUNK
        for row in rows[offset == 0].tolist():
            request = self._requests[row]
            assert request is not None
            self._uniforms[row] = request.stream.random(UNIFORM_CHUNK)
        top_k, top_p = self._top_k[rows], self._top_p[rows]
        filters = bool(top_k.any()) or bool((top_p < 1).any())
        tokens, logprobs = draw(
            logits,
            self._to(self._temperature[rows]),
            self._to(top_k) if filters else None,
            self._to(top_p) if filters else None,
            self._to(self._uniforms[rows, offset]),
        )
        chosen, scores = tokens.cpu().numpy(), logprobs.cpu().numpy()
        if not np.isfinite(scores).all():
            raise WeightsError(f"policy version {self.version} gives logits that are not finite; the learner's step that made it diverged")
        self._tokens[rows, position] = chosen
        self._logprobs[rows, position] = scores
        self._versions[rows, position] = self.version
        self._length[rows] = position + 1
        self.counters["tokens"] += len(rows)
        stopped = self._stops.hit(self._stop_set[rows], chosen)
        ended = stopped | (position + 1 >= self._limit[rows])
        return [self._end(row, "stop" if stop else "length") for row, stop in zip(rows[ended].tolist(), stopped[ended].tolist(), strict=True)]

    def _end(self, row: int, reason: EndOfTurn) -> tuple[Request, Completion]:
        request = self._requests[row]
        assert request is not None
        self._requests[row] = None
        self._running[row] = False
        self._clock += 1
        self._used[row] = self._clock
        sampled = slice(int(self._start[row]), int(self._length[row]))
        return request, Completion(self._tokens[row, sampled].copy(), self._logprobs[row, sampled].copy(), self._versions[row, sampled].copy(), reason)

    # --- forwards -------------------------------------------------------------------------------------------------------------------

    def _prefill_groups(self, pending: np.ndarray[Any, np.dtype[np.int64]]) -> Iterable[np.ndarray[Any, np.dtype[np.int64]]]:
        """Rows with more than one uncached token, in groups of similar length, so that padding costs little."""
        rows = np.flatnonzero(pending > 1)
        rows = rows[np.argsort(pending[rows], kind="stable")]
        while len(rows):
            lengths = pending[rows]
            # Padding a short row to twice its length is cheaper than one more forward; padding it further is not.
            fits = (lengths <= 2 * lengths[0] + 16) & (lengths * np.arange(1, len(rows) + 1) <= PREFILL_TOKENS)
            fits[0] = True
            num = int(fits.argmin()) if not fits.all() else len(rows)
            yield rows[:num]
            rows = rows[num:]

    def _prefill(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """Forward over the uncached tokens of ``rows``, padded on the left so that the last token of each comes last. Returns logits ``[B, V]``."""
        length, cached = self._length[rows], self._cached[rows]
        num_new = int((length - cached).max())
        positions = (length - num_new)[:, None] + np.arange(num_new)
        real = positions >= cached[:, None]
        positions = np.where(real, positions, 0)
        token_ids = np.where(real, self._tokens[rows[:, None], positions], 0)
        columns = self._to(np.where(real, positions + 1, 0))
        width = int(length.max()) + 1
        column = torch.arange(width, device=self.device)
        visible = (column <= columns[:, :, None]) & ((column > 0) | (columns[:, :, None] == 0))
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, -torch.inf)
        where = self._to(rows)
        self._mask[where, :] = -torch.inf
        self._mask[where, :width] = mask[:, -1]
        self.counters["prefill_tokens"] += int((length - cached).sum())
        self._cache.forward = Forward(where[:, None].expand(columns.shape), columns, width, where)
        return self._forward(self._to(token_ids), self._to(positions), mask[:, None])

    def _decode(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """Forward over the newest token of ``rows``; rows between them that do not decode ride along and write to column 0. Returns logits ``[B, V]``."""
        num = int(rows[-1]) + 1
        position = np.zeros(num, np.int64)
        position[rows] = self._length[rows] - 1
        column = np.zeros(num, np.int64)
        column[rows] = position[rows] + 1
        token_ids = self._tokens[np.arange(num), position]
        width = int(column.max()) + 1
        self._mask.view(-1).index_fill_(0, self._to(rows * self._mask.shape[1] + column[rows]), 0.0)
        every = torch.arange(num, device=self.device)
        self._cache.forward = Forward(every[:, None], self._to(column)[:, None], width)
        logits = self._forward(self._to(token_ids)[:, None], self._to(position)[:, None], self._mask[:num, None, None, :width])
        return logits if num == len(rows) else logits[self._to(rows)]

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The model itself. Returns the logits of the last token, ``[B, V]``."""
        if self.decoder is not None:
            return self.decoder(token_ids.long(), positions, mask, self._cache)
        output = self.model(
            input_ids=token_ids.long(), position_ids=positions, attention_mask=mask, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1]

    def _to(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def score(self, token_ids: Int32) -> list[float]:
        """Log-probability of every token ``[T]`` given the ones before it, at temperature 1; the first scores 0. Uses no cache."""
        num = len(token_ids)
        if num < 2:
            return [0.0] * num
        ids = self._to(token_ids).long()[None]
        mask = torch.full((num, num), -torch.inf, dtype=self.dtype, device=self.device).triu_(1)[None, None]
        logits = self.model(input_ids=ids, position_ids=torch.arange(num, device=self.device)[None], attention_mask=mask, use_cache=False).logits
        logprobs = torch.log_softmax(logits[0, :-1].float(), dim=-1).gather(1, ids[0, 1:, None]).squeeze(1)
        return [0.0, *logprobs.tolist()]

    # --- rows -----------------------------------------------------------------------------------------------------------------------

    def _row_for(self, session: str) -> int | None:
        row = self._row_of.get(session)
        if row is not None:
            return row
        free = next((row for row, owner in enumerate(self._sessions) if owner is None), None)
        if free is None:
            idle = np.flatnonzero(~self._running)
            if not len(idle):
                return None
            free = int(idle[self._used[idle].argmin()])
            self.release(str(self._sessions[free]))
        self._row_of[session] = free
        self._sessions[free] = session
        return free

    def _begin(self, request: Request, row: int) -> None:
        prompt, params = request.prompt_ids, request.params
        self._reserve(row + 1, len(prompt) + params.max_tokens)
        # The newest token is always computed anew: its logits are what the first draw needs.
        known = min(int(self._cached[row]), len(prompt) - 1)
        differs = self._tokens[row, :known] != prompt[:known]
        self._cached[row] = int(differs.argmax()) if differs.any() else known
        self._tokens[row, : len(prompt)] = prompt
        self._requests[row] = request
        self._running[row] = True
        self._start[row] = self._length[row] = len(prompt)
        self._limit[row] = len(prompt) + params.max_tokens
        self._temperature[row], self._top_k[row], self._top_p[row] = params.temperature, params.top_k, params.top_p
        self._stop_set[row] = self._stops.index(params.stop_ids)
        if self._length[row] - self._cached[row] == 1:
            self._rebuild_mask(row)

    def _rebuild_mask(self, row: int) -> None:
        """Visible columns of a row that goes on to decode without a prefill."""
        self._mask[row] = -torch.inf
        self._mask[row, 1 : int(self._cached[row]) + 1] = 0.0

    def _reserve(self, num_rows: int, num_tokens: int) -> None:
        if num_tokens > self._tokens.shape[1]:
            wanted = -(-max(num_tokens, self._tokens.shape[1] * 3 // 2) // 64) * 64
            self._tokens, self._logprobs, self._versions = (_widened(array, wanted) for array in (self._tokens, self._logprobs, self._versions))
        if num_rows > self._cache.num_rows or num_tokens + 1 > self._cache.capacity:
            self._cache.reserve(min(self._max_rows, max(num_rows, self._cache.num_rows * 2)) if num_rows > self._cache.num_rows else num_rows, num_tokens + 1)
            grown = torch.full((self._cache.num_rows, self._cache.capacity), -torch.inf, dtype=self.dtype, device=self.device)
            grown[:, 0] = 0.0
            grown[: self._mask.shape[0], : self._mask.shape[1]] = self._mask
            self._mask = grown

    def _compact(self, pending: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Swaps decoding rows to the front once too many others ride along with them."""
        decoding = pending == 1
        num = int(np.count_nonzero(decoding))
        if not num or int(np.flatnonzero(decoding)[-1]) + 1 <= num + max(2, num // 8):
            return
        holes = np.flatnonzero(~decoding[:num])
        movers = np.flatnonzero(decoding[num:]) + num
        source, destination = np.concatenate([holes, movers]), np.concatenate([movers, holes])
        for array in (
            self._running, self._length, self._cached, self._start, self._limit, self._used, self._temperature, self._top_k, self._top_p,
            self._stop_set, self._uniforms, self._tokens, self._logprobs, self._versions,
        ):  # fmt: skip
            array[destination] = array[source]
        width = int(self._length[source].max()) + 1
        there, here = self._to(destination), self._to(source)
        self._cache.move(here, there, width)
        self._mask[there] = self._mask[here]
        for low, high in zip(holes.tolist(), movers.tolist(), strict=True):
            for owners in (self._sessions, self._requests):
                owners[low], owners[high] = owners[high], owners[low]
            for row in (low, high):
                session = self._sessions[row]
                if session is not None:
                    self._row_of[session] = row


def _widened(array: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    grown = np.zeros((array.shape[0], width), array.dtype)
    grown[:, : array.shape[1]] = array
    return grown
