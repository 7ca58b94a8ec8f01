"""The durable record of a run: Arrow IPC streams that only ever grow.

    stream/000001.parquet   a segment nobody trains from any more, sealed (see ``sealed``)
    stream/000002.arrows    schema message, then one record-batch message per append, byte for byte the frame that came over the wire

Each process start opens a new segment, and a segment that has reached its size is closed and followed by the next. Any Arrow reader opens a segment while it
grows and sees every whole append. Nothing is kept in memory: rows are read back by location, through a mapping that :meth:`Log.release` drops. A disk that is
full loses nothing: what was taken stays pending, and the next :meth:`Log.flush` goes on at the very byte.

The ledger says what a segment must hold. :meth:`Log.recover` cuts what was written but never recorded (nobody was told it was stored), and names what was
recorded but is no longer there (the machine lost power), so that the ledger can forget it.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from ..errors import Corrupt, DiskFull, RunFolderError, StreamError
from .columns import SCHEMA_MESSAGE, frame_checksum, from_frame, to_frame
from .page_cache import PageCache
from .sealed import Sealed, flush_file, sealed_path

logger = logging.getLogger(__name__)

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_MAX_PIECES = 512  # of one writev call; the kernel takes at most 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)


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

    def __init__(self, folder: Path, *, segment_bytes: int, schema_message: bytes = SCHEMA_MESSAGE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._schema_message = schema_message
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RunFolderError(f"{folder} is in use by another buffer; stop that run first") from None
        self._file: int | None = None
        self._file_segment = 0
        self._segment = max((int(path.stem) for path in folder.glob("*") if path.suffix in (".arrows", ".parquet")), default=0)
        self._offset: int | None = None
        self._pending: deque[tuple[int, memoryview]] = deque()
        self._unsynced: list[Path] = []
        self._num_written = 0
        self.page_cache = PageCache()
        """Of all that a buffer writes."""
        self._maps: dict[int, pa.MemoryMappedFile] = {}
        self._sealed: dict[int, Sealed] = {}

    # --- write ----------------------------------------------------------------------------------------------------------------------

    def append(self, frame: pa.Buffer, checksum: int) -> Location:
        """Takes one frame; it is in the log after the next :meth:`flush`."""
        if self._offset is not None and self._offset >= self._segment_bytes:
            self._end_segment()
        if self._offset is None:
            self._segment += 1
            self._take(self._schema_message)
            self._offset = len(self._schema_message)
        location = Location(self._segment, self._offset, frame.size, checksum)
        self._take(frame)
        self._offset += frame.size
        return location

    def cut(self) -> None:
        """Ends the open segment, if there is one: the next append begins another."""
        if self._offset is not None:
            self._end_segment()

    def flush(self) -> None:
        """Hands everything taken so far to the kernel: after this it survives the death of the process.

        Raises:
            DiskFull: the disk took no more; the rest stays pending, and nothing of this round may be acknowledged before a later flush succeeds.
            StreamError: the disk refused for another reason.

        """
        try:
            while self._pending:
                segment = self._pending[0][0]
                file = self._file_of(segment)
                pieces = (view for number, view in itertools.islice(self._pending, _MAX_PIECES) if number == segment)
                size_bytes = os.writev(file, list(pieces))
                self.page_cache.wrote(self.path(segment), self._num_written, size_bytes)
                self._written(size_bytes)
        except OSError as error:
            kind = DiskFull if error.errno in _FULL else StreamError
            path = self.path(self._pending[0][0])
            remedy = "free space there and the run goes on" if kind is DiskFull else "mend the disk and run again with --resume"
            raise kind(f"cannot append to {path}: {error.strerror}; {remedy}") from error

    def sync(self) -> None:
        """Makes every flushed append survive power loss."""
        self.flush()
        for path in self._unsynced:
            with contextlib.suppress(FileNotFoundError):  # closed and sealed since: its copy was flushed before it went
                flush_file(path)
        os.fsync(self._lock)
        self._unsynced = [self.path(self._file_segment)] if self._file is not None else []

    def abandon(self) -> None:
        """Drops what was taken and not flushed, and writes no more: the next start cuts a torn tail."""
        self._pending.clear()
        self._offset = None

    def close(self) -> None:
        """Ends the open segment and lets another process append."""
        try:
            if self._offset is not None:
                self._end_segment()
            self.flush()
        finally:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self.page_cache.close()
            self.release()
            os.close(self._lock)

    def start_after(self, segment: int) -> None:
        """The next segment gets a higher number than this one, which may be on the disk no more."""
        self._segment = max(self._segment, segment)

    @property
    def first_open(self) -> int:
        """Segments with a lower number are closed: nothing is ever added to them."""
        return self._segment + (self._offset is None)

    def path(self, segment: int) -> Path:
        """File of a segment, as long as it is not sealed."""
        return segment_path(self.folder, segment)

    def _take(self, data: pa.Buffer | bytes) -> None:
        self._pending.append((self._segment, memoryview(data).cast("B")))

    def _end_segment(self) -> None:
        self._take(_END_OF_STREAM)
        self._offset = None

    def _file_of(self, segment: int) -> int:
        """The file to write to; the one before it is closed, since all of it was written."""
        if self._file is None or self._file_segment != segment:
            path = self.path(segment)
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            if self._file is not None:
                os.close(self._file)
            self._file, self._file_segment, self._num_written = opened, segment, 0
            self._unsynced.append(path)
            self.page_cache.begin(segment)
        return self._file

    def _written(self, size_bytes: int) -> None:
        self._num_written += size_bytes
        while size_bytes:
            segment, view = self._pending[0]
            if size_bytes < len(view):
                self._pending[0] = (segment, view[size_bytes:])
                return
            self._pending.popleft()
            size_bytes -= len(view)

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
        if self.is_sealed(location.segment):
            return self._read_sealed(location)
        try:
            return from_frame(self.frame(location), location.checksum)
        except Corrupt as error:
            raise Corrupt(
                f"{self.path(location.segment)} at {location.offset}: {error}; `rollstream audit` tells the extent, "
                "train --resume --fork goes on without these rows"
            ) from error

    def is_sealed(self, segment: int) -> bool:
        """Whether a segment is no longer there as it was written, so that :meth:`frame` cannot give its bytes and :meth:`read` decodes them."""
        return segment not in self._maps and not self.path(segment).exists()

    def _read_sealed(self, location: Location) -> pa.RecordBatch:
        segment = location.segment
        if segment not in self._sealed:
            self._sealed[segment] = Sealed(sealed_path(self.folder, segment))
        frame = to_frame(self._sealed[segment].read(location.offset))  # a slice of a row group becomes a batch of its own
        return from_frame(frame, frame_checksum(frame))

    def release(self) -> None:
        """Drops the mappings, so that what was read does not stay resident; views already handed out stay valid."""
        self._maps.clear()
        self._sealed.clear()

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


def refuse_without_ledger(folder: Path, ledger_path: Path) -> None:
    """For a ledger that is not there, or holds nothing: refuses to begin one where the log in ``folder`` holds what the lost one knew, all of it to be cut.

    Raises :class:`RunFolderError`.
    """
    if num := sum(path.suffix in (".arrows", ".parquet") for path in folder.glob("*")):
        raise RunFolderError(
            f"{ledger_path} is missing or empty, but {folder} holds {num} segments that it knew; put back a copy of it, or start a new run with model.path "
            "at checkpoints/vNNNNNN/model"
        )


def segment_path(folder: Path, segment: int) -> Path:
    """File of a segment of the log in ``folder``."""
    return folder / f"{segment:06d}.arrows"
