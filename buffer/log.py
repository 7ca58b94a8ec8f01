"""The durable record of a run: Arrow IPC streams that only ever grow.

    stream/000001.arrows    schema message, then one record-batch message per append, byte for byte the frame that came over the wire

Each process start opens a new segment, and a segment that has reached its size is closed and followed by the next. Any Arrow reader opens a segment while it
grows and sees every whole append. Nothing is kept in memory: rows are read back by location, through a mapping that :meth:`Log.release` drops.

The ledger says what a segment must hold. :meth:`Log.recover` cuts what was written but never recorded (nobody was told it was stored), and names what was
recorded but is no longer there (the machine lost power), so that the ledger can forget it.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from ..errors import Corrupt, RunFolderError, StreamError
from .columns import SCHEMA_MESSAGE, frame_checksum, from_frame

logger = logging.getLogger(__name__)

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_MAX_PIECES = 512  # of one writev call; the kernel takes at most 1024


class Location(NamedTuple):
    """Where one append lies: ``size_bytes`` at ``offset`` of segment file ``segment``, with its checksum."""

    segment: int
    offset: int
    size_bytes: int
    checksum: int


class Log:
    """The segments under ``folder``, open for appending by this one process.

    ``used_segments`` are those the ledger knows; the next one gets a higher number. ``segment_bytes`` is the size after which a segment is closed.

    Raises:
        RunFolderError: another process appends here.

    """

    def __init__(self, folder: Path, *, segment_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RunFolderError(f"{folder} is in use by another buffer; stop that run first") from None
        self._file: int | None = None
        self._segment = max((int(path.stem) for path in folder.glob("*.arrows")), default=0)
        self._offset = 0
        self._pending: list[pa.Buffer] = []
        self._unsynced: list[Path] = []
        self._maps: dict[int, pa.MemoryMappedFile] = {}

    # --- write ----------------------------------------------------------------------------------------------------------------------

    def append(self, frame: pa.Buffer, checksum: int) -> Location:
        """Takes one frame; it is in the log after the next :meth:`flush`."""
        if self._file is not None and self._offset >= self._segment_bytes:
            self._finish_segment()
        if self._file is None:
            self._open_segment()
        location = Location(self._segment, self._offset, frame.size, checksum)
        self._pending.append(frame)
        self._offset += frame.size
        return location

    def flush(self) -> None:
        """Hands everything taken so far to the kernel: after this it survives the death of the process.

        Raises:
            StreamError: the disk took no more; nothing of this round may be acknowledged.

        """
        if self._pending:
            pending, self._pending = self._pending, []
            self._write(pending)

    def sync(self) -> None:
        """Makes every flushed append survive power loss."""
        self.flush()
        for path in self._unsynced:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        os.fsync(self._lock)
        self._unsynced = [self.path(self._segment)] if self._file is not None else []

    def close(self) -> None:
        """Ends the open segment and lets another process append."""
        if self._file is not None:
            self._finish_segment()
        self.release()
        os.close(self._lock)

    def path(self, segment: int) -> Path:
        """File of a segment."""
        return segment_path(self.folder, segment)

    def _open_segment(self) -> None:
        self._segment += 1
        path = self.path(self._segment)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._unsynced.append(path)
        self._pending.append(pa.py_buffer(SCHEMA_MESSAGE))
        self._offset = len(SCHEMA_MESSAGE)

    def _finish_segment(self) -> None:
        self._pending.append(pa.py_buffer(_END_OF_STREAM))
        self.flush()
        assert self._file is not None
        os.close(self._file)
        self._file = None

    def _write(self, buffers: Sequence[pa.Buffer]) -> None:
        assert self._file is not None
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        try:
            while views:
                written = os.writev(self._file, views[:_MAX_PIECES])
                while views and written >= len(views[0]):
                    written -= len(views.pop(0))
                if written:
                    views[0] = views[0][written:]
        except OSError as error:
            raise StreamError(f"cannot append to {self.path(self._segment)}: {error.strerror}; free space there and run again with --resume") from error

    # --- read -----------------------------------------------------------------------------------------------------------------------

    def frame(self, location: Location) -> pa.Buffer:
        """The bytes of one append, as a view of the mapped segment.

        Raises:
            Corrupt: the segment ends before the append does.

        """
        mapped = self._maps.get(location.segment)
        if mapped is None or mapped.size() < location.offset + location.size_bytes:
            mapped = self._maps[location.segment] = pa.memory_map(str(self.path(location.segment)))
        if mapped.size() < location.offset + location.size_bytes:
            raise Corrupt(f"{self.path(location.segment)} ends at {mapped.size()} bytes, before the append of {location.size_bytes} bytes at {location.offset}")
        mapped.seek(location.offset)
        return mapped.read_buffer(location.size_bytes)

    def read(self, location: Location) -> pa.RecordBatch:
        """The rows of one append, checked; zero-copy.

        Raises:
            Corrupt: the bytes are no longer those that were stored.

        """
        try:
            return from_frame(self.frame(location), location.checksum)
        except Corrupt as error:
            raise Corrupt(f"{self.path(location.segment)} at {location.offset}: {error}; run `rollstream audit` for the extent") from error

    def release(self) -> None:
        """Drops the mappings, so that what was read does not stay resident; views already handed out stay valid."""
        self._maps.clear()

    # --- recover --------------------------------------------------------------------------------------------------------------------

    def recover(self, ends: dict[int, int], unsynced: Iterable[tuple[int, Location]]) -> list[int]:
        """Brings the segments to what the ledger recorded; gives the ids of appends that are lost.

        ``ends`` says where each segment ends by the ledger. ``unsynced`` are (append id, location), in order, of the appends that no sync covered when the last
        process ended: their bytes are checked, and what follows a segment's last good one is cut.
        """
        ends = dict(ends)
        lost: list[int] = []
        broken: set[int] = set()
        for append_id, location in unsynced:
            if location.segment not in broken and self._is_whole(location):
                continue
            if location.segment not in broken:
                broken.add(location.segment)
                ends[location.segment] = location.offset
            lost.append(append_id)
        for path in sorted(self.folder.glob("*.arrows")):
            self._cut(path, ends.get(int(path.stem), 0))
        self.release()
        if lost:
            logger.warning("event=log_shorter_than_ledger lost_appends=%d segments=%s", len(lost), sorted(broken))
        return lost

    def _is_whole(self, location: Location) -> bool:
        try:
            return frame_checksum(self.frame(location)) == location.checksum
        except (Corrupt, OSError):
            return False

    def _cut(self, path: Path, end: int) -> None:
        size = path.stat().st_size
        if end == 0:
            path.unlink()
        elif size > end and not (size == end + len(_END_OF_STREAM) and _tail(path, len(_END_OF_STREAM)) == _END_OF_STREAM):
            os.truncate(path, end)
        else:
            return
        logger.info("event=unrecorded_tail_cut segment=%s from_bytes=%d to_bytes=%d", path.name, size, end)


def _tail(path: Path, size_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(-size_bytes, os.SEEK_END)
        return file.read()


def segment_path(folder: Path, segment: int) -> Path:
    """File of a segment of the log in ``folder``."""
    return folder / f"{segment:06d}.arrows"
