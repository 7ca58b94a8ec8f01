"""Scores that come after the rows: what waits for them, what is taken, what is refused, and what is on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from amended import Stream, played, score
from rollstream.buffer.amendments import AMENDMENTS, REWARD, WHOLE, Amendment, Amendments, decode_amendments, encode_amendments
from rollstream.buffer.columns import frame_checksum
from rollstream.errors import Corrupt, DataRefused, Refused

GOLDEN = Path(__file__).parents[1] / "golden" / "amendments_v1.json"


@pytest.fixture
def stream(tmp_path: Path) -> Any:
    made = Stream(tmp_path)
    yield made
    made.close()


# --- waiting ------------------------------------------------------------------------------------------------------------------------


def test_a_group_that_is_played_and_not_scored_waits_for_its_scores_and_is_leased_to_nobody(stream: Any) -> None:
    lease = stream.lease()
    stream.books.receive(played(lease, 0, 0.5), 1)
    stream.books.receive(played(lease, 1), 1)
    assert (stream.books.counts["open"], stream.books.held("actor-0")) == (1, frozenset())
    assert stream.books.grant("actor-1", 1.0) is None
    assert "1 await their score" in stream.books.waits_for()
    assert stream.amend(score(lease, 1, 0.25)) == 1
    assert stream.books.counts["ready"] == 1
    batch = stream.books.batch(1)
    assert batch is not None
    assert [member.reward for member in stream.ledger.members(lease.group_id)] == [0.5, 0.25]


def test_a_score_may_come_before_the_group_is_whole(stream: Any) -> None:
    lease = stream.lease()
    stream.books.receive(played(lease, 0), 1)
    assert stream.amend(score(lease, 0)) == 1
    assert stream.books.counts["open"] == 1
    stream.books.receive(played(lease, 1, 0.0), 1)
    assert stream.books.counts["ready"] == 1


def test_scores_that_do_not_come_leave_the_group_to_those_it_has_or_end_it(stream: Any) -> None:
    first = stream.lease()
    stream.books.receive(played(first, 0, 0.5), 1)
    stream.books.receive(played(first, 1), 1)
    stream.books.close_late(0.0)
    stream.books.close_late(59.0)
    assert stream.books.counts["open"] == 1
    stream.books.close_late(60.0)
    assert stream.books.counts["ready"] == 1
    with pytest.raises(Refused, match=r"its group no longer waits for scores \(buffer\.score_timeout_s 60\)"):
        stream.amend(score(first, 1))
    assert stream.books.batch(1) is not None
    stream.books.trained(1)
    second = stream.lease()
    for member in (0, 1):
        stream.books.receive(played(second, member), 2)
    stream.books.close_late(100.0)
    stream.books.close_late(160.0)
    row = stream.ledger.group(second.group_id)
    assert row is not None
    assert (row.state, row.reason) == ("dropped", "unscored")
    assert stream.books.counters["scores_missing"] == 3


def test_what_waits_still_waits_after_a_restart(stream: Any) -> None:
    lease = stream.lease()
    for member in (0, 1):
        stream.books.receive(played(lease, member), 1)
    stream.amend(score(lease, 0))
    again = stream.reopened()
    try:
        assert again.books.grant("actor-1", 0.0) is None
        again.books.claim("actor-0", [lease.group_id], 0.0)
        assert again.books.held("actor-0") == frozenset()
        assert again.amend(score(lease, 0), score(lease, 1, 0.0)) == 1
        assert again.books.counts["ready"] == 1
    finally:
        again.close()
        stream.__init__(stream.folder)


# --- what is taken ------------------------------------------------------------------------------------------------------------------


def test_the_first_amendment_stands_the_same_again_is_known_and_another_value_is_refused_whole(stream: Any) -> None:
    lease = stream.lease()
    stream.books.receive(played(lease, 0), 1)
    assert stream.amend(score(lease, 0, 0.5), score(lease, 0, 0.5, source="another judge")) == 1
    assert stream.amend(score(lease, 0, 0.5)) == 0
    with pytest.raises(Refused, match=r"reward of group 0 member 0 attempt 0 was given 0\.5 before, now 0\.75: the first one stands"):
        stream.amend(score(lease, 0, 2.0, column="judge/style"), score(lease, 0, 0.75))
    assert [amendment.column for amendment in stream.logged()] == [REWARD]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"member": 1}, "no such row is committed"),
        ({"attempt": 4}, "no such row is committed"),
        ({"lineage": 2}, "no such row is committed"),
        ({"group_id": 77}, "no such row is committed"),
        ({"value": float("nan")}, "only finite numbers"),
        ({"segment": 0}, "a reward is of a whole trajectory"),
    ],
)
def test_amendments_of_what_is_not_there_or_cannot_be_are_refused(stream: Any, changes: dict[str, Any], reason: str) -> None:
    lease = stream.lease()
    stream.books.receive(played(lease, 0), 1)
    with pytest.raises(Refused, match=reason):
        stream.amend(score(lease, 0)._replace(**changes))
    assert stream.logged() == []


def test_a_reward_is_taken_only_where_one_is_awaited_other_columns_at_any_time(stream: Any) -> None:
    lease = stream.lease()
    stream.books.receive(played(lease, 0, 0.5), 1)
    stream.books.receive(played(lease, 1, status="failed", stop_reason="env"), 1)
    for member, why in ((0, "has its reward"), (1, "failed")):
        with pytest.raises(Refused, match=why):
            stream.amend(score(lease, member))
    assert stream.books.batch(1) is not None
    assert stream.amend(score(lease, 0, 0.9, column="judge/style"), score(lease, 1, 0.1, column="judge/style", segment=0)) == 2


# --- on the disk --------------------------------------------------------------------------------------------------------------------


def test_amendments_lie_in_segments_that_any_arrow_reader_opens(stream: Any) -> None:
    lease = stream.lease()
    stream.books.receive(played(lease, 0), 1)
    made = [score(lease, 0, 0.5), *(score(lease, 0, float(place), column=f"judge/{place}") for place in range(9))]
    for amendment in made:
        stream.amend(amendment)
    assert stream.logged() == made
    stream.amendments.close()
    files = sorted((stream.folder / "amendments").glob("*.arrows"))
    assert len(files) > 1, "a segment that has its size is closed"
    rows = [row for path in files for row in pa.ipc.open_stream(path.read_bytes()).read_all().to_pylist()]
    assert [Amendment(**row) for row in rows] == made
    stream.amendments = Amendments(stream.folder / "amendments", stream.ledger, segment_bytes=4000)


def test_what_the_log_lost_with_the_power_is_written_again_from_the_ledger(stream: Any) -> None:
    lease = stream.lease()
    stream.books.receive(played(lease, 0), 1)
    made = [score(lease, 0, 0.5), score(lease, 0, 0.9, column="judge/style")]
    for amendment in made:
        stream.amend(amendment)
    stream.close()
    (path,) = (stream.folder / "amendments").glob("*.arrows")
    path.write_bytes(path.read_bytes()[:-200])
    stream.__init__(stream.folder)
    assert sorted(stream.logged()) == sorted(made)


def test_amendments_are_encoded_as_the_golden_file_has_them() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert {field.name: str(field.type) for field in AMENDMENTS} == golden["schema"]
    frame = pa.py_buffer(bytes.fromhex(golden["frame"]))
    made = [Amendment(**values) for values in golden["amendments"]]
    assert decode_amendments(frame, frame_checksum(frame)) == made
    again = encode_amendments(made)
    assert decode_amendments(again, frame_checksum(again)) == made


def test_damaged_and_malformed_amendments_are_refused() -> None:
    frame = encode_amendments([Amendment(0, 1, 2, WHOLE, 0, REWARD, 0.5, "judge", 1.0)])
    damaged = bytearray(frame.to_pybytes())
    damaged[-9] ^= 1
    with pytest.raises(Corrupt):
        decode_amendments(pa.py_buffer(bytes(damaged)), frame_checksum(frame))
    with pytest.raises(DataRefused, match="is no name of a column to amend"):
        encode_amendments([Amendment(0, 1, 2, WHOLE, 0, "Reward!", 0.5, "judge", 1.0)])
    with pytest.raises(DataRefused, match="do not fit their columns"):
        encode_amendments([Amendment(0, 1, 2**40, WHOLE, 0, REWARD, 0.5, "judge", 1.0)])
