"""Reading a run's stream from its files: rows wherever they lie, and batches as they were recorded.

Reads only, also beside a live buffer: a segment that is sealed while it is looked for is found in its sealed form, and one that retention removes meanwhile is
known to be removed, not damaged: the ledger says so before the file goes.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import pyarrow as pa

from ..errors import ConfigError, Corrupt, RunFolderError
from .columns import Rows, decode, with_reward
from .gather import committed, places
from .header import Entry, Member, assemble, entries
from .ledger import Ledger
from .log import Location, refuse_without_ledger
from .log_files import LogFiles
from .sealed import sealed_path
from .types import Batch, Trajectory


class Segments:
    """The segments in ``folder``, of which retention may remove some at any time."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder = folder
        self._ledger = ledger
        self._files = LogFiles(folder)

    def is_removed(self, segment: int) -> bool:
        """Whether retention removed a segment by now; to be asked outside a snapshot of the ledger."""
        return next(self._ledger.rows("SELECT removed FROM segments WHERE segment = ?", (segment,)), (0,))[0] == 1

    def read(self, location: Location) -> pa.RecordBatch | None:
        """The rows of one append, checked; None where retention removed them, if only at this very moment.

        Raises:
            Corrupt: they are damaged or gone.

        """
        try:
            return self._files.read(location)
        except Corrupt:
            if self.is_removed(location.segment):
                return None
            raise

    def open_sealed(self, segment: int) -> BinaryIO | None:
        """A sealed segment's file, which stays readable whatever becomes of its name; None where retention removed it.

        Raises:
            Corrupt: it is gone.

        """
        path = sealed_path(self.folder, segment)
        try:
            return path.open("rb")
        except FileNotFoundError:
            if self.is_removed(segment):
                return None
            raise Corrupt(f"{path} is gone; run `rollstream audit` for the extent") from None


def open_ledger(folder: Path) -> Ledger:
    """The ledger of the run in ``folder``, for reading.

    Raises:
        RunFolderError: there is none, or it was lost.

    """
    path, log_folder = folder / "ledger.sqlite", folder / "stream"
    if not path.is_file():
        refuse_without_ledger(log_folder, path)
        raise RunFolderError(f"{folder} holds no ledger.sqlite: nothing was streamed there yet")
    return Ledger(path, None, read_only=True, log_folder=log_folder)


class Recorded:
    """The recorded batches of one lineage's history (None is the current one) of the run in ``folder``, open for reading; a context manager.

    Raises:
        RunFolderError: there is no ledger.
        ConfigError: there is no such lineage.

    """

    def __init__(self, folder: Path, lineage: int | None = None) -> None:
        self._ledger = open_ledger(folder)
        self._segments = Segments(folder / "stream", self._ledger)
        self.lineages = self._ledger.lineages()
        self.lineage = self.lineages.current if lineage is None else lineage
        if self.lineage not in self.lineages:
            self._ledger.close()
            raise ConfigError(f"lineage {lineage} was never begun: the newest is {self.lineages.current}, counted from 0")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ledger.close()

    def batch(self, version: int) -> Batch:
        """The batch that made ``version``, as the learner was served it.

        Raises:
            ConfigError: no such batch was recorded, or retention removed rows of it.
            Corrupt: its rows are damaged.

        """
        with self._ledger.snapshot():
            found = self._ledger.batch(self.lineage, version)
            if found is None:
                raise ConfigError(
                    f"version {version} of lineage {self.lineage} has no recorded batch: there are {self._ledger.last_batch(self.lineage)}, counted from 1"
                )
            members = self._ledger.members_of(found.groups)
            rewards = {(row.group_id, row.member): row.reward for row in members}
            appends = places(self._ledger, members)
            shared = {other: self.lineages.common(other, found.lineage) for other in range(self.lineages.current + 1) if other != found.lineage}
        trajectories: list[Trajectory] = []
        described: dict[Member, Entry] = {}
        for location, keys, _ in appends:
            batch = self._segments.read(location)
            if batch is None:
                raise ConfigError(f"the rows of version {version}'s batch were removed by retention (buffer.keep_gb); ask for a newer version")
            rows = committed(batch, set(keys))
            trajectories.extend(decode(rows))
            described |= entries(Rows(rows))
        described = {key: entry if entry.reward is not None else entry._replace(reward=rewards[key]) for key, entry in described.items()}
        trajectories = [with_reward(trajectory, rewards[trajectory.key.group_id, trajectory.key.member]) for trajectory in trajectories]
        place = {group_id: index for index, group_id in enumerate(found.groups)}
        trajectories.sort(key=lambda trajectory: (place[trajectory.key.group_id], trajectory.key.member))
        header = assemble(described, found.groups, shared)
        return Batch(found.lineage, version, tuple(found.groups), tuple(trajectories), frozenset(found.withheld), True, header)

    def digest(self, version: int) -> str | None:
        """The recorded digest of a version's weights; None where it was never published."""
        return self._ledger.digest(self.lineage, version)
