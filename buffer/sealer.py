"""When segments are sealed, and when sealed ones are removed.

A segment is sealed once it is closed, a sync has covered it, and every group with rows in it or before it is trained or dropped: what a batch will soon need
stays as it came, in frames that go out without being decoded. Only a redo reads sealed rows. Segments go in their order, one at a time, in a thread.

    copy written, compared, flushed, renamed (``sealed.seal``)  →  ledger says sealed, flushed  →  original removed

So at any instant the original or a recorded copy is whole. :func:`recover_sealed` clears what a kill left: a copy the ledger does not know, an original it no
longer needs. With ``buffer.keep_gb`` the oldest segments are removed, in order, the ledger first, while the stream is larger and the oldest checkpoint that a
run can resume from lies behind all their groups; where rows come faster than they can be sealed, before they are. Amendments are sealed and removed with the
rows they are about (see ``amendment_files``).
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ..configs.run_folder import Run
from ..errors import Corrupt
from .amendment_files import discard, seal_files
from .amendments import AMENDMENTS, Amendments
from .blob_store import BlobStore
from .books import Books
from .ledger import Ledger
from .log import Log, segment_path
from .sealed import TEMPORARY, SealedFile, seal, sealed_path

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"v(\d{6,})")
_NICENESS = 10
_RETRY_S = 60.0


class _Done(NamedTuple):
    """What one job of the thread sealed."""

    segment: SealedFile
    amendments: list[SealedFile]


class Sealer:
    """Seals and removes segments beside the buffer's loop; every write to the ledger is made by the loop, between :meth:`record` and :meth:`recorded`."""

    def __init__(self, run: Run, books: Books, log: Log, blobs: BlobStore, amendments: Amendments) -> None:
        self._run = run
        self._amendments = amendments
        self._closed_amendments = amendments.first_open
        self._blobs = blobs
        self._books = books
        self._log = log
        keep_gb = run.config.buffer.keep_gb
        self._keep_bytes = None if keep_gb is None else int(keep_gb * 1e9)
        self._kept = {sealed.segment: sealed for sealed, removed in books.ledger.segments() if not removed}
        self._last_append_id = max((sealed.last_append_id for sealed, _ in books.ledger.segments()), default=0)
        self._cancelled = threading.Event()
        self._pool = ThreadPoolExecutor(1, "seal")
        self._job: Future[_Done | None] | None = None
        self._seen: tuple[object, ...] = ()
        self._superfluous: list[Path] = []
        self._not_before = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._cancelled.set()
        self._pool.shutdown()
        if self._job is not None and self._job.exception() is None and (done := self._job.result()) is not None:
            discard(self._run.stream_folder, [done.segment])  # no round recorded it: the original stands, the next start seals anew
            discard(self._run.amendments_folder, done.amendments)

    def record(self) -> None:
        """Enters into the open round what was sealed and what retention removes, and looks for the next segment where anything has changed."""
        if self._job is not None and self._job.done():
            self._finish(self._job)
            self._job, self._seen = None, ()
        seen = (self._books.version, self._books.ledger.synced_append_id, self._log.first_open)
        if self._job is None and seen != self._seen:
            self._seen = seen
            needed_from = self._needed_from(self._books.version)
            self._log.page_cache.keep_from(needed_from)
            if self._keep_bytes is not None:
                self._remove_oldest(self._keep_bytes)
            if time.monotonic() >= self._not_before:
                self._start_next(needed_from)

    def recorded(self) -> None:
        """The round was committed: removes the files it made superfluous."""
        self._closed_amendments = self._amendments.first_open
        if self._superfluous:
            self._books.ledger.flush_to_disk()
            for path in self._superfluous:
                path.unlink(missing_ok=True)
            self._superfluous.clear()
            self._blobs.unlink_removed()
            self._log.release()

    # --- sealing --------------------------------------------------------------------------------------------------------------------

    def _start_next(self, needed_from: int) -> None:
        segment = self._next_closed()
        if segment is None or segment >= needed_from:
            return
        self._amendments.cut()
        self._job = self._pool.submit(self._seal, segment, self._last_append_id, self._amendments.files.unsealed(self._closed_amendments))

    def _seal(self, segment: int, after: int, amended: dict[int, int]) -> _Done | None:
        """In the thread: reads the ledger through a connection of its own. ``amended`` are closed files of amendments, with the newest row of each."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        ledger = Ledger(self._run.ledger_path, None, read_only=True)
        try:
            appends, folder = ledger.next_segment(after), self._run.stream_folder
            sealed = seal(segment_path(folder, segment), sealed_path(folder, segment), appends, self._cancelled)
            if sealed is None:
                return None
            return _Done(sealed, seal_files(self._run.amendments_folder, ledger, amended, sealed.last_append_id, self._cancelled, AMENDMENTS))
        finally:
            ledger.close()

    def _finish(self, job: Future[_Done | None]) -> None:
        try:
            done = job.result()
        except Corrupt as error:
            logger.warning("event=not_sealed reason=%r remedy='rollstream audit'", str(error))  # nor will any later one be: the order is kept
            self._not_before = float("inf")
            return
        except OSError as error:
            logger.warning("event=not_sealed reason=%r tried_again_in_s=%g", str(error), _RETRY_S)
            self._not_before = time.monotonic() + _RETRY_S
            return
        if done is not None:
            sealed = done.segment
            original = segment_path(self._run.stream_folder, sealed.segment)
            logger.info(
                "event=sealed segment=%d from_bytes=%d to_bytes=%d rows=%d", sealed.segment, original.stat().st_size, sealed.size_bytes, sealed.num_rows
            )
            self._books.ledger.put_segment(sealed)
            self._kept[sealed.segment] = sealed
            self._last_append_id = sealed.last_append_id
            self._superfluous += [original, *(self._amendments.files.put(one) for one in done.amendments)]

    def _next_closed(self) -> int | None:
        """The oldest segment that is not sealed, if nothing is added to it any more and a sync has covered it."""
        ledger = self._books.ledger
        segment = ledger.segment_after(self._last_append_id)
        unsynced = ledger.segment_after(ledger.synced_append_id)
        return None if segment is None or segment >= min(self._log.first_open, segment + 1 if unsynced is None else unsynced) else segment

    def _needed_from(self, version: int) -> int:
        """The first segment with rows that a batch beyond ``version`` may hold."""
        first_group = self._books.first_group_beyond(version)
        segment = self._books.ledger.first_segment_of(first_group)
        return self._log.first_open if segment is None else segment

    # --- retention ------------------------------------------------------------------------------------------------------------------

    def _remove_oldest(self, keep_bytes: int) -> None:
        stream_bytes = sum(path.stat().st_size for path in self._run.stream_folder.iterdir())
        excess = stream_bytes + self._blobs.num_bytes + self._amendments.files.num_bytes() - keep_bytes
        if excess <= 0:
            return
        needed_from = self._needed_from(min(self._oldest_checkpoint(), self._books.version))
        for segment, sealed in list(self._kept.items()):
            if excess <= 0 or segment >= needed_from:
                break
            excess -= self._remove(sealed, sealed_path(self._run.stream_folder, segment))
            del self._kept[segment]
        while excess > 0 and (segment := self._next_closed()) is not None and segment < needed_from:  # more comes than can be sealed
            appends, path = self._books.ledger.next_segment(self._last_append_id), segment_path(self._run.stream_folder, segment)
            unsealed = SealedFile(segment, appends[-1].append_id, path.stat().st_size, "", sum(append.num_rows for append in appends))
            self._amendments.cut()
            self._books.ledger.put_segment(unsealed)
            self._last_append_id = unsealed.last_append_id
            excess -= self._remove(unsealed, path)
        self._superfluous += self._amendments.files.remove(self._closed_amendments, self._books.ledger.removed_up_to)

    def _remove(self, removed: SealedFile, path: Path) -> int:
        """Enters the removal of the oldest segment, whose file is ``path``; gives the bytes that it frees."""
        logger.info("event=removed_by_retention segment=%d bytes=%d rows=%d", removed.segment, removed.size_bytes, removed.num_rows)
        self._books.ledger.remove_segment(removed.segment)
        self._superfluous.append(path)
        return removed.size_bytes + self._blobs.remove_up_to(removed.last_append_id)

    def _oldest_checkpoint(self) -> int:
        """The oldest version a run may resume from; the first checkpoint may also be kept beyond that, as a reference."""
        folder = self._run.checkpoints_folder
        if not folder.is_dir():
            return 0
        versions = sorted(int(match[1]) for name in os.listdir(folder) if (match := _CHECKPOINT.fullmatch(name)))
        return min(versions[-self._run.config.learner.checkpoint.keep_last :], default=0)


def recover_sealed(ledger: Ledger, folder: Path) -> None:
    """Brings the sealed files of ``folder`` to what the ledger says of them; for the start, before the log recovers."""
    for path in folder.glob(f"*{TEMPORARY}"):
        path.unlink()
    known = {sealed.segment: removed for sealed, removed in ledger.segments()}
    for path in folder.glob("*.parquet"):
        if known.get(int(path.stem), segment_path(folder, int(path.stem)).exists()):
            path.unlink()
            logger.info("event=unrecorded_copy_removed segment=%s", path.name)
    for segment, removed in known.items():
        if not removed and not sealed_path(folder, segment).exists() and segment_path(folder, segment).exists():
            ledger.write("DELETE FROM segments WHERE segment = ?", (segment,))
    ledger.commit()
