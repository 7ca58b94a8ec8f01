"""Bounds that environments and the buffer share."""

from __future__ import annotations

MAX_TASKS = 10_000_000
"""Of one environment that says how many it has: each epoch goes through all of them, in an order drawn anew."""
