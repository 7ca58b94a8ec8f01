"""One event loop per process, on its own thread: where the sync facade of an environment runs its coroutines.

Keyed by process id, since a thread does not survive a fork: a forked child gets a loop of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_lock = threading.Lock()
_loops: dict[int, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs ``coroutine`` to its end on this process's loop and returns its result; usable with or without a running loop around it.

    Raises:
        RuntimeError: called on the loop's own thread, where waiting would never end.

    """
    loop, thread = _loop()
    if threading.current_thread() is thread:
        coroutine.close()
        raise RuntimeError("reset() and step() of an environment cannot be called inside another environment's method; await areset() and astep() there")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    pid = os.getpid()
    found = _loops.get(pid)
    if found is None:
        with _lock:
            found = _loops.get(pid)
            if found is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="rollstream-envs", daemon=True)
                thread.start()
                found = _loops[pid] = (loop, thread)
    return found


def _close() -> None:
    """Ends this process's loop; loops of a parent process are not ours to close."""
    loop, thread = _loops.pop(os.getpid(), (None, None))
    if loop is not None and thread is not None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=5)
        if not thread.is_alive():
            loop.close()


def _after_fork() -> None:
    """A lock held by another thread at the moment of the fork would stay held in the child for ever."""
    global _lock
    _lock = threading.Lock()


atexit.register(_close)
os.register_at_fork(after_in_child=_after_fork)
