"""What happens to segments between the moment they are listed and the moment they are read: each way, at that very moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.buffer.books import Books
from rollstream.buffer.columns import Rows, encode, frame_checksum, to_frame
from rollstream.buffer.facts import facts
from rollstream.buffer.inspect import Filter, Inspector
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.log import Location, Log
from rollstream.buffer.recorded import Recorded
from rollstream.buffer.sealed import seal, sealed_path
from rollstream.buffer.types import Segment, Trajectory, TrajectoryKey
from rollstream.buffer.window import Rules
from rollstream.errors import ConfigError, Corrupt

RULES = Rules(1, 2, 0, 0, 0, 1, 1, None, False, (("Acme/Calculator-v0", 1.0),), 3, 1_000_000)
COUNT = "SELECT count(*) n, count(DISTINCT (group_id, member)) d FROM trajectories"


class Writer:
    """Four versions of one group each, every group in a segment of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "stream"
        self.ledger, self.log = Ledger(folder / "ledger.sqlite", "run-a"), Log(self.folder, segment_bytes=1)
        books = Books(self.ledger, RULES)
        for version in range(1, 5):
            lease = books.grant("actor-0", 0.0)
            assert lease is not None
            one = np.zeros(1, np.int32)
            tokens = (np.arange(4, dtype=np.int32) + version, np.array([0, 1, 1, 1], np.uint8), np.zeros(4, np.float32))
            segment = Segment(*tokens, one, one + version - 1, one, ("assistant",), (None,))
            keys = [TrajectoryKey(0, lease.group_id, member, lease.attempt) for member in (0, 1)]
            task = (lease.env_id, lease.task_index, lease.seed)
            batch = encode([Trajectory(key, *task, "train", (segment,), float(key.member), "terminated", "terminated") for key in keys])
            assert {books.receive(fact, version) for fact in facts(Rows(batch))} == {"store"}
            frame = to_frame(batch)
            self.ledger.put_append(version, self.log.append(frame, frame_checksum(frame)), batch.num_rows, 2)
            assert books.batch(version) is not None
            books.trained(version)
        self.log.flush()
        self.ledger.commit()

    def seal(self, number: int) -> None:
        """As the sealer does: copy, record, remove."""
        sealed = seal(self.log.path(number), sealed_path(self.folder, number), self.ledger.next_segment(number - 1), threading.Event())
        assert sealed is not None
        self.ledger.put_segment(sealed)
        self.ledger.commit()
        self.log.path(number).unlink()

    def remove(self, number: int) -> None:
        """As retention does."""
        self.ledger.remove_segment(number)
        self.ledger.commit()
        sealed_path(self.folder, number).unlink()

    def seal_and_remove(self, number: int) -> None:
        self.seal(number)
        self.remove(number)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path)
    yield made
    made.log.close()
    made.ledger.close()


@pytest.mark.parametrize(("happens", "num_removed"), [("seal", 0), ("seal_and_remove", 2)])
def test_an_export_goes_on_while_segments_are_sealed_and_removed(tmp_path: Path, writer: Writer, happens: str, num_removed: int) -> None:
    writer.seal(2)
    with Inspector(tmp_path) as inspector:
        listed = inspector.listed(Filter())
        tables = inspector.tables(listed)
        found = next(tables).num_rows
        getattr(writer, happens)(3)
        found += sum(table.num_rows for table in tables)
        assert (found, inspector.num_removed) == (8 - num_removed, num_removed)


@pytest.mark.parametrize(("happens", "num"), [("seal", 8), ("seal_and_remove", 6)])
def test_a_statement_finds_each_row_once_whatever_becomes_of_a_segment_it_has_listed(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch, happens: str, num: int
) -> None:
    writer.seal(1)
    with Inspector(tmp_path) as inspector:
        read, moment = inspector._segments.read, [lambda: getattr(writer, happens)(2)]

        def read_later(location: Location) -> Any:
            if moment:
                moment.pop()()
            return read(location)

        monkeypatch.setattr(inspector._segments, "read", read_later)
        assert inspector.query(COUNT).to_pylist() == [{"n": num, "d": num}]


def test_a_statement_that_has_begun_keeps_the_sealed_files_that_retention_removes(tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        writer.seal(number)
    with Inspector(tmp_path) as inspector:
        opened: Callable[[int], Any] = inspector._segments.open_sealed

        def open_then_remove(segment: int) -> Any:
            file = opened(segment)
            writer.remove(segment)
            return file

        monkeypatch.setattr(inspector._segments, "open_sealed", open_then_remove)
        assert inspector.query(COUNT).to_pylist() == [{"n": 8, "d": 8}]
        monkeypatch.undo()
        assert inspector.query(COUNT).to_pylist() == [{"n": 4, "d": 4}]


def test_a_statement_reads_what_retention_removes_at_the_last_moment(tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb

    writer.seal(1)

    class Database:
        """DuckDB, but retention comes just before the statement."""

        def __init__(self) -> None:
            self.real = connect()

        def __enter__(self) -> Database:
            return self

        def __exit__(self, *_: object) -> None:
            self.real.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def sql(self, statement: str) -> Any:
            writer.remove(1)
            return self.real.sql(statement)

    connect = duckdb.connect
    monkeypatch.setattr(duckdb, "connect", Database)
    with Inspector(tmp_path) as inspector:
        assert inspector.query(COUNT).to_pylist() == [{"n": 8, "d": 8}]


def test_a_statement_leaves_out_a_sealed_file_that_went_before_it_was_opened(tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.seal(1)
    with Inspector(tmp_path) as inspector:
        opened = inspector._segments.open_sealed

        def remove_then_open(segment: int) -> Any:
            writer.remove(segment)
            return opened(segment)

        monkeypatch.setattr(inspector._segments, "open_sealed", remove_then_open)
        assert inspector.query(COUNT).to_pylist() == [{"n": 6, "d": 6}]


def test_one_trajectory_and_one_batch_whose_rows_go_meanwhile_are_said_to_be_removed(tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.seal(1)
    with Inspector(tmp_path) as inspector, Recorded(tmp_path) as recorded:
        for reader in (inspector, recorded):
            read = reader._segments._files.read

            def read_later(location: Location, read: Any = read) -> Any:
                if sealed_path(writer.folder, 1).exists():
                    writer.remove(1)
                return read(location)

            monkeypatch.setattr(reader._segments._files, "read", read_later)
        with pytest.raises(ConfigError, match="were removed by retention"):
            inspector.trajectory(0, 0)
        with pytest.raises(ConfigError, match="were removed by retention"):
            recorded.batch(1)


def test_a_file_that_is_gone_without_the_ledger_knowing_is_damage(tmp_path: Path, writer: Writer) -> None:
    writer.seal(1)
    sealed_path(writer.folder, 1).unlink()
    with Inspector(tmp_path) as inspector, pytest.raises(Corrupt):
        inspector.trajectory(0, 0)
    with Inspector(tmp_path) as inspector, pytest.raises(Corrupt):
        inspector.query(COUNT)
