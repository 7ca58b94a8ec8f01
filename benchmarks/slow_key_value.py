"""The key-value task behind a slow tool: what the asynchronous benchmark plays.

Registers ``bench/SlowKeyValue-v0``; use it with ``imports: [benchmarks/slow_key_value.py]``. Every episode waits once, before its first reply, for a
lognormal time given by its median and its 99th percentile in seconds. The time depends on the reset seed and on nothing else that training touches.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np

from rollstream.envs.chat import Message
from rollstream.envs.key_value import KeyValue
from rollstream.envs.registry import register

STANDARD_NORMAL_P99 = 2.3263478740408408


class SlowKeyValue(KeyValue):
    """Key-value lookup whose first reply takes a lognormal time."""

    def __init__(self, *, median_s: float = 0.3, p99_s: float = 3.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.median_s = median_s
        self.sigma = math.log(p99_s / median_s) / STANDARD_NORMAL_P99
        self.waited = False

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode; its wait is still ahead."""
        self.waited = False
        return await super().areset(seed=seed, options=options)

    async def astep(self, action: Message | str) -> Any:
        """Wait before the first reply, then answer as the fast environment does."""
        if not self.waited:
            self.waited = True
            # Members of a group share the reset seed but not their luck with the tool.
            await asyncio.sleep(self.median_s * math.exp(self.sigma * np.random.default_rng().standard_normal()))
        return await super().astep(action)


register("bench/SlowKeyValue-v0", SlowKeyValue)
