"""The one door to Weights & Biases: the rows of ``metrics.jsonl``, and evaluations, under the same names over the policy version.

A thread of its own does everything: starting a run there may take a minute and sending a row may fail, and neither may hold up or end the training. What
goes wrong is told once, and from then on the rows are in ``metrics.jsonl`` and TensorBoard only. A resumed run goes on under its run id; versions that
are trained again are sent again, with equal values. A fork, whose versions mean something else, gets an id of its
own.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from typing import Any

from ..configs.checks import check_tracking
from ..configs.run_folder import Run
from ..configs.schema import Wandb

logger = logging.getLogger(__name__)

MAX_WAITING = 100_000
"""Rows kept for a start that takes long."""
CLOSE_S = 20.0
"""How long the end of a run waits for what was not sent yet: less than a role is given to stop in."""


class WandbTracker:
    """Sends rows to one run of Weights & Biases. ``mode: offline`` writes them below ``runs/NAME/wandb``, for ``wandb sync`` later.

    Raises :class:`MissingExtra` where the library is not installed; nothing after that raises.
    """

    def __init__(self, settings: Wandb, run: Run, lineage: int = 0) -> None:
        check_tracking(run.config)
        self._settings, self._run = settings, run
        self._suffix = f"-{lineage}" if lineage else ""
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MAX_WAITING)
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def row(self, version: int, values: Mapping[str, float]) -> None:
        """Hands the row of ``version`` to the thread."""
        if self._failed.is_set():
            return
        try:
            self._rows.put_nowait((version, dict(values)))
        except queue.Full:
            self._give_up(f"{MAX_WAITING} rows are waiting to be taken")

    def close(self) -> None:
        """Waits a little for rows on their way, and ends the run over there."""
        if not self._failed.is_set():
            try:
                self._rows.put_nowait(None)
            except queue.Full:
                self._give_up(f"{MAX_WAITING} rows are waiting to be taken")
        self._thread.join(CLOSE_S)
        if self._thread.is_alive() and not self._failed.is_set():
            self._give_up(f"it took longer than {CLOSE_S:g} s to send what was waiting")

    def _work(self) -> None:
        try:
            import wandb

            started = self._start()
            started.define_metric("version")
            started.define_metric("*", step_metric="version")  # steps of its own: an evaluation comes after later versions, and theirs may not fall
            while (item := self._rows.get()) is not None:
                version, values = item
                started.log({"version": version, **values})
            started.finish()
            wandb.teardown()  # finishing returns before its process has written everything
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self._give_up(" ".join(str(error).split()) or type(error).__name__)

    def _start(self) -> Any:
        import wandb

        quiet = wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True, finish_timeout=CLOSE_S * 0.75)
        return wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            mode=self._settings.mode,
            id=self._run.run_id + self._suffix,
            name=self._run.config.name + self._suffix,
            resume="allow",
            dir=str(self._run.folder),
            config=self._run.config.model_dump(mode="json"),
            settings=quiet,
        )

    def _give_up(self, reason: str) -> None:
        """Says once that rows no longer go there, and why."""
        if not self._failed.is_set():
            self._failed.set()
            logger.warning("wandb=off mode=%s reason=%s rows_are_in=%s", self._settings.mode, reason, self._run.metrics_path)
