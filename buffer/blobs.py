"""Images and other media: bytes that trajectories name by digest."""

from __future__ import annotations

import re

_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether ``text`` is a sha256 in 64 lower-case hex digits."""
    return _DIGEST.fullmatch(text) is not None
