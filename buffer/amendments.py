"""Amendments: what is said of a trajectory after its rows were stored, above all a score that comes later. Rows themselves never change.

An amendment names the row it is about (lineage, group, member, attempt; segment, or -1 for the whole trajectory), a ``column``, and a value. The column
``reward`` scores a trajectory that was appended without a reward; any other name is kept for whoever asks. The first amendment of a column counts: the same
one again changes nothing, another value is refused. On the disk:

    amendments/000001.arrows   Arrow IPC streams of :data:`AMENDMENTS`, frame by frame as they came, with the checksums of the stream's own frames
    ledger.sqlite              the same values with where they lie, in the transaction that acknowledges them

Should the machine lose power after the ledger reached the disk and before the log did, the log's part is written again from the ledger. How long they stay is
said in ``amendment_files``.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from ..errors import Corrupt, DataRefused, Refused
from . import wire
from .amendment_files import AmendmentFiles, recover_amendment_files, sealed_files
from .columns import aligned, frame_checksum, from_frame, to_frame
from .ledger import Ledger
from .log import Location, Log, segment_path
from .sealed import Sealed, SealedFile, file_checksum, sealed_path

logger = logging.getLogger(__name__)

AMENDMENTS_VERSION = 1
WHOLE = -1
"""Segment of an amendment that is about a whole trajectory."""
REWARD = "reward"

AMENDMENTS = pa.schema(
    [
        pa.field("lineage", pa.int16(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("member", pa.int16(), nullable=False),
        pa.field("segment", pa.int16(), nullable=False),
        pa.field("attempt", pa.int16(), nullable=False),
        pa.field("column", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("written_at", pa.float64(), nullable=False),
    ],
    metadata={"schema_version": str(AMENDMENTS_VERSION)},
)
"""One row per amendment. ``source`` says who made it, ``written_at`` when (Unix seconds)."""

AMENDMENTS_MESSAGE: bytes = AMENDMENTS.serialize().to_pybytes()
_COLUMN = re.compile(r"[a-z][a-z0-9_./-]{0,63}")
_FIELDS = "lineage, group_id, member, segment, attempt, column, value, source, written_at"
_RECHECKED = 2  # newest segments whose frames are verified at a start: what an interrupted sync may have left


class Amendment(NamedTuple):
    """One amendment; see :data:`AMENDMENTS`."""

    lineage: int
    group_id: int
    member: int
    segment: int
    attempt: int
    column: str
    value: float
    source: str
    written_at: float

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.column} of group {self.group_id} member {self.member} attempt {self.attempt}"


def encode_amendments(amendments: Sequence[Amendment]) -> pa.Buffer:
    """One frame that holds ``amendments``.

    Raises:
        DataRefused: a value that does not fit its column, or a column name that is none.

    """
    for amendment in amendments:
        if not _COLUMN.fullmatch(amendment.column):
            raise DataRefused(f"{amendment.column[:80]!r} is no name of a column to amend; use small letters, digits and _ . / -, such as judge/style")
    try:
        batch = pa.RecordBatch.from_pylist([amendment._asdict() for amendment in amendments], AMENDMENTS)
    except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
        raise DataRefused(f"amendments do not fit their columns: {error}") from error
    return to_frame(batch, schema=AMENDMENTS, schema_message=AMENDMENTS_MESSAGE)


def decode_amendments(frame: pa.Buffer, checksum: int) -> list[Amendment]:
    """The amendments of one frame.

    Raises:
        Corrupt: the bytes do not match their checksum or their schema.
        DataRefused: nulls, a column name that is none, a segment below -1.

    """
    batch = from_frame(frame, checksum, AMENDMENTS)
    if batch.num_rows == 0 or any(column.null_count for column in batch.columns):
        raise DataRefused("amendments without rows, or with nulls; each names its row, a column and a value")
    found = _amendments_of(batch)
    for amendment in found:
        if not _COLUMN.fullmatch(amendment.column) or amendment.segment < WHOLE:
            raise DataRefused(f"{amendment.name[:120]} has no proper column name, or segment {amendment.segment} below {WHOLE}")
    return found


def _amendments_of(batch: pa.RecordBatch) -> list[Amendment]:
    return [Amendment(*row.values()) for row in batch.to_pylist()]


class Amendable(Protocol):
    """The books, as far as amendments change them."""

    def amend(self, amendments: Sequence[Amendment], known: Callable[[Amendment], float | None]) -> list[Amendment]: ...  # noqa: D102 - as Scoring


class Amendments:
    """The log of amendments under ``folder``, open for appending by the buffer alone, and their table in the ledger."""

    def __init__(self, folder: Path, ledger: Ledger, *, segment_bytes: int) -> None:
        self._ledger = ledger
        self._log = Log(folder, segment_bytes=segment_bytes, schema_message=AMENDMENTS_MESSAGE)
        try:
            sealed = recover_amendment_files(folder, ledger)
            self.files = AmendmentFiles(folder, ledger)
            self._next_id = next(ledger.rows("SELECT ifnull(max(append_id), 0) FROM amendments"))[0] + 1
            self._recover(sealed)
            self.files.load()
        except BaseException:
            self._log.close()
            raise

    def _recover(self, sealed: set[int]) -> None:
        known = dict(self._ledger.rows("SELECT file, max(offset + size_bytes) FROM amendments GROUP BY file"))
        ends = {file: end for file, end in known.items() if file not in sealed}
        query = "SELECT DISTINCT append_id, file, offset, size_bytes, checksum FROM amendments WHERE file > ? ORDER BY append_id"
        found = self._ledger.rows(query, (max(ends, default=0) - _RECHECKED,))
        newest = [(row[0], Location(row[1], row[2], row[3], int(row[4], 16))) for row in found if row[1] not in sealed]
        self._log.start_after(max(known, default=0))
        for append_id in self._log.recover(ends, newest):
            rows = self._ledger.rows(f"SELECT {_FIELDS} FROM amendments WHERE append_id = ?", (append_id,))  # noqa: S608 - our own names
            frame = encode_amendments([Amendment(*row) for row in rows])
            location = self._log.append(frame, frame_checksum(frame))
            place = (location.segment, location.offset, location.size_bytes, f"{location.checksum:016x}", append_id)
            self._ledger.write("UPDATE amendments SET file = ?, offset = ?, size_bytes = ?, checksum = ? WHERE append_id = ?", place)
            logger.warning("event=amendments_written_again append=%d", append_id)
        self.flush()
        self._ledger.commit()

    def answer(self, message: wire.Amend, payload: Sequence[Any], books: Amendable) -> wire.Amended:
        """Takes up what a scorer sends; the answer may leave after the round's commit.

        Raises:
            Refused, Corrupt, DataRefused: nothing of it was taken.

        """
        if len(payload) != 1:
            raise Refused("malformed", f"an Amend has one record-batch frame, this one {len(payload)}")
        found = decode_amendments(aligned(payload[0].buffer), message.checksum)
        if len(found) != message.num_amendments:
            raise Refused("malformed", f"{message.num_amendments} amendments announced, {len(found)} found")
        new = books.amend(found, self.known)
        if new:
            self.store(new)
        return wire.Amended(len(new), len(found) - len(new))

    def known(self, amendment: Amendment) -> float | None:
        """The value that the first amendment of that column gave; None where there was none."""
        query = "SELECT value FROM amendments WHERE group_id = ? AND member = ? AND attempt = ? AND segment = ? AND column = ?"
        key = (amendment.group_id, amendment.member, amendment.attempt, amendment.segment, amendment.column)
        return next((value for (value,) in self._ledger.rows(query, key)), None)

    def store(self, amendments: Sequence[Amendment]) -> None:
        """Takes new amendments; they are durable after :meth:`flush` and the ledger's commit."""
        frame = encode_amendments(amendments)
        location = self._log.append(frame, frame_checksum(frame))
        place = (self._next_id, *location[:3], f"{location.checksum:016x}")
        self._next_id += 1
        for amendment in amendments:
            self._ledger.write("INSERT INTO amendments VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*amendment, *place))
            self.files.holds(location.segment, amendment.group_id, amendment.member)

    @property
    def first_open(self) -> int:
        """Files with a lower number are closed."""
        return self._log.first_open

    def cut(self) -> None:
        """Ends the open file: what comes goes into another."""
        self._log.cut()

    def flush(self) -> None:
        """Hands what was taken to the kernel. Raises what :meth:`Log.flush` raises."""
        self._log.flush()

    def sync(self) -> None:
        """Makes what was flushed survive power loss."""
        self._log.sync()

    def abandon(self) -> None:
        """Drops what was taken and not flushed."""
        self._log.abandon()

    def close(self) -> None:
        """Ends the open segment."""
        self._log.close()


class Place(NamedTuple):
    """Where an append of amendments was written."""

    append_id: int
    file: int
    offset: int
    size_bytes: int
    checksum: str


def places(ledger: Ledger) -> list[Place]:
    """Where every recorded append of amendments was written, in order."""
    return [Place(*row) for row in ledger.rows("SELECT DISTINCT append_id, file, offset, size_bytes, checksum FROM amendments ORDER BY append_id")]


def read_amendments(folder: Path, ledger: Ledger, recorded: Iterable[Place]) -> Iterator[tuple[int, list[Amendment] | str]]:
    """These appends of amendments from their files, original or sealed: the id of each, and its amendments or what is wrong with them.

    What retention removed meanwhile is left out; to be called outside a snapshot of the ledger.
    """
    for file, found in itertools.groupby(recorded, key=lambda place: place.file):
        yield from _read_file(folder, ledger, file, list(found))


def _read_file(folder: Path, ledger: Ledger, file: int, found: list[Place]) -> Iterator[tuple[int, list[Amendment] | str]]:
    path, sealed = segment_path(folder, file), None
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data, path = b"", sealed_path(folder, file)
        try:
            sealed = _whole(path, sealed_files(ledger).get(file))
        except (Corrupt, FileNotFoundError) as error:
            if next(ledger.rows("SELECT 1 FROM amendments WHERE file = ?", (file,)), None) is not None:
                yield from ((place.append_id, str(error)) for place in found)
            return
    for place in found:
        try:
            if sealed is None:
                yield place.append_id, decode_amendments(pa.py_buffer(data[place.offset : place.offset + place.size_bytes]), int(place.checksum, 16))
            else:
                yield place.append_id, _amendments_of(sealed.read(place.offset))
        except Exception as error:  # noqa: BLE001 - whatever a damaged file brings
            yield place.append_id, f"{path.name} at {place.offset}: {error}"


def _whole(path: Path, known: SealedFile | None) -> Sealed:
    """A sealed file that is the one the ledger recorded."""
    if known is None or file_checksum(path) != known.checksum:
        raise Corrupt(f"{path.name} is not what the ledger recorded")
    return Sealed(path, AMENDMENTS)


def recorded_amendments(ledger: Ledger) -> list[tuple[int, Amendment]]:
    """Every amendment the ledger records, in the order they came, with the append that brought it."""
    query = f"SELECT append_id, {_FIELDS} FROM amendments ORDER BY append_id, group_id, member, column"  # noqa: S608 - our own names
    return [(row[0], Amendment(*row[1:])) for row in ledger.rows(query)]
