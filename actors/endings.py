"""What an actor says about how its episodes end: the first failure of each kind at once, and once that most are cut for length."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..buffer.types import Trajectory

logger = logging.getLogger(__name__)

MAX_KINDS = 20
"""Kinds of failure that are logged; texts that hold a changing value would otherwise fill the disk."""
LENGTH_AFTER = 32
"""Episodes after which it is told that more than half were cut for length."""


class Endings:
    """Counts the endings of one actor's episodes and warns where they tell of something to change."""

    def __init__(self) -> None:
        self._kinds: set[tuple[str, str]] = set()
        self._num_played = 0
        self._num_cut = 0
        self._told_length = False

    def failed(self, error: Exception, stop_reason: str, env_id: str) -> None:
        """Logs the first failure of its kind, with the trace of the user's code where there is one."""
        kind = (stop_reason, str(error))
        if kind in self._kinds or len(self._kinds) >= MAX_KINDS:
            return
        self._kinds.add(kind)
        last = " further_kinds=not_logged" if len(self._kinds) == MAX_KINDS else ""
        logger.warning(
            "episode=failed status=failed stop_reason=%s env=%s error=%s%s",
            stop_reason,
            env_id,
            json.dumps(" ".join(str(error).split()), ensure_ascii=False),
            last,
            exc_info=error.__cause__,
        )

    def count(self, trajectory: Trajectory) -> None:
        """Counts one finished episode; warns once where more than half of those that did not fail were cut for length."""
        if trajectory.status == "failed":
            return
        self._num_played += 1
        self._num_cut += trajectory.stop_reason == "length"
        if self._told_length or self._num_played < LENGTH_AFTER or self._num_cut * 2 <= self._num_played:
            return
        self._told_length = True
        logger.warning(
            "episodes=cut_for_length num=%d of=%d remedy=%s",
            self._num_cut,
            self._num_played,
            json.dumps("raise actors.sampling.max_trajectory_tokens, or lower actors.sampling.max_turn_tokens so that more turns fit"),
        )
