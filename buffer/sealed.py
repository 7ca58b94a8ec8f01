"""Sealed segments: Parquet that any reader opens, in which rows are still found by the location they were stored at.

    stream/000001.parquet   the rows of 000001.arrows in their order, zstd, row groups of whole appends, a checksum in every page

Amendments are sealed in the same way, with their own ``schema``.

The footer holds an index: (offset, number of rows) of each append, in order. :func:`seal` writes under a temporary name, compares every row with the
original, flushes to the disk and takes the name by one rename; the original stays until the ledger knows of the copy (see ``sealer``).
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import bisect
import itertools
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ..errors import Corrupt
from .columns import SCHEMA, from_frame

_INDEX = b"rollstream.appends"
_ROW_GROUP_BYTES = 8 * 2**20
TEMPORARY = ".parquet.tmp"


class StoredAppend(NamedTuple):
    """One append of a segment, as the ledger knows it."""

    append_id: int
    offset: int
    size_bytes: int
    checksum: int
    num_rows: int


class SealedFile(NamedTuple):
    """What the ledger keeps of a sealed segment: the last append in it, the size and the xxh3-64 of the file, its rows."""

    segment: int
    last_append_id: int
    size_bytes: int
    checksum: str
    num_rows: int


def sealed_path(folder: Path, segment: int) -> Path:
    """File of a sealed segment of the log in ``folder``."""
    return folder / f"{segment:06d}.parquet"


# --- write --------------------------------------------------------------------------------------------------------------------------


def seal(source: Path, target: Path, appends: Sequence[StoredAppend], cancelled: threading.Event, schema: pa.Schema = SCHEMA) -> SealedFile | None:
    """Writes the recorded ``appends`` of the segment ``source`` as Parquet to ``target``; None where ``cancelled`` was set first.

    Raises:
        Corrupt: the segment no longer holds what was stored, or reading back gave other rows.
        OSError: the disk refused; nothing is left behind.

    """
    temporary = target.with_name(target.stem + TEMPORARY)
    try:
        if not _write(source, temporary, appends, cancelled, schema) or not _compare(source, temporary, appends, cancelled, schema):
            return None
        checksum = file_checksum(temporary)
        for path in (temporary, temporary.parent):
            flush_file(path)
        size_bytes = temporary.stat().st_size
        temporary.rename(target)
        flush_file(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return SealedFile(int(target.stem), appends[-1].append_id, size_bytes, checksum, sum(append.num_rows for append in appends))


def _write(source: Path, temporary: Path, appends: Sequence[StoredAppend], cancelled: threading.Event, plain: pa.Schema) -> bool:
    index = json.dumps([(append.offset, append.num_rows) for append in appends])
    schema = plain.with_metadata({**plain.metadata, _INDEX: index})
    with (
        pa.OSFile(str(temporary), "wb") as sink,
        pq.ParquetWriter(sink, schema, compression="zstd", compression_level=3, write_page_checksum=True, use_compliant_nested_type=False) as writer,
    ):
        for batches in _row_groups(source, appends, plain):
            if cancelled.is_set():
                return False
            table = pa.Table.from_batches(batches, plain).replace_schema_metadata(schema.metadata)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    return True


def _compare(source: Path, temporary: Path, appends: Sequence[StoredAppend], cancelled: threading.Event, schema: pa.Schema) -> bool:
    sealed = Sealed(temporary, schema)
    for number, batches in enumerate(_row_groups(source, appends, schema)):
        if cancelled.is_set():
            return False
        stored, found = pa.Table.from_batches(batches, schema), sealed.row_group(number)
        # the second comparison is for values that are not numbers, which equal nothing
        if not stored.equals(found) and repr(stored.to_pylist()) != repr(found.to_pylist()):
            raise Corrupt(f"{temporary.name}: row group {number} read back differs from {source.name}; the segment stays as it is")
        sealed.release()
    return True


def _row_groups(source: Path, appends: Sequence[StoredAppend], schema: pa.Schema) -> Iterator[list[pa.RecordBatch]]:
    """Whole appends, checked, about eight megabytes at a time."""
    mapped = pa.memory_map(str(source))
    batches: list[pa.RecordBatch] = []
    size_bytes = 0
    for append in appends:
        mapped.seek(append.offset)
        batches.append(from_frame(mapped.read_buffer(append.size_bytes), append.checksum, schema))
        size_bytes += append.size_bytes
        if size_bytes >= _ROW_GROUP_BYTES:
            yield batches
            batches, size_bytes = [], 0
    if batches:
        yield batches


def flush_file(path: Path) -> None:
    """Makes a file, or the names in a folder, survive power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- read ---------------------------------------------------------------------------------------------------------------------------


class Sealed:
    """A sealed segment, open for reading.

    Raises:
        Corrupt: there is no such file, or it is not a sealed segment.

    """

    def __init__(self, path: Path, schema: pa.Schema = SCHEMA) -> None:
        self.path = path
        self._schema = schema
        try:
            self._file = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
            self.index: list[tuple[int, int]] = [(offset, num_rows) for offset, num_rows in json.loads(self._file.metadata.metadata[_INDEX])]
        except FileNotFoundError:
            raise Corrupt(
                f"{path} is gone: its rows were removed by retention (buffer.keep_gb), or by hand; only what came later can be read, so go on from a newer "
                "checkpoint, or with train --resume --fork, which plays anew what is lost"
            ) from None
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{path} is not a sealed segment: {error}; run `rollstream audit` for the extent") from error
        starts = [0, *itertools.accumulate(num_rows for _, num_rows in self.index)]
        self._places = {offset: (start, num_rows) for (offset, num_rows), start in zip(self.index, starts, strict=False)}
        sizes = (self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups))
        self._starts = [0, *itertools.accumulate(sizes)]
        self._tables: dict[int, pa.Table] = {}

    @property
    def num_row_groups(self) -> int:
        """How many row groups it has."""
        return self._file.num_row_groups

    def read(self, offset: int) -> pa.RecordBatch:
        """The rows of the append that was stored at ``offset``; a row group that was decoded is kept until :meth:`release`.

        Raises:
            Corrupt: a page does not match its checksum, or nothing was stored there.

        """
        if offset not in self._places:
            raise Corrupt(f"{self.path} holds no append stored at {offset}; run `rollstream audit` for the extent")
        start, num_rows = self._places[offset]
        number = bisect.bisect_right(self._starts, start) - 1
        if number not in self._tables:
            self._tables[number] = self.row_group(number).combine_chunks()
        batches = self._tables[number].slice(start - self._starts[number], num_rows).to_batches()
        return pa.concat_batches(batches)

    def row_group(self, number: int) -> pa.Table:
        """One row group, in its schema.

        Raises:
            Corrupt: a page does not match its checksum.

        """
        try:
            table = self._file.read_row_group(number, use_threads=False)
            return table.replace_schema_metadata(self._schema.metadata).cast(self._schema)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Corrupt(f"{self.path} row group {number}: {error}; run `rollstream audit` for the extent") from error

    def release(self) -> None:
        """Drops the row groups that were decoded."""
        self._tables.clear()


def file_checksum(path: Path) -> str:
    """xxh3-64 of a whole file, sixteen hex digits."""
    hasher = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()
