"""Reading rows and images from the files of a run, beside the buffer that writes them.

A segment that is sealed while it is looked for is found in its sealed form.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from ..configs.run_folder import Run
from ..errors import Corrupt
from .blob_store import blob_path
from .columns import from_frame
from .log import Location, segment_path
from .sealed import Sealed, sealed_path


class LogFiles:
    """The segments of the log in ``folder``, as they were written or sealed. One file is kept open at a time; rows that were read stay valid without it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mapped: dict[int, pa.MemoryMappedFile] = {}
        self._sealed: dict[int, Sealed] = {}

    def read(self, location: Location) -> pa.RecordBatch:
        """The rows of one append, checked; of an unsealed segment they are views of the file's pages.

        Raises:
            Corrupt: they are damaged or gone.

        """
        path = segment_path(self.folder, location.segment)
        try:
            mapped = self._map(path, location)
        except FileNotFoundError:
            if location.segment not in self._sealed:
                self._sealed = {location.segment: Sealed(sealed_path(self.folder, location.segment))}
            return self._sealed[location.segment].read(location.offset)
        mapped.seek(location.offset)
        return from_frame(mapped.read_buffer(location.size_bytes), location.checksum)

    def _map(self, path: Path, location: Location) -> pa.MemoryMappedFile:
        mapped = self._mapped.get(location.segment)
        if mapped is None or mapped.size() < location.offset + location.size_bytes:  # it may have grown since
            mapped = pa.memory_map(str(path))
            if mapped.size() < location.offset + location.size_bytes:
                raise Corrupt(f"{path} ends at {mapped.size()} bytes, before what was recorded; run `rollstream audit` for the extent")
            self._mapped = {location.segment: mapped}
        return mapped


class RunFiles:
    """What a learner beside the buffer reads itself: rows from the log in ``stream_folder``, images from ``blobs_folder``."""

    def __init__(self, stream_folder: Path, blobs_folder: Path) -> None:
        self.log = LogFiles(stream_folder)
        self._blobs_folder = blobs_folder

    def blobs(self, digests: Iterable[str]) -> dict[str, bytes]:
        """The bytes of those of these blobs that are there, to be checked against their digests."""
        found: dict[str, bytes] = {}
        for digest in digests:
            with contextlib.suppress(FileNotFoundError):
                found[digest] = blob_path(self._blobs_folder, digest).read_bytes()
        return found


def local_files(run: Run) -> RunFiles | None:
    """The files of ``run`` where the buffer writes them on this very machine; else None."""
    return RunFiles(run.stream_folder, run.blobs_folder) if run.is_local else None
