"""Keeps the memory of one round for the next one's messages.

ZeroMQ allocates each message anew. By default glibc gives blocks of that size back to the kernel as soon as they are free, and gets them again page by page,
which costs more than receiving the bytes.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGEST_KEPT_BYTES = 32 * 2**20  # the most that glibc takes
_KEPT_BYTES = 64 * 2**20


def keep_freed_memory() -> None:
    """Lets this process keep what it frees, up to a bound; without effect where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
