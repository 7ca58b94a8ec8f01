"""The learner's part in evaluations: it keeps the versions that are due, tells the buffer, and writes down what came out. Training never waits for one.

What is written, ``evaluations.jsonl`` and the ``eval/`` names in TensorBoard, follows the buffer's ledger: a start writes all of it again, so nothing is ever
there twice.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from ..buffer import wire
from ..buffer.manifest import Manifest

if TYPE_CHECKING:
    from ..configs.run_folder import Run
    from .gathered import GatheringPublisher
    from .publisher import Publisher
    from .tracker import Tracker

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""At most this often the buffer is told and asked while there is nothing new to tell."""
_FINISH_S = 0.1


class EvaluationBooks(Protocol):
    """Who leases evaluations: the buffer's client, or a recording of one."""

    def retained(self, statement: wire.Retained) -> wire.Evaluations: ...  # noqa: D102 - as LearnerClient


class Evaluations:
    """Evaluations of one run, as its learner sees them; without ``evaluation`` in the configuration it only publishes."""

    def __init__(self, run: Run, source: EvaluationBooks, publisher: Publisher | GatheringPublisher, tracker: Tracker) -> None:
        self._run = run
        self._settings = run.config.evaluation
        self._source = source
        self._publisher = publisher
        self._tracker = tracker
        self._kept: dict[tuple[int, int], wire.RetainedVersion] = {}
        self._open: list[wire.Evaluation] = []
        self._num_known = 0
        self._anew = True
        self._looked_at = float("-inf")

    def publish(self, lineage: int, version: int) -> None:
        """Publishes the weights held now, and has them kept where their version is due."""
        versions = self._run.config.learner.versions
        due = self._settings is not None and self._settings.is_due(version, versions)
        self.look(now=due)  # an evaluation that has just closed makes room
        self._publisher.publish(lineage, version, due=due, last=version == versions)

    def look(self, *, now: bool = False) -> None:
        """Tells the buffer which versions are kept and takes in what closed: where there is something to tell, ``now``, or once a second."""
        if self._settings is None:
            return
        newest = self._publisher.newest  # before what is due: that of the newest is then among it
        found = self._publisher.due()
        if not (found or now or time.monotonic() - self._looked_at >= _LOOK_S):
            return
        self._looked_at = time.monotonic()
        kept = [item for item in found if isinstance(item, Manifest)]
        self._kept |= {(item.lineage, item.version): wire.RetainedVersion(item.lineage, item.version, item.digest) for item in kept}
        skipped = [item for item in found if isinstance(item, wire.SkippedVersion)]
        for item in skipped:
            logger.warning("version=%d evaluation=skipped reason=%r", item.version, item.reason)
        reply = self._source.retained(wire.Retained(list(self._kept.values()), skipped, newest, self._num_known))
        self._open = reply.open
        wanted = {(evaluation.lineage, evaluation.version) for evaluation in reply.open}
        self._kept = {key: version for key, version in self._kept.items() if key in wanted}
        self._publisher.want(wanted)
        if reply.closed or self._anew:
            self._tracker.evaluated(self._run.evaluations_path, [row_of(evaluation) for evaluation in reply.closed], anew=self._anew)
            self._anew = False
        self._num_known += len(reply.closed)

    def finish(self, stop: threading.Event) -> None:
        """After the last version: waits for what is still evaluated, but no longer than ``evaluation.wait_s``."""
        if self._settings is None:
            return
        deadline = time.monotonic() + self._settings.wait_s
        self.look(now=True)
        while self._open and not stop.wait(_FINISH_S):
            if time.monotonic() > deadline:
                left = ", ".join(f"version {item.version}: {item.num_done} of {item.num_members}" for item in self._open)
                logger.warning("event=evaluation_unfinished wait_s=%g left=%r remedy=%r", self._settings.wait_s, left, "go on with --resume")
                return
            self.look(now=True)


def row_of(evaluation: wire.Evaluation) -> dict[str, Any]:
    """An evaluation as one object of ``evaluations.jsonl``."""
    row: dict[str, Any] = {"version": evaluation.version, "lineage": evaluation.lineage, "state": evaluation.state}
    return row | ({"reason": evaluation.reason} if evaluation.reason else {}) | evaluation.values
