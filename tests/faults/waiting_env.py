"""test-faults/Waiting-v0: two turns, each answered after a lognormal time. Members of a group share the reset seed but not their luck."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from rollstream.envs.chat import ChatEnv, Message, Turn
from rollstream.envs.registry import register


class Waiting(ChatEnv):
    """Scored by the length of the last message. ``sigma`` is that of the lognormal time, ``longest_s`` its cut."""

    max_turns = 2

    def __init__(self, *, median_s: float = 0.01, sigma: float = 1.0, longest_s: float = 1.0) -> None:
        super().__init__()
        self.median_s, self.sigma, self.longest_s = median_s, sigma, longest_s
        self.turns = 0

    def start(self, task: Any) -> str:
        self.turns = 0
        return f"wait {task}"

    async def respond(self, message: Message) -> Turn:
        self.turns += 1
        await asyncio.sleep(min(self.longest_s, self.median_s * float(np.exp(self.sigma * np.random.default_rng().standard_normal()))))
        return Turn("more", reward=len(message["content"]) / 10 if self.turns == 2 else None, done=self.turns == 2)

    async def malformed_call(self, problem: str) -> Turn:
        return await self.respond({"role": "assistant", "content": problem})


register("test-faults/Waiting-v0", Waiting)
