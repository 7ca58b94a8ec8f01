"""Where the buffer keeps blobs: ``blobs/ab/DIGEST``, one file each, named by the BLAKE3 hash of its bytes.

A blob is checked when it comes; all of a round's are on the disk before the ledger says so, and before any row that names them is acknowledged. So a row
never names what is not there, whatever is killed when; a file that the ledger does not know, perhaps torn, is nobody's, and the next start removes it.
:meth:`BlobStore.sync` makes them survive power loss, with the log. The ledger keeps the last append that named each blob; when retention has removed the rows
up to there, the blob goes too.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import Corrupt, DiskFull, Refused, StreamError
from . import wire
from .blobs import MAX_BLOB_BYTES, digest_of, is_digest
from .ledger import Ledger
from .log import Log
from .page_cache import PageCache
from .sealed import flush_file

logger = logging.getLogger(__name__)

_REPLY_BYTES = 32 * 2**20
_MAX_ASKED = 100_000
_MANY_FILES = 64  # beyond that one flush of everything costs less than one of each
_FULL = (errno.ENOSPC, errno.EDQUOT)


def blob_path(folder: Path, digest: str) -> Path:
    """File of a blob in the blobs of ``folder``."""
    return folder / digest[:2] / digest


def digests_of(batch: pa.RecordBatch) -> list[str]:
    """Every digest that the rows of ``batch`` name, once each."""
    media = batch.column("media")
    return list(dict.fromkeys(media.flatten().field("digest").to_pylist())) if len(media.values) else []


class BlobStore:
    """The blobs of one run, written by its buffer alone."""

    def __init__(self, folder: Path, ledger: Ledger, counters: Counter[str], page_cache: PageCache) -> None:
        self._folder = folder
        self._counters = counters
        self._ledger = ledger
        self._pending: dict[str, Any] = {}
        self._unsynced: set[Path] = set()
        self._page_cache = page_cache
        self._made: set[Path] = set()
        self._removed: list[str] = []
        self.num_bytes = int(next(iter(ledger.rows("SELECT ifnull(sum(size_bytes), 0) FROM blobs")))[0])

    # --- messages -------------------------------------------------------------------------------------------------------------------

    def answer(self, message: wire.AskBlobs | wire.PutBlobs | wire.FetchBlobs, payload: Sequence[Any], append_id: int) -> tuple[wire.ServerMessage, list[Any]]:
        """What to say to a message about blobs, and the frames that go with it. ``append_id`` is the next append's.

        Raises:
            Refused: bytes that do not match their digest, are too many, or of a blob that is not here.

        """
        if isinstance(message, wire.PutBlobs):
            if len(payload) != len(message.digests):
                raise Refused("malformed", f"{len(message.digests)} blobs announced, {len(payload)} frames came; a blob comes in one frame")
            self._take({digest: frame.buffer for digest, frame in zip(message.digests, payload, strict=True)}, append_id)
            return wire.Acknowledged(), []
        if len(message.digests) > _MAX_ASKED:
            raise Refused("malformed", f"{len(message.digests)} digests in one message; at most {_MAX_ASKED}")
        if isinstance(message, wire.AskBlobs):
            return wire.LackedBlobs(self.lacked(message.digests)), []
        frames: list[Any] = []
        size_bytes = 0
        for digest in message.digests:
            if frames and size_bytes >= _REPLY_BYTES:
                break
            frames.append(self.read(digest))
            size_bytes += len(frames[-1])
        self._counters["blobs_sent"] += len(frames)
        return wire.Blobs(message.digests[: len(frames)]), frames

    def lacked(self, digests: Iterable[str]) -> list[str]:
        """Those that are not here."""
        return [digest for digest in digests if digest not in self._pending and not self._is_recorded(digest)]

    def refer(self, digests: Sequence[str], append_id: int) -> None:
        """Notes that an append names these, all of which are here."""
        self._ledger.write_all("UPDATE blobs SET last_append_id = ? WHERE digest = ?", [(append_id, digest) for digest in digests])

    def check_known(self, digests: Sequence[str]) -> None:
        """Refuses rows that name blobs which are not here.

        Raises:
            Refused: ``unknown_blob``.

        """
        if lacked := self.lacked(digests):
            raise Refused("unknown_blob", f"{len(lacked)} of {len(digests)} blobs are not here, the first is {lacked[0]}; send their bytes first")

    def _take(self, blobs: dict[str, Any], append_id: int) -> None:
        """Takes all of them, or none."""
        for digest, data in blobs.items():
            if not is_digest(digest):
                raise Refused("malformed", f"{digest[:80]!r} is no BLAKE3 hash in 64 hex digits")
            if not 0 < len(data) <= MAX_BLOB_BYTES:
                raise Refused("malformed", f"blob {digest} has {len(data):,} bytes; it must have between 1 and {MAX_BLOB_BYTES:,}: encode the image smaller")
        new = {digest: blobs[digest] for digest in self.lacked(blobs)}
        for digest, data in new.items():
            if (found := digest_of(data)) != digest:
                raise Corrupt(f"a blob of {len(data):,} bytes has the digest {found}, announced was {digest}")
        self._pending |= new
        self._ledger.write_all("INSERT INTO blobs VALUES(?, ?, ?, ?)", [(digest, len(data), append_id, append_id) for digest, data in new.items()])
        size_bytes = sum(len(data) for data in new.values())
        self.num_bytes += size_bytes
        self._counters["blobs_received"] += len(blobs)
        self._counters["blobs_stored"] += len(new)
        self._counters["blob_bytes_stored"] += size_bytes

    def read(self, digest: str) -> Any:
        """The bytes of a blob, as a view of the mapped file.

        Raises:
            Refused: ``unknown_blob``: it is not here, or no more.
            Corrupt: the ledger has it and the disk has not.

        """
        if digest in self._pending:
            return memoryview(self._pending[digest])
        if not is_digest(digest) or not self._is_recorded(digest):
            raise Refused("unknown_blob", f"blob {digest[:80]} is not here; retention (buffer.keep_gb) may have removed it with its rows")
        try:
            with pa.memory_map(str(blob_path(self._folder, digest))) as mapped:
                return memoryview(mapped.read_buffer())
        except OSError as error:
            raise Corrupt(f"{blob_path(self._folder, digest)} cannot be read: {error}; run `rollstream audit` for the extent") from error

    def _is_recorded(self, digest: str) -> bool:
        return next(iter(self._ledger.rows("SELECT 1 FROM blobs WHERE digest = ?", (digest,))), None) is not None

    # --- the disk -------------------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes what has come: it survives the death of the process.

        Raises:
            DiskFull: what was not written stays pending, and nothing of this round may be acknowledged before a later flush succeeds.
            StreamError: the disk refused for another reason.

        """
        for digest in list(self._pending):
            path = blob_path(self._folder, digest)
            try:
                if path.parent not in self._made:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._made.add(path.parent)
                _write(path, self._pending[digest])
                self._page_cache.wrote(path, 0, len(self._pending[digest]))
            except OSError as error:
                kind = DiskFull if error.errno in _FULL else StreamError
                remedy = "free space there and the run goes on" if kind is DiskFull else "mend the disk and run again with --resume"
                raise kind(f"cannot write {path}: {error.strerror}; {remedy}") from error
            del self._pending[digest]
            self._unsynced.add(path)

    def sync(self) -> None:
        """Makes every blob survive power loss."""
        self.flush()
        if len(self._unsynced) > _MANY_FILES:
            os.sync()
        elif self._unsynced:
            for path in [*self._unsynced, *{path.parent for path in self._unsynced}, self._folder]:
                if path.exists():  # retention may have removed it
                    flush_file(path)
        self._unsynced.clear()

    def abandon(self) -> None:
        """Drops what was not written."""
        self._pending.clear()

    # --- retention ------------------------------------------------------------------------------------------------------------------

    def remove_up_to(self, append_id: int) -> int:
        """Enters into the open round that blobs named by nothing after this append go; gives their bytes. :meth:`unlink_removed` follows the commit."""
        found = list(self._ledger.rows("SELECT digest, size_bytes FROM blobs WHERE last_append_id <= ?", (append_id,)))
        self._ledger.write("DELETE FROM blobs WHERE last_append_id <= ?", (append_id,))
        self._removed += [digest for digest, _ in found]
        size_bytes = sum(size for _, size in found)
        self.num_bytes -= size_bytes
        return size_bytes

    def unlink_removed(self) -> None:
        """The round was committed: removes the files, but of blobs that have come anew."""
        for digest in self.lacked(self._removed):
            blob_path(self._folder, digest).unlink(missing_ok=True)
        self._removed.clear()


def _write(path: Path, data: Any) -> None:
    """A new file; one that a full disk cut off, or that retention is about to remove, gives way: whoever has it open goes on reading that one."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        path.unlink()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]
    finally:
        os.close(file)


def recover_blobs(ledger: Ledger, folder: Path, log: Log) -> list[int]:
    """Brings the files to what the ledger says of them, before the buffer serves; gives the unsynced appends that name a blob which is lost.

    Files that the ledger does not know were written by a round that was never acknowledged. What no sync covered is checked.
    """
    lost: set[str] = set()
    for digest, size_bytes in list(ledger.rows("SELECT digest, size_bytes FROM blobs WHERE first_append_id > ?", (ledger.synced_append_id,))):
        if not is_whole(blob_path(folder, digest), digest, size_bytes):
            lost.add(digest)
            ledger.write("DELETE FROM blobs WHERE digest = ?", (digest,))
    num_unrecorded = 0
    for path in folder.glob("*/*"):
        if next(iter(ledger.rows("SELECT 1 FROM blobs WHERE digest = ?", (path.name,))), None) is None:
            path.unlink()
            num_unrecorded += 1
    if num_unrecorded:
        logger.info("event=unrecorded_blobs_removed num=%d", num_unrecorded)
    if not lost:
        return []
    logger.warning("event=blobs_lost num=%d", len(lost))
    return [append_id for append_id, location in ledger.unsynced() if lost.intersection(_named(log, location))]


def _named(log: Log, location: Any) -> list[str]:
    try:
        return digests_of(log.read(location))
    except (Corrupt, OSError):  # lost itself, which the log's own recovery says
        return []


def is_whole(path: Path, digest: str, size_bytes: int) -> bool:
    """Whether a blob's file holds its bytes."""
    try:
        return path.stat().st_size == size_bytes and digest_of(path.read_bytes()) == digest
    except OSError:
        return False
