"""The scorer: in the place of a learner it publishes one checkpoint, to be evaluated, and trains nothing."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from .. import models
from ..buffer import wire
from ..buffer.channels import publish_to
from ..buffer.client import LearnerClient
from ..buffer.curve import client_keys
from ..buffer.manifest import Manifest
from ..configs.schema import FolderModel
from ..errors import ConfigError
from .checkpoint import Checkpoint, read_checkpoint
from .evaluations import row_of
from .publisher import Publisher

if TYPE_CHECKING:
    from ..configs.run_folder import Run

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


def scored_checkpoint(model_folder: Path) -> Checkpoint:
    """The checkpoint whose policy ``model_folder`` holds, every byte of it checked: the one it lies in, or the one it was merged from.

    Raises :class:`CheckpointError` where it is damaged.
    """
    if model_folder.name == "model":
        return read_checkpoint(model_folder.parent)
    return read_checkpoint(model_folder.parents[3] / "checkpoints" / model_folder.name)


def score(run: Run, stop: threading.Event) -> None:
    """Has the checkpoint that ``run`` takes its model from evaluated once, and writes the result to the run's ``evaluations.jsonl``.

    Consumes: that checkpoint, every byte of it checked.
    Waits for: the end of its evaluation.
    Released by: the evaluators, or ``stop``.
    Produces: the version in the weights channel; one row.

    Raises :class:`CheckpointError` for a damaged checkpoint.
    """
    if not isinstance(run.config.model, FolderModel):
        raise ConfigError("a scorer takes its model from a checkpoint; start it with rollstream evaluate")
    folder = Path(run.config.model.path)
    checkpoint = scored_checkpoint(folder)
    model = models.load_policy(folder, device="cpu")
    publisher = Publisher(publish_to(run, run.config.evaluators().num), model, folder)
    try:
        publisher.publish(checkpoint.lineage, checkpoint.version, due=True, last=True)
        publisher.fence()
        kept = [wire.RetainedVersion(item.lineage, item.version, item.digest) for item in publisher.due() if isinstance(item, Manifest)]
        statement = wire.Retained(kept, [], publisher.newest)
        with LearnerClient(run.endpoint, run.run_id, "scorer", keys=client_keys(run)) as client:
            while not stop.wait(_LOOK_S):
                reply = client.retained(statement)
                if not reply.open:
                    run.evaluations_path.write_text("".join(json.dumps(row_of(one)) + "\n" for one in reply.closed), encoding="utf-8")
                    return
    finally:
        publisher.close()
