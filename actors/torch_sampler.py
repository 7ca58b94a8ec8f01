"""The embedded sampler: continuous batching of any Hugging Face causal language model, in this process, on CPU or one GPU.

An asyncio task owns a worker thread; everything that touches the model happens in that thread, one command or decode step at a time, so environments and
heartbeats go on while it computes. Commands (new requests, loads, scores, releases) are taken up between two decode steps.

New weights and what was computed under the old ones, ``on_push``:

* ``keep`` — running completions go on with their cached keys and values, and so do the later turns of an episode in progress (an episode is one
  generation with pauses). Log-probabilities are those of the distribution really sampled from, mixed cache included.
* ``recompute`` — running rows are prefilled again under the new weights; idle episodes prefill anew at their next turn.
* ``drain`` — running completions finish first and new ones wait; idle episodes prefill anew at their next turn.

Nothing cached is ever shared between sessions, so there is no prefix cache to go stale beyond these.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from ..errors import ConfigError, RollstreamError, WeightsError
from .architecture import check_architecture, probe
from .sampler import Completion, SamplingParams
from .torch_engine import Engine, Request
from .torch_weights import copy_in, fingerprint, match

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..buffer.manifest import Manifest

logger = logging.getLogger(__name__)

OnPush = Literal["keep", "recompute", "drain"]
Result = TypeVar("Result")


class TorchSampler:
    """A :class:`rollstream.actors.sampler.Sampler` around a loaded model.

    ``max_batch`` sessions have a row of the cache each; further requests wait. ``max_tokens`` bounds prompt plus completion (None: what the model takes).
    Raises :class:`ConfigError` for an architecture that this engine cannot run, found out by running it.
    """

    def __init__(self, model: Any, *, max_batch: int = 256, on_push: OnPush = "keep", max_tokens: int | None = None, num_threads: int = 1) -> None:
        config = model.config.get_text_config()
        positions = int(getattr(config, "max_position_embeddings", None) or 2**31 - 1)
        self.max_context = min(positions, max_tokens or positions)
        self._on_push: OnPush = on_push
        self._held: tuple[int, int] | None = None
        self._failure: BaseException | None = None
        self._sessions: set[str] = set()
        self._futures: set[asyncio.Future[Any]] = set()
        self._inbox: deque[Callable[[], None]] = deque()
        self._finished: list[tuple[Any, Any]] = []
        self._drained: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        torch.set_num_threads(num_threads)
        check_architecture(model, self.max_context)
        model.requires_grad_(False).eval()
        self._engine = Engine(model, max_rows=max_batch)
        with torch.inference_mode():
            probe(self._engine, model)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sampler", initializer=torch.set_num_threads, initargs=(num_threads,))

    # --- the protocol ---------------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> tuple[int, int] | None:
        """``(lineage, version)`` of the weights that sample now."""
        return self._held

    @property
    def counters(self) -> dict[str, float]:
        """Numbers that only grow."""
        return dict(self._engine.counters)

    @property
    def running(self) -> int:
        """Completions in progress."""
        return len(self._sessions)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Draws one completion; see :meth:`Sampler.generate`."""
        self._ready()
        prompt = np.asarray(prompt_ids, np.int32)
        if not len(prompt):
            raise ConfigError("prompt_ids is empty; a causal model needs at least one token to continue")
        if len(prompt) + params.max_tokens > self.max_context:
            raise ConfigError(f"prompt of {len(prompt)} tokens + max_tokens {params.max_tokens} exceed the context of {self.max_context}; shorten one of them")
        if session in self._sessions:
            raise ConfigError(f"session {session} generates already; a session has one completion at a time")
        request = Request(session, prompt, params, self._future())
        self._sessions.add(session)
        try:
            self._post(lambda: self._engine.submit(request))
            return await request.future
        except asyncio.CancelledError:
            self._post(lambda: self._abort(session))
            raise
        finally:
            self._sessions.discard(session)

    async def load(self, manifest: Manifest, view: memoryview) -> None:
        """Replaces the weights between two decode steps; see :meth:`Sampler.load`."""
        self._ready(needs_weights=False)
        await self._run(lambda: self._load(manifest, view), drained=self._on_push == "drain")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token at temperature 1; see :meth:`Sampler.score`."""
        self._ready()
        return await self._run(lambda: self._engine.score(np.asarray(token_ids, np.int32)))

    async def abort(self, session: str) -> None:
        """Ends the session's running completion with what it has."""
        if session in self._sessions:
            await self._run(lambda: self._abort(session))

    async def release(self, session: str) -> None:
        """Frees what is held for the session."""
        await self.abort(session)
        self._post(lambda: self._engine.release(session))

    async def close(self) -> None:
        """Ends the task and the thread; completions still running fail."""
        self._closed = True
        if self._task is not None:
            self._wake.set()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for future in list(self._futures):
            _settle(future, RollstreamError("the sampler was closed while somebody waited for it"))
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)

    # --- between the event loop and the thread ----------------------------------------------------------------------------------------

    def _ready(self, *, needs_weights: bool = True) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RollstreamError("the sampler is closed")
        if needs_weights and self._held is None:
            raise WeightsError("the sampler holds no weights yet; load a version before generating")

    def _future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _post(self, command: Callable[[], None]) -> None:
        """Hands a command to the thread; it runs before the next decode step, and never once the sampler is closed."""
        if self._closed:
            return
        self._inbox.append(command)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve(), name="sampler")
        self._wake.set()

    async def _run(self, function: Callable[[], Result], *, drained: bool = False) -> Result:
        """Runs ``function`` in the thread between two steps (``drained``: once nothing runs) and returns what it returns."""
        if self._closed:
            raise RollstreamError("the sampler is closed")
        future: asyncio.Future[Result] = self._future()

        def command() -> None:
            try:
                self._finished.append((future, function()))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
                self._finished.append((future, error))

        def wait_until_drained() -> None:
            self._engine.admitting = False
            self._drained.append(command)

        self._post(wait_until_drained if drained else command)
        return await future

    async def _serve(self) -> None:
        """Consumes commands; waits for one when nothing runs; is released by ``_post``; produces the results of futures."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            if not (self._inbox or self._drained or self._engine.busy):
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                await loop.run_in_executor(self._executor, self._advance)
            except Exception as error:  # noqa: BLE001 - whatever it was, every waiting completion must hear of it
                self._fail(error)
            finished, self._finished = self._finished, []
            for future, outcome in finished:
                _settle(future, outcome)
            # Twice round the loop, and quick environments have answered: their next turns join the coming step instead of the one after.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    @torch.inference_mode()
    def _advance(self) -> None:
        """In the thread: takes up commands, then decodes until somebody has to hear of something."""
        while True:
            while self._inbox:
                self._inbox.popleft()()
            if self._drained and not self._engine.num_running:
                self._engine.admitting = True
                drained, self._drained = self._drained, []
                for command in drained:
                    command()
            if not self._finished and self._engine.busy:
                self._finished.extend((request.future, completion) for request, completion in self._engine.step())
            if self._finished or self._closed or not (self._inbox or self._engine.busy):
                return

    def _abort(self, session: str) -> None:
        self._finished.extend((request.future, completion) for request, completion in self._engine.abort(session))

    def _load(self, manifest: Manifest, view: memoryview) -> None:
        """Copies the weights in and proves them; on failure the engine holds nothing and everything that runs fails with the reason.

        What is asked meanwhile, on the event loop, waits for its turn in the thread: it must not find the sampler without weights.
        """
        try:
            tensors = match(self._engine.model, manifest)
            copy_in(tensors, manifest, view)
            found = fingerprint(tensors, manifest)
            if found != manifest.digest:
                raise WeightsError(
                    f"version {manifest.version} has fingerprint {found} in the engine, {manifest.digest} in its manifest: nothing is sampled from it"
                )
        except Exception as error:
            self._fail(error)
            raise
        if self._engine.decoder is not None:
            self._engine.decoder.refresh()
        if self._on_push != "keep":
            self._engine.forget_cache(running=self._on_push == "recompute", idle=True)
        self._engine.version = manifest.version
        self._held = (manifest.lineage, manifest.version)

    def _fail(self, error: Exception) -> None:
        """Nothing is sampled from now on: running and waiting completions, and whatever is asked later, get ``error``."""
        self._failure = error
        self._held = None
        self._engine.admitting = True
        self._finished.extend((request.future, error) for request in self._engine.take_all())


def _settle(future: asyncio.Future[Any], outcome: object) -> None:
    """Gives a future its result; one that was cancelled meanwhile needs none."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
