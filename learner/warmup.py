"""The warm-up: supervised steps on the environment's own scripted conversations, before version 0.

A small policy with random weights never says anything an environment can reward. The demonstrations teach it the form of an answer; ``correct`` says
how many of them are right, so that there is something left to learn. What is trained is the cross-entropy of the assistant's tokens, averaged over the
tokens of a step. Everything follows from the run's seed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..buffer.deal import deal
from ..buffer.tasks import Mixture
from ..configs.schema import Config, Warmup
from ..envs import registry
from ..envs.chat import ChatEnv
from ..envs.renderer import Renderer
from ..errors import ConfigError
from .collate import Flat, idle, pack
from .optimizer import adamw, clip
from .plan import Plan, Rows
from .policy import Policy

if TYPE_CHECKING:
    from ..models import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_SEED_STREAM = 0x5741524D
"""Keeps the warm-up's random numbers apart from every other use of the run's seed."""
Demonstration = tuple[list[int], list[int]]
"""Token ids and loss mask, 1 on the assistant's tokens."""
_CALL_ID = re.compile(r'"(tool_call_)?id": "[^"]*"')
"""The only part of a scripted conversation that is made up at random and means nothing."""


def warm_up(policy: Policy, tokenizer: PreTrainedTokenizerFast, config: Config, stop: threading.Event) -> float:
    """Trains ``policy`` in place and returns the last step's loss, in nats per token; ``stop`` leaves it half done, good for nothing.

    Raises :class:`ConfigError` where the environment has no demonstrations.
    """
    settings = config.warmup
    assert settings is not None
    registry.load_imports(config.imports)
    began = time.process_time()
    parameters = list(policy.model.parameters())
    optimizer = adamw(policy.model.named_parameters(), [policy.model.get_input_embeddings().weight], rate=settings.learning_rate)
    demonstrations = _demonstrations(config, settings, tokenizer)
    loss = 0.0
    for step, chosen in zip(range(1, settings.steps + 1), demonstrations, strict=False):
        if any(policy.ranks.largest([stop.is_set()])):
            break
        loss = _step(policy, chosen, config.learner.tokens_per_micro_batch)
        clip(parameters, 1.0)
        policy.settle()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0 or step == settings.steps:
            logger.info("warmup_step=%d/%d loss=%.4f cpu_s=%.1f", step, settings.steps, loss, time.process_time() - began)
    demonstrations.close()
    return loss


def _demonstrations(config: Config, settings: Warmup, tokenizer: PreTrainedTokenizerFast) -> Generator[list[Demonstration], None, None]:
    """The demonstrations of each step, without end, from the run's seed, dealt to the environments that have any by their weights."""
    rng = np.random.default_rng([config.seed, _SEED_STREAM])
    several = len(config.envs) > 1
    chosen = [env for env in config.envs if not several or registry.demonstrates(env.id, **env.kwargs)]
    if not chosen:
        raise ConfigError(f"warmup: none of {', '.join(env.id for env in config.envs)} has demonstrations; leave warmup out")
    made = [registry.make(env.id, **env.kwargs) for env in chosen]
    scripts = [_Script(env, tokenizer) for env in made]
    mixture = Mixture([env.weight for env in chosen])
    try:
        with asyncio.Runner() as runner:
            while True:
                seeds = rng.integers(2**31, size=settings.demonstrations_per_step)
                right = rng.random(settings.demonstrations_per_step) < settings.correct
                yield [runner.run(scripts[mixture.next()].play(seed, correct)) for seed, correct in zip(seeds.tolist(), right.tolist(), strict=True)]
    finally:
        for env in made:
            env.close()


class _Script:
    """Plays scripted conversations of ``env`` into token ids. Equal conversations are rendered once."""

    def __init__(self, env: ChatEnv, tokenizer: PreTrainedTokenizerFast) -> None:
        self._env = env
        self._tokenizer: Any = tokenizer
        self._renderer: Renderer | None = None
        self._rendered: dict[str, Demonstration] = {}

    async def play(self, seed: int, correct: bool) -> Demonstration:
        _, info = await self._env.areset(seed=seed)
        if self._renderer is None:
            self._renderer = Renderer(self._tokenizer, info["tools"])
        messages = self._env.demonstrate(correct)
        key = _CALL_ID.sub("", json.dumps(messages, sort_keys=True))
        if key not in self._rendered:
            ids, mask = self._renderer.conversation(messages)
            if not any(mask[1:]):
                raise ConfigError(f"warmup: a demonstration of {type(self._env).__name__} has no assistant message; demonstrate() must end with one")
            self._rendered[key] = (ids, [0, *mask[1:]])
        return self._rendered[key]


def _step(policy: Policy, demonstrations: list[Demonstration], tokens_per_micro_batch: int) -> float:
    """Accumulates the gradient of the mean cross-entropy and returns its value; every rank computes its share of the demonstrations."""
    ranks = policy.ranks
    flat, plan = supervised(demonstrations)
    if ranks.num > 1:
        flat = flat.only(np.array(deal([len(ids) for ids, _ in demonstrations], ranks.num)[ranks.rank], np.int64))
    batches = pack(flat, plan, tokens_per_micro_batch, policy.device)
    batches += [idle(policy.device) for _ in range(ranks.largest([len(batches)])[0] - len(batches))]
    total = torch.zeros((), device=policy.device)
    for place, batch in enumerate(batches, 1):
        x, _ = policy.logprobs(batch, temperature=1.0)
        loss = -(x * batch.tokens.agg).sum()
        policy.backward(loss, last=place == len(batches))
        total += loss.detach()
    return float(torch.stack(ranks.gather(total[None])).sum())


def supervised(demonstrations: list[Demonstration]) -> tuple[Flat, Plan]:
    """A batch whose every token weighs the same: one over their number."""
    lengths = np.array([len(ids) for ids, _ in demonstrations], np.int64)
    mask = np.concatenate([np.array(flags, bool) for _, flags in demonstrations])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    num = len(demonstrations)
    order = np.arange(num)
    counts = np.bincount(np.repeat(order, lengths)[mask], minlength=num).astype(np.int64)
    zeros: Any = np.zeros(num)
    trained = np.ones(int(counts.sum()), np.bool_)
    rows = Rows(offsets=np.concatenate([[0], np.cumsum(counts)]), mask=trained, row_trajectory=order, rewards=zeros, groups=order)
    plan = Plan(
        advantages=zeros,
        degenerate=zeros.astype(bool),
        shaped_rewards=zeros,
        mask=trained,
        row_counts=counts,
        row_advantage=zeros,
        row_weight=np.full(num, 1.0 / mask.sum()),
        staleness=None,
        skip=False,
    )
    token_ids = np.concatenate([np.array(ids, np.int32) for ids, _ in demonstrations])
    return Flat(rows, 1.0, order, offsets, token_ids, mask, np.zeros(len(token_ids), np.float32)), plan
