"""The weights channel on a shared file system: whole versions, kept while they are read, gone when nobody reads them."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from rollstream.buffer import file_weights
from rollstream.buffer.channels import publish_to, subscribe_to
from rollstream.buffer.file_weights import FileReader, FileWriter
from rollstream.buffer.manifest import Manifest, WeightTensor
from rollstream.buffer.weights import WeightsReader, WeightsWriter, remove_weights
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.errors import WeightsError, WeightsGone


def tensors(value: int, size: int = 1000) -> list[WeightTensor]:
    """Two tensors whose every byte is ``value``; the second is odd-sized, so padding follows."""
    first = np.full((4, size), value, np.uint8)
    second = np.full(7, value, np.uint8)
    return [("a.weight", "bfloat16", (4, size // 2), memoryview(first)), ("b.bias", "uint8", (7,), memoryview(second))]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[FileWriter]:
    writer = FileWriter(tmp_path / "weights")
    yield writer
    writer.close()


@pytest.fixture
def reader(writer: FileWriter, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileReader]:
    monkeypatch.setattr(file_weights, "_LOOK_S", 0.0)
    reader = FileReader(writer.folder, "actor-0")
    yield reader
    reader.close()


def found(reader: FileReader) -> Manifest:
    manifest = reader.poll()
    assert manifest is not None
    return manifest


def files(writer: FileWriter) -> list[int]:
    return sorted(int(path.stem) for path in writer.folder.glob("*.weights"))


def test_a_reader_gets_the_bytes_the_writer_gave(writer: FileWriter, reader: FileReader) -> None:
    assert reader.poll() is None
    written = writer.write(0, 3, tensors(7))
    manifest = found(reader)
    assert manifest == written
    with reader.open(manifest) as view:
        assert xxhash.xxh3_128_hexdigest(view) == manifest.digest
        for spec, (name, dtype, shape, content) in zip(manifest.tensors, tensors(7), strict=True):
            assert (spec.name, spec.dtype, spec.shape) == (name, dtype, shape)
            assert bytes(view[spec.offset : spec.offset + spec.size_bytes]) == content.tobytes()


def test_a_version_has_the_same_digest_and_layout_in_shared_memory(writer: FileWriter, tmp_path: Path) -> None:
    shared = WeightsWriter(tmp_path / "shared", 1)
    one, other = writer.write(0, 1, tensors(5)), shared.write(0, 1, tensors(5))
    assert other is not None
    assert (one.digest, one.size_bytes, one.tensors) == (other.digest, other.size_bytes, other.tensors)
    shared.close()


def test_an_opened_version_is_not_offered_again_and_the_next_one_is(writer: FileWriter, reader: FileReader) -> None:
    writer.write(0, 1, tensors(1))
    assert found(reader) == found(reader), "a version that was not opened stays on offer"
    with reader.open(found(reader)):
        assert reader.poll() is None
    writer.write(0, 2, tensors(2))
    assert found(reader).version == 2


def test_an_older_number_is_new_when_a_resumed_run_publishes_it(writer: FileWriter, reader: FileReader) -> None:
    writer.write(0, 9, tensors(9))
    with reader.open(found(reader)):
        pass
    writer.close()
    again = FileWriter(writer.folder)
    again.write(1, 5, tensors(5))
    manifest = found(reader)
    assert (manifest.lineage, manifest.version) == (1, 5)
    with reader.open(manifest) as view:
        assert view[0] == 5
    again.close()


def test_a_version_stays_while_a_reader_wants_it_and_goes_afterwards(writer: FileWriter, reader: FileReader) -> None:
    writer.write(0, 1, tensors(1))
    manifest = found(reader)
    for version in range(2, 20):
        writer.write(0, version, tensors(version))
    assert files(writer) == [1, 17, 18, 19]
    with reader.open(manifest) as view:
        assert view[0] == 1
    writer.write(0, 20, tensors(20))
    assert files(writer) == [18, 19, 20]
    assert found(reader).version == 20


def test_a_reader_that_died_keeps_nothing_for_longer_than_its_lease(writer: FileWriter, reader: FileReader) -> None:
    writer.write(0, 1, tensors(1))
    found(reader)
    (note,) = writer.folder.glob("reading-*")
    before = time.time() - file_weights.LEASE_S - 5
    os.utime(note, (before, before))
    for version in range(2, 5):
        writer.write(0, version, tensors(version))
    assert files(writer) == [2, 3, 4]
    assert not note.exists()


def test_a_reader_that_waits_to_load_renews_its_lease(writer: FileWriter, reader: FileReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_weights, "_RENEW_S", 0.0)
    writer.write(0, 1, tensors(1))
    found(reader)
    (note,) = writer.folder.glob("reading-*")
    os.utime(note, (0, 0))
    found(reader)
    assert time.time() - note.stat().st_mtime < 5


def test_a_version_that_was_removed_says_poll_again_and_the_next_poll_finds_the_new_one(writer: FileWriter, reader: FileReader) -> None:
    old = writer.write(0, 1, tensors(1))
    for version in range(2, 6):
        writer.write(0, version, tensors(version))
    with pytest.raises(WeightsGone, match="poll again"), reader.open(old):
        pass
    with reader.open(found(reader)) as view:
        assert view[0] == 5


@pytest.mark.parametrize("damage", ["byte", "tail"])
def test_changed_and_missing_bytes_are_refused(writer: FileWriter, reader: FileReader, damage: str) -> None:
    manifest = writer.write(0, 1, tensors(1))
    path = writer.folder / f"{manifest.slot:06d}.weights"
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\x02" + content[101:] if damage == "byte" else content[:-1])
    with pytest.raises(WeightsError, match="not loaded") as caught, reader.open(found(reader)):
        pass
    assert not isinstance(caught.value, WeightsGone)


def test_bytes_that_are_those_of_a_newer_version_by_now_say_poll_again(writer: FileWriter, reader: FileReader) -> None:
    old = writer.write(0, 1, tensors(1))
    new = writer.write(0, 2, tensors(2))
    (writer.folder / f"{new.slot:06d}.weights").rename(writer.folder / f"{old.slot:06d}.weights")
    with pytest.raises(WeightsGone, match="poll again"), reader.open(old):
        pass


def test_other_tensors_than_the_first_are_refused(writer: FileWriter) -> None:
    writer.write(0, 1, tensors(1))
    with pytest.raises(WeightsError, match=r"other tensors.*a\.weight"):
        writer.write(0, 2, tensors(1, size=2000))


def test_a_second_writer_is_refused_and_the_folder_goes_with_the_first(writer: FileWriter) -> None:
    with pytest.raises(WeightsError, match="has a writer already"):
        FileWriter(writer.folder)
    assert not remove_weights(writer.folder)
    writer.close()
    assert not writer.folder.exists()


def test_a_full_file_system_is_said_with_numbers_before_anything_is_written(writer: FileWriter) -> None:
    huge = mmap.mmap(-1, 1 << 42, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE: address space only
    with memoryview(huge) as content, pytest.raises(WeightsError, match=r"needs 13194\d+\.\d MB .* MB are free: free some"):
        writer.write(0, 1, [("huge", "uint8", (1 << 42,), content)])
    huge.close()
    assert files(writer) == []


def test_the_configuration_chooses_the_channel_and_where_it_lives(tmp_path: Path) -> None:
    for channel, kinds in (("files", (FileWriter, FileReader)), ("shm", (WeightsWriter, WeightsReader))):
        run = Run(tmp_path / "run", load_config("quickstart", [f"weights.channel={channel}"]), f"{channel}-{tmp_path}")
        writer, reader = publish_to(run, 1), subscribe_to(run, "actor-0")
        assert (type(writer), type(reader)) == kinds
        assert run.weights_folder.is_relative_to(run.folder) == (channel == "files")
        assert run.weights_folder.is_dir()
        reader.close()
        writer.close()
        assert not run.weights_folder.exists()


def test_shared_memory_makes_room_for_readers_that_joined(tmp_path: Path) -> None:
    writer = WeightsWriter(tmp_path / "shared", 0)
    readers = [WeightsReader(writer.folder) for _ in range(3)]
    held: list[Manifest] = []
    for version, reader in enumerate(readers[:2], 1):
        assert writer.write(0, version, tensors(version)) is not None
        manifest = reader.poll()
        assert manifest is not None
        held.append(manifest)
    assert writer.write(0, 3, tensors(3)) is None, "one slot is current, the other is held"
    writer.expect(2)
    assert writer.write(0, 3, tensors(3)) is not None
    with readers[0].open(held[0]) as view:
        assert view[0] == 1
    newest = readers[2].poll()
    assert newest is not None
    assert newest.version == 3
    for reader in readers:
        reader.close()
    writer.close()
