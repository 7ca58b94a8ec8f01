"""The weights channel: whole versions, real locks, real kills."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash

from rollstream.buffer.weights import Manifest, WeightsReader, WeightsWriter, WeightTensor, remove_weights
from rollstream.errors import WeightsError


def tensors(value: int, size: int = 1000) -> list[WeightTensor]:
    """Two tensors whose every byte is ``value``; the second is odd-sized, so padding follows."""
    first = np.full((4, size), value, np.uint8)
    second = np.full(7, value, np.uint8)
    return [("a.weight", "bfloat16", (4, size // 2), memoryview(first)), ("b.bias", "uint8", (7,), memoryview(second))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@contextmanager
def child(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def found(reader: WeightsReader) -> Manifest:
    manifest = reader.poll()
    assert manifest is not None
    return manifest


def test_a_reader_gets_the_bytes_the_writer_gave(folder: Path) -> None:
    writer, reader = WeightsWriter(folder, 1), WeightsReader(folder)
    assert reader.poll() is None
    written = writer.write(0, 3, tensors(7))
    manifest = found(reader)
    assert manifest == written
    assert (manifest.lineage, manifest.version) == (0, 3)
    with reader.open(manifest) as view:
        assert xxhash.xxh3_128_hexdigest(view) == manifest.digest
        for spec, (name, dtype, shape, content) in zip(manifest.tensors, tensors(7), strict=True):
            assert (spec.name, spec.dtype, spec.shape) == (name, dtype, shape)
            assert spec.offset % 64 == 0
            assert bytes(view[spec.offset : spec.offset + spec.size_bytes]) == content.tobytes()
    reader.close()
    writer.close()


def test_an_opened_version_is_not_offered_again_and_the_next_one_is(folder: Path) -> None:
    writer, reader = WeightsWriter(folder, 1), WeightsReader(folder)
    writer.write(0, 1, tensors(1))
    assert found(reader) == found(reader), "a version that was not opened stays on offer"
    with reader.open(found(reader)):
        assert reader.poll() is None
    writer.write(0, 2, tensors(2))
    assert found(reader).version == 2
    reader.close()
    writer.close()


def test_an_older_number_is_new_when_a_resumed_run_publishes_it(folder: Path) -> None:
    writer, reader = WeightsWriter(folder, 1), WeightsReader(folder)
    writer.write(0, 9, tensors(9))
    with reader.open(found(reader)):
        pass
    writer.close()
    writer = WeightsWriter(folder, 1)
    writer.write(1, 5, tensors(5))
    manifest = found(reader)
    assert (manifest.lineage, manifest.version) == (1, 5)
    with reader.open(manifest) as view:
        assert view[0] == 5
    reader.close()
    writer.close()


def test_equal_weights_have_equal_digests_and_others_do_not(folder: Path) -> None:
    writer = WeightsWriter(folder, 1)
    first, second, third = (writer.write(0, version, tensors(value)) for version, value in ((1, 1), (2, 1), (3, 2)))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.digest == second.digest != third.digest
    writer.close()


def test_a_version_being_read_is_never_written_over(folder: Path) -> None:
    writer, reader = WeightsWriter(folder, 1), WeightsReader(folder)
    writer.write(0, 1, tensors(1))
    with reader.open(found(reader)) as view:
        for version in range(2, 20):
            assert writer.write(0, version, tensors(version)) is not None
        assert bytes(view[:4000]) == b"\x01" * 4000
    reader.close()
    writer.close()


def test_a_version_found_by_a_poll_stays_readable_until_it_is_opened(folder: Path) -> None:
    writer, reader = WeightsWriter(folder, 1), WeightsReader(folder)
    writer.write(0, 1, tensors(1))
    manifest = found(reader)
    for version in range(2, 20):
        writer.write(0, version, tensors(version))
    with reader.open(manifest) as view:
        assert view[0] == 1
    assert found(reader).version == 19
    reader.close()
    writer.close()


def test_the_writer_declines_instead_of_waiting_when_readers_hold_every_slot(folder: Path) -> None:
    writer = WeightsWriter(folder, 1)
    readers: list[WeightsReader] = []
    for version in range(1, 4):
        assert writer.write(0, version, tensors(version)) is not None
        readers.append(WeightsReader(folder))
        found(readers[-1])
    assert writer.write(0, 4, tensors(4)) is None
    assert found(WeightsReader(folder)).version == 3, "what was current stays current"
    readers[0].close()
    assert writer.write(0, 4, tensors(4)) is not None
    for reader in readers:
        reader.close()
    writer.close()


def test_a_changed_byte_is_refused(folder: Path) -> None:
    writer, reader = WeightsWriter(folder, 1), WeightsReader(folder)
    manifest = writer.write(0, 1, tensors(1))
    assert manifest is not None
    with (folder / f"slot-{manifest.slot:03d}").open("r+b") as file:
        file.seek(mmap.PAGESIZE + 100)
        file.write(b"\x02")
    with pytest.raises(WeightsError, match="digest"), reader.open(found(reader)):
        pass
    reader.close()
    writer.close()


def test_a_manifest_that_was_overtaken_says_poll_again(folder: Path) -> None:
    writer, reader = WeightsWriter(folder, 0), WeightsReader(folder)
    old = writer.write(0, 1, tensors(1))
    assert old is not None
    for version in range(2, 4):
        writer.write(0, version, tensors(version))
    with pytest.raises(WeightsError, match="poll again"), reader.open(old):
        pass
    reader.close()
    writer.close()


def test_a_reader_cannot_change_what_others_read(folder: Path) -> None:
    writer, vandal, reader = WeightsWriter(folder, 2), WeightsReader(folder), WeightsReader(folder)
    writer.write(0, 1, tensors(1))
    with vandal.open(found(vandal)) as view:
        view[:100] = bytes(100)
    with reader.open(found(reader)) as view:
        assert view[0] == 1
    vandal.close()
    reader.close()
    writer.close()


def test_other_tensors_than_the_first_are_refused(folder: Path) -> None:
    writer = WeightsWriter(folder, 1)
    writer.write(0, 1, tensors(1))
    with pytest.raises(WeightsError, match=r"other tensors.*a\.weight"):
        writer.write(0, 2, tensors(1, size=2000))
    writer.close()


def test_a_second_writer_is_refused_while_the_first_lives(folder: Path) -> None:
    writer = WeightsWriter(folder, 1)
    with pytest.raises(WeightsError, match="has a writer already"):
        WeightsWriter(folder, 1)
    assert not remove_weights(folder)
    writer.close()
    assert not folder.exists()
    WeightsWriter(folder, 1).close()


def test_a_full_file_system_is_said_with_numbers_before_anything_is_written(folder: Path) -> None:
    writer = WeightsWriter(folder, 1)
    huge = mmap.mmap(-1, 1 << 42, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE: address space only
    with memoryview(huge) as content, pytest.raises(WeightsError, match=r"needs 13194\d+\.\d MB .* MB are free: enlarge"):
        writer.write(0, 1, [("huge", "uint8", (1 << 42,), content)])
    huge.close()
    assert not list(folder.glob("slot-*"))
    writer.close()


def test_somebody_elses_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="somebody else"):
        WeightsWriter(tmp_path / "weights", 1)


HOLD = """
import sys, time
from pathlib import Path
from rollstream.buffer.weights import WeightsReader
reader = WeightsReader(Path(sys.argv[1]))
with reader.open(reader.poll()) as view:
    print("holding", flush=True)
    time.sleep(60)
"""


def test_a_killed_reader_lets_go_of_its_slot(folder: Path) -> None:
    writer, reader = WeightsWriter(folder, 0), WeightsReader(folder)
    writer.write(0, 1, tensors(1))
    with child(HOLD, folder) as process:
        assert wait_for_line(process) == "holding"
        writer.write(0, 2, tensors(2))
        assert writer.write(0, 3, tensors(3)) is None, "one slot is current, the other is held"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert writer.write(0, 3, tensors(3)) is not None
    assert found(reader).version == 3
    reader.close()
    writer.close()


WRITE = """
import sys
from pathlib import Path
import numpy as np
from rollstream.buffer.weights import WeightsWriter
writer = WeightsWriter(Path(sys.argv[1]), 1)
version = 0
while True:
    version += 1
    content = np.full(4_000_000, version % 251, np.uint8)
    writer.write(0, version, [("a", "uint8", (4_000_000,), memoryview(content))])
    if version == 1:
        print("writing", flush=True)
"""


def test_a_writer_killed_at_any_instant_leaves_a_whole_version_and_its_place_to_the_next(folder: Path) -> None:
    for delay_s in (0.0, 0.003, 0.0071):
        with child(WRITE, folder) as process:
            assert wait_for_line(process) == "writing"
            time.sleep(delay_s)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        reader = WeightsReader(folder)
        manifest = found(reader)
        with reader.open(manifest) as view:
            assert set(np.unique(np.frombuffer(view, np.uint8)).tolist()) == {manifest.version % 251}
        reader.close()
    writer = WeightsWriter(folder, 1)
    assert not (folder / "current").exists()
    writer.close()
    assert not folder.exists()


def test_a_reader_in_another_process_only_ever_sees_whole_versions(folder: Path) -> None:
    reader = WeightsReader(folder)
    seen: list[int] = []
    with child(WRITE, folder) as process:
        assert wait_for_line(process) == "writing"
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and len(seen) < 60:
            manifest = reader.poll()
            if manifest is not None:
                with reader.open(manifest) as view:
                    assert view[0] == view[len(view) // 2] == view[3_999_999] == manifest.version % 251
                seen.append(manifest.version)
    assert len(seen) > 5
    assert seen == sorted(set(seen))
    reader.close()
    assert remove_weights(folder)
    assert not folder.exists()
