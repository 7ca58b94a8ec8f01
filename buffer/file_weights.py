"""The weights channel ``files``, for hosts that share a file system: each version is one file, written by the learner, read whole by actors.

    FOLDER/NNNNNN.weights   the bytes of one version; slot NNNNNN counts the versions written
    FOLDER/current          manifest of the newest version, replaced by rename
    FOLDER/reading-NAME     what the reader NAME is about to read or reads: the number of the file; its time is renewed while it reads
    FOLDER/writer.lock      held by the one writer

The writer removes files once they are neither among the newest two, nor kept for an evaluation (``retention``), nor named by a reader that renewed its note
within :data:`LEASE_S`; a reader that died holds nothing up for longer. All times are the file server's own, so clocks of hosts do not matter. A reader copies
the bytes into memory of its own and hashes them on the way: whatever a network file system does to a file that goes away meanwhile, only bytes that match the
digest are ever used.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import BinaryIO

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

LEASE_S = 30.0
"""A note that was not renewed for this long is a dead reader's."""
_RENEW_S = 2.0
_LOOK_S = 0.05
"""At most this often a reader looks at the shared file system."""
_KEPT = 2
"""Files that stay although nobody reads them: the newest, and the one a reader may have found just before."""


def _path(folder: Path, slot: int) -> Path:
    return folder / f"{slot:06d}.weights"


class FileWriter:
    """The learner's end. One per run: a second one is refused while the first lives. Starting clears what an earlier, killed writer left.

    Raises :class:`WeightsError` where another writer lives, or the folder is not ours.
    """

    def __init__(self, folder: Path, num_retained: int = 0) -> None:
        self.folder = folder
        self.retention = Retention(folder, num_retained, lambda slot: False)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(folder)
        self._lock = lock_writer(folder)
        newest = 0
        for path in folder.iterdir():
            if path.name != "writer.lock":
                newest = max(newest, int(path.stem) if path.suffix == ".weights" else 0)
                path.unlink(missing_ok=True)
        self._slot = newest  # numbers are never used again: a reader's note means one file
        self._layout: list[TensorSpec] = []
        self._closed = False

    def write(self, lineage: int, version: int, tensors: Sequence[WeightTensor]) -> Manifest:
        """Writes ``tensors`` (name, dtype, shape, contiguous bytes) as the current version, and removes what nobody reads any more.

        Every call gives the same names, dtypes and shapes. Raises :class:`WeightsError` where they differ, or the file system has no room.
        """
        layout = layout_of(tensors)
        if not self._layout:
            self._layout = layout
            self._check_room(size_of(layout))
        check_layout(layout, self._layout, version)
        self.retention.let_go()
        self._prune()
        slot = self._slot + 1
        temporary = self.folder / "writing.tmp"
        try:
            with temporary.open("wb", buffering=0) as file:
                digest = _fill(file, layout, tensors)
            temporary.rename(_path(self.folder, slot))
            manifest = Manifest(lineage, version, digest, slot, size_of(layout), layout)
            replace_current(self.folder, manifest)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            temporary.unlink(missing_ok=True)
            raise WeightsError(
                f"{self.folder} has no room for version {version} ({size_of(layout) / 1e6:.1f} MB): free some, then go on with --resume"
            ) from error
        self._slot = slot
        return manifest

    def expect(self, num_readers: int) -> None:
        """Any number may read at once."""

    def close(self) -> None:
        """Removes the folder. A reader in the middle of a version finds it gone, or has it whole."""
        if not self._closed:
            self._closed = True
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)

    def _check_room(self, size: int) -> None:
        num_versions = _KEPT + 1 + self.retention.room
        needed, found = num_versions * size, os.statvfs(self.folder)
        free_bytes = found.f_bavail * found.f_frsize
        if needed > free_bytes:
            raise WeightsError(
                f"weights channel needs {needed / 1e6:.1f} MB in {self.folder} ({num_versions} versions), {free_bytes / 1e6:.1f} MB are free: "
                "free some, or choose another folder (folder=PATH)"
            )

    def _prune(self) -> None:
        os.utime(self.folder / "writer.lock")
        now = (self.folder / "writer.lock").stat().st_mtime  # the server's clock, as in the readers' notes
        read: set[int] = set()
        for note in self.folder.glob("reading-*"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                if now - note.stat().st_mtime > LEASE_S:
                    note.unlink()
                else:
                    read.add(int(note.read_text()))
        for path in self.folder.glob("*.weights"):
            if int(path.stem) <= self._slot - _KEPT and int(path.stem) not in read and int(path.stem) not in self.retention.slots:
                path.unlink(missing_ok=True)


def _fill(file: BinaryIO, layout: Sequence[TensorSpec], tensors: Sequence[WeightTensor]) -> str:
    """Writes the bytes and returns their digest."""
    hasher = xxhash.xxh3_128()
    for spec, tensor in zip(layout, tensors, strict=True):
        source = np.frombuffer(content_of(tensor), dtype=np.uint8)
        for start in range(0, spec.size_bytes, BLOCK_BYTES):
            _put(file, hasher, source[start : start + BLOCK_BYTES].data)
        _put(file, hasher, memoryview(bytes(round_up(spec.size_bytes, ALIGNMENT) - spec.size_bytes)))
    return hasher.hexdigest()


def _put(file: BinaryIO, hasher: xxhash.xxh3_128, block: memoryview) -> None:
    hasher.update(block)
    while block.nbytes:
        block = block[file.write(block) :]


class FileReader:
    """An actor's end, by its ``name``. ``poll`` finds a version and has it kept; ``open`` reads its bytes.

    Not thread-safe: one reader per thread.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._note = folder / f"reading-{name}-{uuid.uuid4().hex[:8]}"
        self._look_at = 0.0
        self._seen: tuple[int, int, int] | None = None
        self._loaded: tuple[int, int, str] | None = None
        self._found: Manifest | None = None
        self._renewed_at = 0.0

    def poll(self) -> Manifest | None:
        """The current version, unless it is the one opened last; None where there is none. Looks twenty times a second at most.

        It is compared by (lineage, version, digest): a resumed run publishes older numbers again.

        Raises :class:`WeightsError` where the manifest cannot be read.
        """
        now = time.monotonic()
        if now < self._look_at:
            return self._found
        self._look_at = now + _LOOK_S
        seen = self._signature()
        if seen is None or seen == self._seen:
            if self._found is not None and now - self._renewed_at > _RENEW_S:
                self._keep(self._found)
            return self._found
        manifest = read_current(self.folder)
        if manifest is None:
            return self._found
        self._seen = seen
        if (manifest.lineage, manifest.version, manifest.digest) == self._loaded:
            self._let_go()
            return None
        self._found = manifest
        self._keep(manifest)
        return manifest

    @contextlib.contextmanager
    def open(self, manifest: Manifest) -> Generator[memoryview, None, None]:
        """The bytes of ``manifest``, ``[size_bytes]``, in memory of this process, until the context ends.

        Raises :class:`WeightsGone` where a newer version has replaced it, :class:`WeightsError` where the bytes do not match the digest.
        """
        self._keep(manifest)
        memory = mmap.mmap(-1, max(manifest.size_bytes, 1))
        view = memoryview(memory)[: manifest.size_bytes]
        try:
            self._read(manifest, view)
            self._let_go()
            self._loaded = (manifest.lineage, manifest.version, manifest.digest)
            yield view
        finally:
            with contextlib.suppress(BufferError):  # a tensor still looks at these pages: they go when it goes
                view.release()
                memory.close()

    def close(self) -> None:
        """Lets go of everything."""
        self._let_go()

    def _read(self, manifest: Manifest, view: memoryview) -> None:
        hasher = xxhash.xxh3_128()
        size = 0
        try:
            with _path(self.folder, manifest.slot).open("rb", buffering=0) as file:
                while size < manifest.size_bytes and (num := file.readinto(view[size : size + BLOCK_BYTES])):
                    hasher.update(view[size : size + num])
                    size += num
                    if time.monotonic() - self._renewed_at > _RENEW_S:
                        self._keep(manifest)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                self._forget()
                raise WeightsGone(f"version {manifest.version} is no longer in {self.folder}: poll again for the one that replaced it") from None
            raise
        if size < manifest.size_bytes or hasher.hexdigest() != manifest.digest:
            self._forget()
            if read_current(self.folder) != manifest:
                raise WeightsGone(f"version {manifest.version} was replaced while it was read: poll again")
            raise WeightsError(
                f"version {manifest.version} of lineage {manifest.lineage}: {size} bytes with digest {hasher.hexdigest()} were read, its manifest says "
                f"{manifest.size_bytes} and {manifest.digest}: not loaded"
            )

    def _signature(self) -> tuple[int, int, int] | None:
        """What tells one ``current`` from the next. By opening it: a network file system answers a mere ``stat`` from its cache for seconds."""
        try:
            with open(self.folder / "current", "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _keep(self, manifest: Manifest) -> None:
        """Asks the writer to keep the file of ``manifest``."""
        self._renewed_at = time.monotonic()
        with contextlib.suppress(FileNotFoundError):  # the writer removed the folder: opening will tell
            self._note.write_text(str(manifest.slot))

    def _let_go(self) -> None:
        self._found = None
        self._note.unlink(missing_ok=True)

    def _forget(self) -> None:
        """What was seen is worth nothing: the next poll looks anew."""
        self._seen = None
        self._let_go()
