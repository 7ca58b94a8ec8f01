"""What the stream wrote long ago leaves the kernel's page cache, and reads as it was written."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rollstream.buffer.columns import frame_checksum
from rollstream.buffer.log import Location, Log
from rollstream.buffer.page_cache import PageCache
from test_log import frame_of

MEGABYTE = 2**20


def resident_bytes(path: Path, offset: int = 0, size_bytes: int | None = None) -> int:
    """How much of a file the kernel holds in memory."""
    size_bytes = path.stat().st_size - offset if size_bytes is None else size_bytes
    num_pages = -(-size_bytes // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size_bytes, offset=offset) as mapped:
        view = (ctypes.c_char * size_bytes).from_buffer(mapped)
        result = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(view), ctypes.c_size_t(size_bytes), pages)
        del view
    assert result == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def pages_can_go(tmp_path: Path) -> None:
    """Where files live in memory alone, nothing can leave it."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(MEGABYTE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_bytes(path):
        pytest.skip("the file system of the temporary folder keeps its files in memory")


def write_slowly(path: Path, num_megabytes: int) -> Iterator[int]:
    """A megabyte at a time, as slowly as any disk can follow; gives the offset of each once it is written."""
    with path.open("wb", buffering=0) as file:
        for index in range(num_megabytes):
            file.write(bytes([index]) * MEGABYTE)
            yield index * MEGABYTE
            os.fsync(file.fileno())


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold within ten seconds: the kernel hears of it from a thread."""
    deadline = time.monotonic() + 10
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def test_only_the_newest_bytes_stay_in_memory(tmp_path: Path) -> None:
    cache = PageCache(step_bytes=MEGABYTE, kept_bytes=8 * MEGABYTE)
    path = tmp_path / "rows"
    for offset in write_slowly(path, 32):
        cache.wrote(path, offset, MEGABYTE)
    # a disk may take a step after its turn has come: nearly all must be gone, not each page
    assert eventually(lambda: resident_bytes(path, 0, 20 * MEGABYTE) <= 4 * MEGABYTE)
    cache.close()
    assert resident_bytes(path, 26 * MEGABYTE) >= 4 * MEGABYTE
    assert path.read_bytes() == b"".join(bytes([index]) * MEGABYTE for index in range(32))


def test_what_a_batch_still_needs_stays_whatever_it_weighs(tmp_path: Path) -> None:
    cache = PageCache(step_bytes=MEGABYTE, kept_bytes=4 * MEGABYTE)
    paths = [tmp_path / f"{segment}" for segment in range(1, 5)]
    cache.keep_from(2)  # before the first byte of anything
    for segment, path in enumerate(paths, 1):
        cache.begin(segment)
        cache.keep_from(min(segment, 2))
        for offset in write_slowly(path, 8):
            cache.wrote(path, offset, MEGABYTE)
    assert eventually(lambda: resident_bytes(paths[0]) <= 2 * MEGABYTE)
    assert [resident_bytes(path) for path in paths[1:]] == [8 * MEGABYTE] * 3
    cache.keep_from(4)
    cache.wrote(paths[3], 8 * MEGABYTE, MEGABYTE)  # with the next step
    assert eventually(lambda: sum(map(resident_bytes, paths[1:3])) <= 4 * MEGABYTE)
    assert resident_bytes(paths[3]) == 8 * MEGABYTE
    cache.close()


def test_many_small_files_leave_as_one_large_one(tmp_path: Path) -> None:
    cache = PageCache(step_bytes=MEGABYTE, kept_bytes=4 * MEGABYTE)
    paths = [tmp_path / f"image-{index}" for index in range(160)]
    for path in paths:
        path.write_bytes(bytes(100_000))
        cache.wrote(path, 0, 100_000)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    assert eventually(lambda: sum(resident_bytes(path) for path in paths[:80]) <= 80 * 102_400 // 5)
    cache.close()


def test_what_was_removed_meanwhile_is_no_matter(tmp_path: Path) -> None:
    cache = PageCache(step_bytes=1, kept_bytes=1)
    for index in range(3):
        cache.wrote(tmp_path / f"gone-{index}", 0, 10)
    left = tmp_path / "left"
    left.write_bytes(bytes(MEGABYTE))
    with left.open("rb") as file:
        os.fsync(file.fileno())
    cache.wrote(left, 0, MEGABYTE)
    cache.wrote(left, MEGABYTE, 1)
    assert eventually(lambda: resident_bytes(left) == 0)
    cache.close()


def test_the_log_holds_little_of_itself_in_memory(tmp_path: Path) -> None:
    log = Log(tmp_path / "stream", segment_bytes=16 * MEGABYTE)
    log.page_cache.close()
    log.page_cache = PageCache(step_bytes=MEGABYTE, kept_bytes=4 * MEGABYTE)
    frame = frame_of(0, 50_000)
    locations: list[Location] = []
    for _ in range(80):
        locations.append(log.append(frame, frame_checksum(frame)))
        log.flush()
        log.sync()
    paths = sorted((tmp_path / "stream").glob("*.arrows"))
    written = sum(path.stat().st_size for path in paths)
    assert written > 30 * MEGABYTE
    assert eventually(lambda: sum(map(resident_bytes, paths)) <= written // 2)
    log.close()
    reader = Log(tmp_path / "stream", segment_bytes=16 * MEGABYTE)
    for location in locations:
        assert np.array_equal(reader.read(location).column("token_ids").values.to_numpy(), np.arange(50_000))
    reader.close()
