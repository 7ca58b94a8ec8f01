"""How long amendments stay, and in which form: as long as the rows they are about, and in theirs.

    amendments/000001.parquet   sealed, as the stream is, with the segment that holds the newest row it is about
    amendments/000002.arrows    as the amendments came

A file is ended when a segment of the stream is sealed, so files are about as many rows as segments hold. It is removed once retention has removed every row it
is about; the ledger forgets its amendments then. A reward that came later stays: the ledger keeps it with its member.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from ..errors import Corrupt
from .ledger import Ledger
from .log import segment_path
from .sealed import TEMPORARY, SealedFile, StoredAppend, seal, sealed_path

logger = logging.getLogger(__name__)


class AmendmentFiles:
    """The files under ``folder``, as the buffer's loop knows them. What changes is written to the ledger's open transaction."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder = folder
        self._ledger = ledger
        self._newest: dict[int, int] = {}
        """By file, the append of the newest row that it is about."""
        self._sealed = set(sealed_files(ledger))

    def load(self) -> None:
        """Takes up what the ledger says of every file; reads every amendment, so it is for the start."""
        newest = "SELECT a.file, ifnull(max(m.append_id), 0) FROM amendments a LEFT JOIN members m USING (group_id, member) GROUP BY a.file"
        self._newest = dict(self._ledger.rows(newest))

    def holds(self, file: int, group_id: int, member: int) -> None:
        """An amendment of that member was written to a file."""
        append_id = next(self._ledger.rows("SELECT append_id FROM members WHERE group_id = ? AND member = ?", (group_id, member)), (0,))[0]
        self._newest[file] = max(append_id, self._newest.get(file, 0))

    def unsealed(self, before: int) -> dict[int, int]:
        """Files with a lower number than ``before`` that are not sealed, with the append of the newest row that each is about."""
        return {file: newest for file, newest in self._newest.items() if file < before and file not in self._sealed}

    def put(self, sealed: SealedFile) -> Path:
        """Records a sealed file; gives the original, which may go once that is committed."""
        self._ledger.write("INSERT OR REPLACE INTO amendment_files VALUES(?, ?, ?, ?, ?)", sealed)
        self._sealed.add(sealed.segment)
        return segment_path(self.folder, sealed.segment)

    def remove(self, before: int, up_to: int) -> list[Path]:
        """Forgets the files below ``before`` that are about no row of an append beyond ``up_to``; gives what may go once that is committed."""
        gone = [file for file, newest in self._newest.items() if file < before and newest <= up_to]
        paths = [(sealed_path if file in self._sealed else segment_path)(self.folder, file) for file in gone]
        for file in gone:
            self._ledger.write("DELETE FROM amendments WHERE file = ?", (file,))
            self._ledger.write("DELETE FROM amendment_files WHERE file = ?", (file,))
            del self._newest[file]
            self._sealed.discard(file)
        return paths

    def num_bytes(self) -> int:
        """Of all files."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


def sealed_files(ledger: Ledger) -> dict[int, SealedFile]:
    """Sealed files of amendments, by number."""
    rows = ledger.rows("SELECT file, last_append_id, size_bytes, checksum, num_rows FROM amendment_files")
    return {row[0]: SealedFile(*row) for row in rows}


def seal_files(folder: Path, ledger: Ledger, files: Mapping[int, int], up_to: int, cancelled: threading.Event, schema: pa.Schema) -> list[SealedFile]:
    """Seals those of ``files`` that are about no row of an append beyond ``up_to``; for the sealer's thread. A damaged one stays as it is.

    Raises:
        OSError: the disk refused.

    """
    query = "SELECT append_id, offset, size_bytes, checksum, count(*) FROM amendments WHERE file = ? GROUP BY append_id ORDER BY append_id"
    done: list[SealedFile] = []
    for file in sorted(file for file, newest in files.items() if newest <= up_to):
        appends = [StoredAppend(row[0], row[1], row[2], int(row[3], 16), row[4]) for row in ledger.rows(query, (file,))]
        try:
            sealed = seal(segment_path(folder, file), sealed_path(folder, file), appends, cancelled, schema)
        except Corrupt as error:
            logger.warning("event=amendments_not_sealed file=%d reason=%r remedy='rollstream audit'", file, str(error))
            continue
        if sealed is not None:
            done.append(sealed)
    return done


def discard(folder: Path, sealed: Iterable[SealedFile]) -> None:
    """Removes copies that no round recorded."""
    for copy in sealed:
        sealed_path(folder, copy.segment).unlink(missing_ok=True)


def recover_amendment_files(folder: Path, ledger: Ledger) -> set[int]:
    """Brings the sealed files to what the ledger says of them; gives the numbers of those that are whole. For the start, before the log recovers."""
    for path in folder.glob(f"*{TEMPORARY}"):
        path.unlink()
    known = set(sealed_files(ledger))
    for path in folder.glob("*.parquet"):
        if int(path.stem) not in known:
            path.unlink()
    for file in sorted(known):
        if not sealed_path(folder, file).exists() and segment_path(folder, file).exists():
            ledger.write("DELETE FROM amendment_files WHERE file = ?", (file,))
            known.discard(file)
    return known
