"""How long amendments stay and in which form, and what a kill in between leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import amended
from rollstream.buffer.amendment_files import seal_files, sealed_files
from rollstream.buffer.amendments import AMENDMENTS, Amendment
from rollstream.buffer.sealed import SealedFile
from rollstream.errors import Refused


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Any]:
    """Three groups of two members, each in an append of its own with a file of amendments about it."""
    made = amended.Stream(tmp_path)
    made.made = []
    for append_id in (1, 2, 3):
        lease = made.lease()
        for member in (0, 1):
            made.books.receive(amended.played(lease, member), append_id)
        scores = [amended.score(lease, member, member + append_id / 8) for member in (0, 1)]
        made.amend(*scores)
        made.amendments.cut()
        made.made += scores
        assert made.books.batch(append_id) is not None
        made.books.trained(append_id)
    made.amendments.flush()
    made.ledger.commit()
    yield made
    made.close()


def sealed(stream: Any, up_to: int) -> list[SealedFile]:
    amendments = stream.amendments
    return seal_files(stream.folder / "amendments", stream.ledger, amendments.files.unsealed(amendments.first_open), up_to, threading.Event(), AMENDMENTS)


def names(stream: Any) -> list[str]:
    return sorted(path.name for path in (stream.folder / "amendments").iterdir())


def record(stream: Any, done: list[SealedFile], *, unlink: bool = True) -> None:
    paths = [stream.amendments.files.put(one) for one in done]
    stream.ledger.commit()
    for path in paths if unlink else ():
        path.unlink()


def test_files_are_sealed_with_the_rows_they_are_about_and_read_as_before(stream: Any) -> None:
    done = sealed(stream, up_to=2)
    assert [one.segment for one in done] == [1, 2]
    record(stream, done)
    assert names(stream) == ["000001.parquet", "000002.parquet", "000003.arrows"]
    assert stream.logged() == stream.made
    assert [Amendment(**row) for row in pq.read_table(stream.folder / "amendments" / "000001.parquet").to_pylist()] == stream.made[:2]
    assert sealed(stream, up_to=2) == [], "once is enough"
    again = stream.reopened()
    assert again.logged() == stream.made
    assert again.amendments.known(stream.made[0]) == stream.made[0].value
    again.close()
    stream.__init__(stream.folder)


def test_a_late_word_on_an_old_row_stays_as_long_as_the_newest_row_of_its_file(stream: Any) -> None:
    late = stream.made[0]._replace(column="judge/style", value=3.0)
    newest = stream.made[-1]._replace(column="judge/style", value=4.0)
    stream.amend(late, newest)
    stream.amendments.cut()
    assert [one.segment for one in sealed(stream, up_to=2)] == [1, 2]
    assert [path.name for path in stream.amendments.files.remove(stream.amendments.first_open, 2)] == ["000001.arrows", "000002.arrows"]
    assert set(stream.made[4:]) | {late, newest} == set(stream.logged())


def test_with_the_rows_go_their_amendments_and_rewards_stay(stream: Any) -> None:
    record(stream, sealed(stream, up_to=1))
    gone = stream.amendments.files.remove(stream.amendments.first_open, 2)
    stream.ledger.commit()
    assert [path.name for path in gone] == ["000001.parquet", "000002.arrows"]
    for path in gone:
        path.unlink()
    again = stream.reopened()
    assert again.logged() == stream.made[4:]
    assert [member.reward for member in again.ledger.members(0)] == [0.125, 1.125]
    again.close()
    stream.__init__(stream.folder)


def test_nothing_is_said_any_more_of_rows_that_retention_removed(stream: Any) -> None:
    stream.ledger.put_segment(SealedFile(1, 2, 9, "0", 4))
    stream.ledger.remove_segment(1)
    with pytest.raises(Refused, match=r"its rows were removed by retention \(buffer\.keep_gb\)"):
        stream.amend(stream.made[0]._replace(column="judge/style"))
    assert stream.amend(stream.made[4]._replace(column="judge/style")) == 1


def test_a_file_that_is_still_written_is_neither_sealed_nor_removed(stream: Any) -> None:
    stream.amend(stream.made[0]._replace(column="judge/style"))
    assert 4 not in [one.segment for one in sealed(stream, up_to=99)]
    assert all(path.stem != "000004" for path in stream.amendments.files.remove(stream.amendments.first_open, 99))


@pytest.mark.parametrize("moment", ["half written", "not recorded", "original not removed", "removal recorded"])
def test_a_kill_at_any_moment_leaves_one_good_copy_or_none_where_it_is_to_go(stream: Any, moment: str) -> None:
    folder = stream.folder / "amendments"
    wanted, files = stream.made, ["000001.arrows", "000002.arrows", "000003.arrows"]
    if moment == "half written":
        (folder / "000001.parquet.tmp").write_bytes(b"PAR1")
    elif moment == "not recorded":
        sealed(stream, up_to=1)
    elif moment == "original not removed":
        record(stream, sealed(stream, up_to=1), unlink=False)
        files[0] = "000001.parquet"
    else:
        record(stream, sealed(stream, up_to=1))
        stream.amendments.files.remove(stream.amendments.first_open, 2)
        stream.ledger.commit()
        wanted, files = stream.made[4:], files[2:]
    again = stream.reopened()
    assert names(again) == files
    assert again.logged() == wanted
    assert set(sealed_files(again.ledger)) == ({1} if moment == "original not removed" else set())
    again.close()
    stream.__init__(stream.folder)
