"""The log on disk: what was flushed is there, what was never recorded is cut, what is damaged is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from rollstream.buffer.columns import decode, encode, frame_checksum, to_frame
from rollstream.buffer.log import Location, Log
from rollstream.buffer.types import Segment, Trajectory, TrajectoryKey
from rollstream.errors import Corrupt, RunFolderError, StreamError


def frame_of(member: int, num_tokens: int = 8) -> pa.Buffer:
    mask = np.ones(num_tokens, np.uint8)
    zeros = np.zeros(1, np.int32)
    segment = Segment(np.arange(num_tokens, dtype=np.int32), mask, np.zeros(num_tokens, np.float32), zeros, zeros, zeros, ("assistant",), (None,))
    return to_frame(encode([Trajectory(TrajectoryKey(0, 0, member, 0), "Acme/Calculator-v0", 0, 0, "train", (segment,), 1.0, "terminated", "terminated")]))


def append(log: Log, member: int, num_tokens: int = 8) -> Location:
    frame = frame_of(member, num_tokens)
    return log.append(frame, frame_checksum(frame))


def member_of(batch: pa.RecordBatch) -> int:
    (trajectory,) = decode(batch)
    return trajectory.key.member


def ends(*locations: Location) -> dict[int, int]:
    return {location.segment: location.offset + location.size_bytes for location in locations}


def opened(folder: Path, segment_bytes: int = 2**30) -> Log:
    return Log(folder / "stream", segment_bytes=segment_bytes)


def test_appends_are_read_back_by_location(tmp_path: Path) -> None:
    log = opened(tmp_path)
    locations = [append(log, member) for member in range(5)]
    log.flush()
    assert [member_of(log.read(location)) for location in reversed(locations)] == [4, 3, 2, 1, 0]
    log.close()


def test_an_arrow_reader_sees_every_whole_append_while_the_log_grows(tmp_path: Path) -> None:
    log = opened(tmp_path)
    location = append(log, 0)
    append(log, 1)
    log.flush()
    with ipc.open_stream(pa.memory_map(str(log.path(location.segment)))) as reader:
        assert reader.read_all().column("member").to_pylist() == [0, 1]
    log.close()
    with ipc.open_stream(pa.memory_map(str(tmp_path / "stream" / "000001.arrows"))) as reader:
        assert reader.read_all().num_rows == 2


def test_nothing_reaches_the_file_before_the_flush_and_all_of_it_after(tmp_path: Path) -> None:
    log = opened(tmp_path)
    location = append(log, 0)
    assert not log.path(1).exists()
    log.flush()
    assert log.path(1).stat().st_size == location.offset + location.size_bytes
    log.close()


def test_a_full_segment_is_followed_by_the_next_and_a_new_start_opens_its_own(tmp_path: Path) -> None:
    log = opened(tmp_path, segment_bytes=16_000)
    locations = [append(log, member, 500) for member in range(6)]
    log.flush()
    log.close()
    assert [location.segment for location in locations] == [1, 1, 2, 2, 3, 3]
    log = opened(tmp_path)
    log.recover(ends(*locations), [])
    assert append(log, 9).segment == 4
    log.flush()
    assert member_of(log.read(locations[3])) == 3
    log.close()


def test_what_was_written_but_never_recorded_is_cut(tmp_path: Path) -> None:
    log = opened(tmp_path)
    recorded, _ = append(log, 0), append(log, 1)
    log.flush()
    path = log.path(1)
    os.close(log._lock)  # as if killed: no end of stream is written
    log = opened(tmp_path)
    assert log.recover(ends(recorded), [(1, recorded)]) == []
    assert path.stat().st_size == recorded.offset + recorded.size_bytes
    assert member_of(log.read(recorded)) == 0
    log.close()


def test_a_segment_nothing_of_which_was_recorded_goes(tmp_path: Path) -> None:
    log = opened(tmp_path)
    append(log, 0)
    log.close()
    log = opened(tmp_path)
    assert log.recover({}, []) == []
    assert list((tmp_path / "stream").iterdir()) == []
    log.close()


@pytest.mark.parametrize("damage", ["cut", "zeros"])
def test_after_power_loss_the_log_is_cut_at_the_last_good_append_and_the_lost_ones_are_named(tmp_path: Path, damage: str) -> None:
    log = opened(tmp_path)
    locations = [append(log, member) for member in range(4)]
    log.close()
    path = tmp_path / "stream" / "000001.arrows"
    with path.open("r+b") as file:
        file.seek(locations[2].offset + 100)
        if damage == "cut":
            file.truncate()
        else:
            file.write(bytes(500))
    log = opened(tmp_path)
    assert log.recover(ends(*locations), list(enumerate(locations, 1))) == [3, 4]
    assert path.stat().st_size == locations[2].offset
    assert [member_of(log.read(location)) for location in locations[:2]] == [0, 1]
    log.close()


def test_a_missing_segment_loses_its_appends_only(tmp_path: Path) -> None:
    log = opened(tmp_path, segment_bytes=1)
    locations = [append(log, member) for member in range(3)]
    log.close()
    (tmp_path / "stream" / "000002.arrows").unlink()
    log = opened(tmp_path)
    assert log.recover(ends(*locations), list(enumerate(locations, 1))) == [2]
    log.close()


def test_damaged_rows_are_named_with_their_place(tmp_path: Path) -> None:
    log = opened(tmp_path)
    location = append(log, 0)
    log.flush()
    with log.path(1).open("r+b") as file:
        file.seek(location.offset + location.size_bytes - 1000)
        file.write(b"\x55" * 4)
    with pytest.raises(Corrupt, match=rf"000001\.arrows at {location.offset}: .*checksum"):
        log.read(location)
    log.close()


def test_rows_read_stay_valid_when_the_mappings_are_released_and_the_log_closed(tmp_path: Path) -> None:
    log = opened(tmp_path)
    location = append(log, 3)
    log.flush()
    batch = log.read(location)
    log.release()
    append(log, 4)
    log.close()
    assert member_of(batch) == 3


def test_a_second_buffer_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    log = opened(tmp_path)
    with pytest.raises(RunFolderError, match="in use by another buffer"):
        opened(tmp_path)
    log.close()
    opened(tmp_path).close()


def test_a_disk_that_takes_no_more_is_an_error_with_the_path(tmp_path: Path) -> None:
    log = opened(tmp_path)
    append(log, 0)
    log.flush()
    assert log._file is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file)
    os.close(full)
    append(log, 1)
    with pytest.raises(StreamError, match=r"cannot append to .*000001\.arrows: No space left on device"):
        log.flush()
    os.close(log._file)
    os.close(log._lock)


def test_a_synced_log_can_be_synced_again_and_closed(tmp_path: Path) -> None:
    log = opened(tmp_path, segment_bytes=1)
    append(log, 0)
    append(log, 1)
    log.sync()
    log.sync()
    log.close()


def test_a_segment_that_was_sealed_since_the_last_sync_is_not_missed_by_the_next(tmp_path: Path) -> None:
    """All of its appends were synced while it was the newest; another began; then it was sealed, and went."""
    log = opened(tmp_path, segment_bytes=1)
    first = append(log, 0)
    log.sync()
    append(log, 1)
    log.flush()
    log.path(first.segment).unlink()
    log.sync()
    log.close()
    assert [path.name for path in log.folder.iterdir()] == ["000002.arrows"]
