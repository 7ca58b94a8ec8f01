"""A deterministic sampler without a model: the double for tests of everything around a sampler, and for runs that measure the rest.

Its policy is simple and exact: each token ends the turn with probability ``1 / mean_tokens``, else it is any other token, all alike. So its log-probabilities
are true ones, and the same for every version of the weights, which it checks and remembers and otherwise ignores. Loads no torch.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ..errors import ConfigError, RollstreamError, WeightsError
from .sampler import Completion, EndOfTurn, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..buffer.manifest import Manifest


class ScriptedSampler:
    """A :class:`rollstream.actors.sampler.Sampler` over ``vocab_size`` tokens with turns of ``mean_tokens`` on average.

    ``token_delay_s`` is slept before every token, so that loads and aborts can fall in the middle of a completion. Temperature, top-p and top-k do not change
    what it draws: they are those of a policy it does not have.
    """

    def __init__(self, *, vocab_size: int, mean_tokens: float = 8.0, token_delay_s: float = 0.0, max_tokens: int = 2**31 - 1) -> None:
        if vocab_size < 2 or mean_tokens < 1:
            raise ConfigError(f"vocab_size {vocab_size} and mean_tokens {mean_tokens}: give at least 2 and 1")
        self.max_context = max_tokens
        self._vocab_size = vocab_size
        self._stop_chance = 1 / mean_tokens
        self._delay_s = token_delay_s
        self._held: tuple[int, int] | None = None
        self._failure: RollstreamError | None = None
        self._aborted: dict[str, asyncio.Event] = {}
        self._counters = {"tokens": 0.0, "decode_steps": 0.0, "prefill_tokens": 0.0}

    @property
    def held(self) -> tuple[int, int] | None:
        """``(lineage, version)`` last loaded."""
        return self._held

    @property
    def counters(self) -> dict[str, float]:
        """Numbers that only grow."""
        return dict(self._counters)

    @property
    def running(self) -> int:
        """Completions in progress."""
        return len(self._aborted)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Draws one completion; see :meth:`Sampler.generate`."""
        self._ready()
        if not len(prompt_ids):
            raise ConfigError("prompt_ids is empty; a causal model needs at least one token to continue")
        if len(prompt_ids) + params.max_tokens > self.max_context:
            raise ConfigError(
                f"prompt of {len(prompt_ids)} tokens + max_tokens {params.max_tokens} exceed the context of {self.max_context}; shorten one of them"
            )
        if session in self._aborted:
            raise ConfigError(f"session {session} generates already; a session has one completion at a time")
        aborted = self._aborted[session] = asyncio.Event()
        self._counters["prefill_tokens"] += len(prompt_ids)
        try:
            return await self._draw(params, aborted)
        finally:
            del self._aborted[session]

    async def load(self, manifest: Manifest, view: memoryview) -> None:
        """Checks the bytes and remembers the version; see :meth:`Sampler.load`."""
        self._ready(needs_weights=False)
        found = xxhash.xxh3_128_hexdigest(view)
        if found != manifest.digest:
            self._held = None
            self._failure = WeightsError(f"version {manifest.version} has digest {found}, its manifest says {manifest.digest}: nothing is sampled from it")
            raise self._failure
        self._held = (manifest.lineage, manifest.version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Every token but the first scores what this policy gives to any token but a stop token."""
        self._ready()
        other = math.log((1 - self._stop_chance) / self._vocab_size) if self._stop_chance < 1 else -math.inf
        return [0.0, *[other] * (len(token_ids) - 1)] if len(token_ids) else []

    async def abort(self, session: str) -> None:
        """Ends the session's running completion with what it has."""
        if session in self._aborted:
            self._aborted[session].set()

    async def release(self, session: str) -> None:
        """Aborts a running completion; nothing else is held."""
        await self.abort(session)

    async def close(self) -> None:
        """Ends the sampler; completions still running fail."""
        self._failure = self._failure or RollstreamError("the sampler is closed")
        for aborted in self._aborted.values():
            aborted.set()

    def _ready(self, *, needs_weights: bool = True) -> None:
        if self._failure is not None:
            raise self._failure
        if needs_weights and self._held is None:
            raise WeightsError("the sampler holds no weights yet; load a version before generating")

    async def _draw(self, params: SamplingParams, aborted: asyncio.Event) -> Completion:
        stream = np.random.Generator(np.random.Philox(key=params.seed))
        stops = sorted(token for token in params.stop_ids if 0 <= token < self._vocab_size)
        others = np.setdiff1d(np.arange(self._vocab_size, dtype=np.int32), stops)
        chance = self._stop_chance if stops and len(others) else float(bool(stops))
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason: EndOfTurn = "length"
        while len(tokens) < params.max_tokens:
            # Without a delay one round of the event loop per completion is enough for others to get their turn.
            if self._delay_s or not tokens:
                await asyncio.sleep(self._delay_s)
            if aborted.is_set():
                reason = "abort"
                break
            self._ready()
            assert self._held is not None
            ends = bool(stream.random() < chance)
            tokens.append(int(stream.choice(stops if ends else others)))
            logprobs.append(math.log(chance / len(stops)) if ends else math.log((1 - chance) / len(others)))
            versions.append(self._held[1])
            self._counters["tokens"] += 1
            self._counters["decode_steps"] += 1
            if ends:
                reason = "stop"
                break
        if self._failure is not None:
            raise self._failure
        return Completion(np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32), reason)
