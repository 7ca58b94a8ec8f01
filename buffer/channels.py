"""The weights channel of a run: where the learner publishes versions of the policy and actors find them. One protocol, two channels.

``shm`` (``weights``) is shared memory: the actors of one host read in place. ``files`` (``file_weights``) is a folder of the run: any host that shares its file
system reads. Bytes, manifest and digest of a version are the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ..configs.run_folder import Run
from .file_weights import FileReader, FileWriter
from .manifest import Manifest, WeightTensor
from .retention import Retention
from .weights import WeightsReader, WeightsWriter


class Publishing(Protocol):
    """The learner's end; there is one per run."""

    folder: Path
    retention: Retention
    """Versions kept for evaluations."""

    def write(self, lineage: int, version: int, tensors: Sequence[WeightTensor]) -> Manifest | None:
        """Makes ``tensors`` the current version; None, with nothing changed, while readers leave no room for it."""
        ...

    def expect(self, num_readers: int) -> None:
        """How many may read at once."""

    def close(self) -> None:
        """Removes the channel."""


class Subscription(Protocol):
    """An actor's end."""

    def poll(self) -> Manifest | None:
        """The current version, unless it is the one opened last."""
        ...

    def open(self, manifest: Manifest) -> AbstractContextManager[memoryview]:
        """Its bytes, proven to match the digest. Raises :class:`WeightsGone` where a newer version has replaced it, :class:`WeightsError`."""
        ...

    def close(self) -> None:
        """Lets go of everything."""


def publish_to(run: Run, num_readers: int) -> Publishing:
    """The channel that ``weights.channel`` names, for the learner. Raises :class:`WeightsError` where another writer lives."""
    retain = 0 if run.config.evaluation is None else run.config.evaluation.retain
    if run.config.weights.channel == "files":
        return FileWriter(run.weights_folder, retain)
    return WeightsWriter(run.weights_folder, num_readers, retain)


def subscribe_to(run: Run, name: str) -> Subscription:
    """The channel that ``weights.channel`` names, for the actor ``name``."""
    return FileReader(run.weights_folder, name) if run.config.weights.channel == "files" else WeightsReader(run.weights_folder)
