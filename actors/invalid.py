"""The guard against environments that fail too often: counted, and above a bound the run stops with the reasons."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from ..errors import EnvError

if TYPE_CHECKING:
    from ..buffer.types import Trajectory

WINDOW = 100
"""Latest episodes over which the share is taken; fewer say nothing, unless they are the first and all failed."""
FIRST = 16
"""First episodes of an actor that must not all fail."""


class InvalidShare:
    """Share of failed episodes among the latest ``WINDOW``, and how many there were in all."""

    def __init__(self, bound: float) -> None:
        self.num_episodes = 0
        self.num_invalid = 0
        self._bound = bound
        self._latest: deque[tuple[str, str] | None] = deque(maxlen=WINDOW)

    def count(self, trajectory: Trajectory) -> None:
        """Counts one finished episode.

        Raises :class:`EnvError` where the share is above the bound, naming the reasons and the most frequent error.
        """
        failed = trajectory.status == "failed"
        self.num_episodes += 1
        self.num_invalid += failed
        self._latest.append((trajectory.stop_reason, trajectory.error) if failed else None)
        failures = [failure for failure in self._latest if failure is not None]
        none_yet = self.num_episodes == self.num_invalid == FIRST and self._bound < 1
        if not none_yet and (len(self._latest) < WINDOW or len(failures) <= self._bound * WINDOW):
            return
        reasons = ", ".join(f"{num} {reason}" for reason, num in Counter(reason for reason, _ in failures).most_common())
        text, num = Counter(error for _, error in failures).most_common(1)[0]
        which = f"{FIRST} of the first {FIRST}" if none_yet else f"{len(failures)} of the last {WINDOW}"
        raise EnvError(
            f"{which} episodes of {trajectory.env_id} failed ({reasons}); "
            f"actors.max_invalid_share {self._bound:g} allows fewer; the most frequent error ({num}×): {text}"
        )
