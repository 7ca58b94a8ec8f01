"""The one interface between an actor and whatever draws its tokens.

Token ids in, token ids out. A sampler is given a prompt and how to draw; it returns the sampled ids, the log-probability of each under the distribution it was
really drawn from, and the policy version of the weights that produced it. New weights arrive through :meth:`Sampler.load`, between two tokens, while
generations are running. Shapes: ``N`` sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..buffer.manifest import Manifest

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

EndOfTurn = Literal["stop", "length", "abort"]
"""``stop`` a stop token was sampled (it is the last id) · ``length`` ``max_tokens`` were sampled · ``abort`` somebody called :meth:`Sampler.abort`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is drawn.

    ``temperature`` 0 takes the most likely token (log-probabilities are then those at temperature 1, since a point mass would say nothing); ``top_k`` 0 and
    ``top_p`` 1 keep the whole vocabulary. The same ``seed`` draws the same tokens from the same distributions, whatever else the sampler is doing.

    Raises :class:`ConfigError` for values outside their bounds.
    """

    max_tokens: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        """Checks the bounds."""
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; a completion needs at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; give a finite number of at least 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; give a number above 0 and at most 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; give 0 (whole vocabulary) or more")
        if not 0 <= self.seed < 2**128:
            raise ConfigError(f"seed is {self.seed}; give an integer from 0 to 2**128 - 1")


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What the policy sampled in one turn.

    ``token_ids`` ``[N] int32`` (a stop token included), ``logprobs`` ``[N] float32`` under the distribution sampled from, ``versions`` ``[N] int32`` the policy
    version of the weights behind each token, never decreasing. ``N`` is 0 only after an abort.
    """

    token_ids: Int32
    logprobs: Float32
    versions: Int32
    stop_reason: EndOfTurn


class Sampler(Protocol):
    """Draws tokens from a policy. Implementations: ``torch_sampler`` (in this process) and ``scripted_sampler`` (a deterministic double).

    A *session* is one episode: a later turn whose prompt begins with what the session already holds costs only its new tokens. A session generates one
    completion at a time. The sampler never mixes sessions: nothing computed for one is ever read by another.
    """

    max_context: int
    """Longest prompt plus completion, in tokens."""

    @property
    def held(self) -> tuple[int, int] | None:
        """``(lineage, version)`` of the weights that sample now; None before the first load and after a failed one."""
        ...

    @property
    def counters(self) -> dict[str, float]:
        """Numbers that only grow: ``tokens`` sampled, ``decode_steps``, ``prefill_tokens``."""
        ...

    @property
    def running(self) -> int:
        """Completions in progress."""
        ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Draws one completion of ``prompt_ids``.

        Raises :class:`ConfigError` where prompt and ``max_tokens`` exceed ``max_context``, and :class:`WeightsError` where the sampler holds no proven weights.
        """
        ...

    async def load(self, manifest: Manifest, view: memoryview) -> None:
        """Replaces the weights by the bytes of ``view``, between two decode steps. Returns once new tokens come from them.

        Raises :class:`WeightsError` where the weights it then holds are not the manifest's; it samples nothing from that moment on.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token given the ones before it, at temperature 1, under the weights held now. Position 0 scores 0."""
        ...

    async def abort(self, session: str) -> None:
        """Ends the session's running completion, which returns what it has with ``abort``. Nothing happens where none is running."""
        ...

    async def release(self, session: str) -> None:
        """Forgets a session: what was cached for it is free for others. Aborts a running completion."""
        ...

    async def close(self) -> None:
        """Ends the sampler; completions still running fail."""
        ...
