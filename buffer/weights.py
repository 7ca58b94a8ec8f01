"""The weights channel ``shm``, on one host: versions of the policy in shared memory, written by the learner, read in place by actors.

    FOLDER/slot-000 … slot-NNN   one page of header, then the bytes of one version
    FOLDER/current               manifest of the newest version, replaced by rename
    FOLDER/writer.lock           held by the one writer

There are ``num_readers + 2`` slots, more once more readers joined, and one for each version kept for an evaluation (``retention``), used again and again, so
their pages stay mapped. The kernel keeps the leases: a reader holds ``flock(LOCK_SH)`` on the slot it reads, the writer takes one whose ``flock(LOCK_EX)``
comes free at once and never the one ``current`` names; whoever is killed lets go of all its locks. A reader sees whole versions only: ``current`` moves after
the last byte is in place. No torch in here; bytes are bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from ..errors import WeightsError, WeightsGone
from .manifest import (
    ALIGNMENT,
    BLOCK_BYTES,
    Manifest,
    TensorSpec,
    WeightTensor,
    check_layout,
    check_owner,
    content_of,
    layout_of,
    lock_writer,
    read_current,
    replace_current,
    round_up,
    size_of,
)
from .retention import Retention

logger = logging.getLogger(__name__)

_HEADER_BYTES = mmap.PAGESIZE
_STAMP_BYTES = 64
_SETTLE_S = 5.0
"""How long a reader follows a ``current`` that keeps moving before it gives up."""


class _Stamp(msgspec.Struct, frozen=True, array_like=True):
    """Header of a slot: what it holds. Empty while it is being written."""

    lineage: int
    version: int
    digest: str


def _slot_path(folder: Path, slot: int) -> Path:
    return folder / f"slot-{slot:03d}"


def remove_weights(folder: Path) -> bool:
    """Removes what a killed writer left in shared memory. False, and nothing removed, where a writer lives or there is nothing."""
    if not folder.is_dir():
        return False
    try:
        check_owner(folder)
        handle = lock_writer(folder)
    except WeightsError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)
    return True


class WeightsWriter:
    """The learner's end. One per run: a second one is refused while the first lives.

    Starting clears what an earlier, killed writer left; its readers keep the bytes they hold until they let go.

    Raises :class:`WeightsError` where another writer lives, or the folder is not ours.
    """

    def __init__(self, folder: Path, num_readers: int, num_retained: int = 0) -> None:
        self.folder = folder
        self.num_slots = num_readers + 2 + num_retained
        self.retention = Retention(folder, num_retained, self._is_read)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(folder)
        self._lock = lock_writer(folder)
        for path in folder.iterdir():
            if path.name != "writer.lock":
                path.unlink()
        self._handles: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._layout: list[TensorSpec] = []
        self._size = 0
        self._current = -1
        self._closed = False

    def write(self, lineage: int, version: int, tensors: Sequence[WeightTensor]) -> Manifest | None:
        """Copies ``tensors`` (name, dtype, shape, contiguous bytes) into a free slot and makes it the current version.

        Returns None, with nothing changed, while readers hold every other slot: ask again, or publish a later version instead.
        Every call gives the same names, dtypes and shapes.

        Raises :class:`WeightsError` where they differ from the first call's, or the file system has no room.
        """
        layout = layout_of(tensors)
        if not self._handles:
            self._size, self._layout = size_of(layout), layout
        check_layout(layout, self._layout, version)
        if len(self._handles) < self.num_slots:
            self._allocate()
        self.retention.let_go()
        slot = self._take_slot()
        if slot is None:
            return None
        self.retention.written(slot)
        try:
            digest = self._fill(slot, tensors)
            stamp = msgspec.msgpack.encode(_Stamp(lineage, version, digest))
            self._maps[slot][: len(stamp)] = stamp
        finally:
            fcntl.flock(self._handles[slot], fcntl.LOCK_UN)
        manifest = Manifest(lineage, version, digest, slot, self._size, layout)
        replace_current(self.folder, manifest)
        self._current = slot
        return manifest

    def expect(self, num_readers: int) -> None:
        """That many may read at once from the next version on: a reader that joined must not take away another's slot."""
        self.num_slots = max(self.num_slots, num_readers + 2 + self.retention.room)

    def close(self) -> None:
        """Removes the folder. Readers that still hold a slot keep its bytes until they let go."""
        if self._closed:
            return
        self._closed = True
        for mapped in self._maps:
            mapped.close()
        for handle in self._handles:
            os.close(handle)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _allocate(self) -> None:
        """Makes and maps the slots there are not yet. Space is taken at once: a write into a sparse file on a full file system would kill the process (SIGBUS).

        Without room for more, those there are go on serving.
        """
        size = _HEADER_BYTES + max(self._size, 1)
        needed = (self.num_slots - len(self._handles)) * round_up(size, mmap.PAGESIZE)
        free = os.statvfs(self.folder)
        free_bytes = free.f_bavail * free.f_frsize
        if needed > free_bytes and self._handles:
            logger.warning("event=no_room_for_more_readers slots=%d wanted=%d free_mb=%.1f", len(self._handles), self.num_slots, free_bytes / 1e6)
            self.num_slots = len(self._handles)
        elif needed > free_bytes:
            raise WeightsError(
                f"weights channel needs {needed / 1e6:.1f} MB in {self.folder} ({self.num_slots} slots), {free_bytes / 1e6:.1f} MB are free: "
                "enlarge that file system (docker: --shm-size), use fewer actors, a lower evaluation.retain, or weights.channel=files"
            )
        for slot in range(len(self._handles), self.num_slots):
            handle = os.open(_slot_path(self.folder, slot), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._handles.append(handle)
            try:
                os.posix_fallocate(handle, 0, size)
            except OSError as error:
                raise WeightsError(f"weights channel cannot take {size / 1e6:.1f} MB in {self.folder}: {error.strerror}; enlarge that file system") from error
            self._maps.append(mmap.mmap(handle, size))

    def _take_slot(self) -> int | None:
        for step in range(1, len(self._maps) + 1):
            slot = (self._current + step) % len(self._maps)
            if slot == self._current or slot in self.retention.slots:
                continue
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._handles[slot], fcntl.LOCK_EX | fcntl.LOCK_NB)
                return slot
        return None

    def _is_read(self, slot: int) -> bool:
        try:
            fcntl.flock(self._handles[slot], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._handles[slot], fcntl.LOCK_UN)
        return False

    def _fill(self, slot: int, tensors: Sequence[WeightTensor]) -> str:
        """Copies the bytes and returns their digest."""
        self._maps[slot][:_STAMP_BYTES] = bytes(_STAMP_BYTES)
        into = np.frombuffer(self._maps[slot], dtype=np.uint8, offset=_HEADER_BYTES, count=self._size)
        hasher = xxhash.xxh3_128()
        for spec, tensor in zip(self._layout, tensors, strict=True):
            source = np.frombuffer(content_of(tensor), dtype=np.uint8)
            end = spec.offset + round_up(spec.size_bytes, ALIGNMENT)
            for start in range(0, max(spec.size_bytes, 1), BLOCK_BYTES):
                stop = min(start + BLOCK_BYTES, spec.size_bytes)
                into[spec.offset + start : spec.offset + stop] = source[start:stop]
                hasher.update(into[spec.offset + start : end if stop == spec.size_bytes else spec.offset + stop].data)
        return hasher.hexdigest()


class _Slot:
    """A reader's mapping of one slot and its hold on it. Mapped privately: what a reader writes there stays its own."""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.inode = os.fstat(self.handle).st_ino
            self.map = mmap.mmap(self.handle, 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError):
            os.close(self.handle)
            raise
        self.holds = 0
        self.retired = False

    def hold(self) -> bool:
        """Takes one more hold; False while the writer fills this slot."""
        if self.holds == 0:
            try:
                fcntl.flock(self.handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        self.holds += 1
        return True

    def let_go(self) -> None:
        self.holds -= 1
        if self.holds == 0:
            fcntl.flock(self.handle, fcntl.LOCK_UN)
            if self.retired:
                self.close()

    def stamp(self) -> _Stamp | None:
        try:
            return msgspec.msgpack.decode(self.map[:_STAMP_BYTES].rstrip(b"\0"), type=_Stamp)
        except msgspec.DecodeError:
            return None

    def close(self) -> None:
        os.close(self.handle)
        with contextlib.suppress(BufferError):  # a tensor still looks at these pages: they go when it goes
            self.map.close()


class WeightsReader:
    """An actor's end. ``poll`` finds a version and keeps its slot from being written again; ``open`` gives its bytes.

    Not thread-safe: one reader per thread.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._current = str(folder / "current")
        self._slots: dict[int, _Slot] = {}
        self._seen: tuple[int, int, int] | None = None
        self._loaded: tuple[int, int, str] | None = None
        self._found: Manifest | None = None
        self._pin: _Slot | None = None

    def poll(self) -> Manifest | None:
        """The current version, unless it is the one opened last; None where there is none. One ``stat`` when nothing changed.

        The version found stays readable until it was opened, or until a later poll finds another one.
        It is compared by (lineage, version, digest): a resumed run publishes older numbers again.

        Raises :class:`WeightsError` where the manifest cannot be read.
        """
        seen = self._signature()
        if seen is None or seen == self._seen:
            return self._found
        deadline = time.monotonic() + _SETTLE_S
        while True:
            manifest = read_current(self.folder)
            if manifest is None:
                return self._found
            slot = self._hold(manifest)
            if slot is not None and self._signature() == seen:
                break
            if slot is not None:
                slot.let_go()
            if time.monotonic() > deadline:
                raise WeightsError(f"the version in {self.folder} kept changing for {_SETTLE_S:g} s: is the learner publishing in a loop?")
            time.sleep(0.0005)
            seen = self._signature() or seen
        self._unpin()
        self._seen = seen
        if (manifest.lineage, manifest.version, manifest.digest) == self._loaded:
            slot.let_go()
            return None
        self._pin, self._found = slot, manifest
        return manifest

    @contextlib.contextmanager
    def open(self, manifest: Manifest) -> Generator[memoryview, None, None]:
        """The bytes of ``manifest``, ``[size_bytes]``, in place; they stay as they are until the context ends.

        Raises :class:`WeightsGone` where the slot holds another version by now, :class:`WeightsError` where the bytes do not match the digest.
        """
        slot = self._hold(manifest)
        if slot is None:
            raise WeightsGone(f"version {manifest.version} is no longer in {self.folder}: poll again for the one that replaced it")
        view = memoryview(slot.map)[_HEADER_BYTES : _HEADER_BYTES + manifest.size_bytes]
        try:
            digest = xxhash.xxh3_128_hexdigest(view)
            if digest != manifest.digest:
                raise WeightsError(
                    f"version {manifest.version} of lineage {manifest.lineage} has digest {digest}, its manifest says {manifest.digest}: not loaded"
                )
            if self._found is manifest:
                self._unpin()
            self._loaded = (manifest.lineage, manifest.version, manifest.digest)
            yield view
        finally:
            with contextlib.suppress(BufferError):
                view.release()
            slot.let_go()

    def close(self) -> None:
        """Lets go of everything."""
        self._unpin()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def _unpin(self) -> None:
        if self._pin is not None:
            self._pin.let_go()
        self._pin = self._found = None

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._current)
        except FileNotFoundError:
            return None
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _hold(self, manifest: Manifest) -> _Slot | None:
        """A hold on the slot of ``manifest``; None where it is being written or holds something else."""
        slot = self._slot(manifest.slot)
        if slot is None or not slot.hold():
            return None
        if slot.stamp() != _Stamp(manifest.lineage, manifest.version, manifest.digest):
            slot.let_go()
            return None
        return slot

    def _slot(self, index: int) -> _Slot | None:
        path = _slot_path(self.folder, index)
        try:
            inode = os.stat(path).st_ino
            known = self._slots.get(index)
            if known is not None and known.inode == inode:
                return known
            if known is not None:  # a restarted learner made new files
                known.retired = True
                if known.holds == 0:
                    known.close()
            self._slots[index] = _Slot(path)
        except (FileNotFoundError, ValueError):
            return None
        return self._slots[index]
