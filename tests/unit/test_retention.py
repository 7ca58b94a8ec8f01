"""Versions kept for evaluations, in both weights channels: readable as long as they are wanted, bounded, and never in the writer's way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.buffer.channels import Publishing, Subscription
from rollstream.buffer.file_weights import FileReader, FileWriter
from rollstream.buffer.manifest import Manifest
from rollstream.buffer.retention import find_retained
from rollstream.buffer.weights import WeightsReader, WeightsWriter
from rollstream.errors import WeightsGone


def shared_memory(folder: Path, room: int) -> WeightsWriter:
    return WeightsWriter(folder, 1, room)


Channel = tuple[Callable[..., Publishing], Callable[[Path], Subscription]]
CHANNELS: dict[str, Channel] = {
    "shm": (shared_memory, WeightsReader),
    "files": (FileWriter, lambda folder: FileReader(folder, "evaluator-0")),
}


@pytest.fixture(params=CHANNELS)
def channel(request: pytest.FixtureRequest) -> Channel:
    return CHANNELS[request.param]


@contextlib.contextmanager
def writing(folder: Path, channel: Channel, room: int) -> Generator[Publishing]:
    writer = channel[0](folder, room)
    try:
        yield writer
    finally:
        writer.close()


def write(writer: Publishing, version: int) -> Manifest:
    values = np.full(64, version, np.uint8)
    manifest = writer.write(0, version, [("weight", "uint8", values.shape, memoryview(values))])
    assert manifest is not None, f"version {version} found no slot"
    return manifest


def read(reader: Subscription, manifest: Manifest | None) -> int:
    assert manifest is not None
    with reader.open(manifest) as view:
        return view[0]


def test_a_kept_version_is_read_long_after_it_was_replaced_and_until_it_is_wanted_no_more(tmp_path: Path, channel: Channel) -> None:
    folder = tmp_path / "weights"
    with writing(folder, channel, 1) as writer:
        kept = write(writer, 3)
        assert writer.retention.keep(kept)
        reader = channel[1](folder)
        for version in range(4, 24):
            write(writer, version)
            assert read(reader, find_retained(folder, 0, 3)) == 3
            assert find_retained(folder, 0, version) is None
        writer.retention.want([(0, 99)])
        for version in range(24, 30):
            write(writer, version)
        assert find_retained(folder, 0, 3) is None
        with pytest.raises(WeightsGone):
            read(reader, kept)
        reader.close()


def test_a_version_that_finds_no_room_is_not_kept_and_the_reason_names_who_has_it(tmp_path: Path, channel: Channel) -> None:
    with writing(tmp_path / "weights", channel, 2) as writer:
        assert writer.retention.keep(write(writer, 1))
        assert writer.retention.keep(write(writer, 2))
        refused = write(writer, 3)
        assert not writer.retention.keep(refused)
        assert (
            writer.retention.full
            == "evaluation.retain 2: kept for evaluations that go on are versions 1, 2; raise it, or evaluate less often (evaluation.every)"
        )
        assert find_retained(tmp_path / "weights", 0, 3) is None
        assert writer.retention.keep(refused, last=True), "nothing is written after the last version, so it needs no room"


def test_readers_of_old_versions_never_leave_the_writer_without_a_slot(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    with writing(folder, CHANNELS["shm"], 2) as writer, contextlib.ExitStack() as held:
        actor, evaluators = WeightsReader(folder), [WeightsReader(folder) for _ in range(4)]
        write(writer, 0)
        found: Any = actor.poll()
        held.enter_context(actor.open(found))
        for version in range(1, 60):
            manifest = write(writer, version)
            if version % 5 == 0 and writer.retention.keep(manifest):
                kept: Any = find_retained(folder, 0, version)
                held.enter_context(evaluators.pop().open(kept))  # read for ever, by an evaluator that is stuck
            writer.retention.want([])
        assert len(evaluators) == 2, "two slots are kept, let go of, and still read: there is no room for a third"
