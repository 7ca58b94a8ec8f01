"""Trajectories as columns and frames: nothing is lost on the way, and nothing damaged gets through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from rollstream.buffer.columns import SCHEMA, SCHEMA_MESSAGE, Rows, aligned, decode, encode, frame_checksum, from_frame, rows_of, to_frame
from rollstream.buffer.facts import facts
from rollstream.buffer.types import MediaSpan, Segment, Trajectory, TrajectoryKey
from rollstream.errors import Corrupt, DataRefused

GOLDEN = Path(__file__).parents[1] / "golden" / "stream_schema_v1.json"


def segment(num_tokens: int = 12, *, prompt: int = 4, versions: tuple[int, ...] = (0,), **changes: Any) -> Segment:
    mask = np.ones(num_tokens, np.uint8)
    mask[:prompt] = 0
    starts = np.linspace(0, num_tokens, len(versions), endpoint=False).astype(np.int32)
    made = Segment(
        np.arange(num_tokens, dtype=np.int32) + 100,
        mask,
        np.where(mask == 1, -0.5, 0).astype(np.float32),
        starts,
        np.array(versions, np.int32),
        np.array([0, prompt], np.int32),
        ("user", "assistant"),
        (None, 0.25),
    )
    return msgspec.structs.replace(made, **changes)


def trajectory(member: int = 0, *segments: Segment, **changes: Any) -> Trajectory:
    made = Trajectory(
        TrajectoryKey(0, 7, member, 0),
        "Acme/Calculator-v0",
        3,
        99,
        "train",
        segments or (segment(),),
        1.0,
        "terminated",
        "terminated",
        {"exact": 1.0},
        {"success": 1.0},
    )
    return msgspec.structs.replace(made, **changes)


def assert_same(found: Trajectory, wanted: Trajectory) -> None:
    for field in msgspec.structs.fields(Trajectory):
        if field.name != "segments":
            assert getattr(found, field.name) == getattr(wanted, field.name), field.name
    assert len(found.segments) == len(wanted.segments)
    for ours, theirs in zip(found.segments, wanted.segments, strict=True):
        for field in msgspec.structs.fields(Segment):
            left, right = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(right, np.ndarray):
                np.testing.assert_array_equal(left, right, field.name)
                assert left.dtype == right.dtype
            else:
                assert left == right, field.name


reals = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(max_size=12)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    num_tokens = draw(st.integers(1, 20))
    mask = np.array([0, *draw(st.lists(st.integers(0, 1), min_size=num_tokens - 1, max_size=num_tokens - 1))], np.uint8)
    starts = sorted(draw(st.sets(st.integers(1, num_tokens - 1), max_size=3))) if num_tokens > 1 else []
    values = sorted(draw(st.lists(st.integers(0, 9), min_size=len(starts) + 1, max_size=len(starts) + 1)))
    images = sorted(draw(st.sets(st.integers(0, num_tokens - 1), max_size=2)))
    turns = sorted(draw(st.lists(st.integers(0, num_tokens), max_size=4)))
    return Segment(
        np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_tokens, max_size=num_tokens)), np.int32),
        mask,
        np.where(mask == 1, np.float32(-1.25), np.float32(0)).astype(np.float32),
        np.array([0, *starts], np.int32),
        np.array(values, np.int32),
        np.array(turns, np.int32),
        tuple(draw(names) for _ in turns),
        tuple(draw(st.none() | reals) for _ in turns),
        tuple(MediaSpan(draw(digests), "image/png", start, 1) for start in images if not mask[start]),
        draw(st.none() | st.lists(st.binary(max_size=4), max_size=2).map(tuple)),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    return [
        trajectory(
            member,
            *draw(st.lists(segments(), min_size=1, max_size=3)),
            reward=draw(st.none() | reals),
            reward_parts=draw(st.dictionaries(names, reals, max_size=2)),
            env_metrics=draw(st.dictionaries(names, reals, max_size=2)),
            messages=draw(names),
            actor_id=draw(names),
            started_at=draw(reals),
        )
        for member in range(draw(st.integers(1, 4)))
    ]


@given(trajectories())
@settings(max_examples=25, deadline=None)
def test_what_goes_in_comes_out_and_the_checksum_survives_every_trip(wanted: list[Trajectory]) -> None:
    batch = encode(wanted)
    frame = to_frame(batch)
    received = from_frame(aligned(frame.to_pybytes()), frame_checksum(frame))
    for found, original in zip(decode(received), wanted, strict=True):
        assert_same(found, original)
    assert frame_checksum(to_frame(received)) == frame_checksum(to_frame(batch)) == frame_checksum(frame)
    assert to_frame(received).equals(frame)
    assert len(facts(Rows(received))) == len(wanted)


def test_rows_taken_or_sliced_out_of_a_batch_travel_like_any_others() -> None:
    both = [trajectory(0, segment(5)), trajectory(1, segment(9, versions=(2, 3)), segment(4))]
    for part in (rows_of(encode(both), [1, 2]), encode(both).take(pa.array([1, 2])), encode(both).slice(1)):
        frame = to_frame(part)
        received = from_frame(frame, frame_checksum(frame))
        assert_same(decode(received)[0], both[1])
        assert frame_checksum(to_frame(received)) == frame_checksum(frame)


def test_chosen_rows_keep_their_order_whatever_lies_between_them() -> None:
    batch = encode([trajectory(member) for member in range(8)])
    for rows in ([0, 1, 2, 5, 7], [3], list(range(8)), [1, 3, 5]):
        assert [item.key.member for item in decode(rows_of(batch, rows))] == rows


def test_any_single_flipped_byte_of_a_frame_is_noticed() -> None:
    frame = to_frame(encode([trajectory()]))
    expected = frame_checksum(frame)
    for place in range(0, frame.size, 7):
        damaged = bytearray(frame.to_pybytes())
        damaged[place] ^= 0x20
        with pytest.raises(Corrupt):
            from_frame(aligned(bytes(damaged)), expected)


def test_a_cut_or_lengthened_frame_is_noticed() -> None:
    frame = to_frame(encode([trajectory()])).to_pybytes()
    expected = frame_checksum(aligned(frame))
    for damaged in (b"", frame[:-8], frame[: len(frame) // 2], frame + bytes(8), SCHEMA_MESSAGE):
        with pytest.raises(Corrupt):
            from_frame(aligned(damaged), expected)


def test_frames_after_the_schema_message_are_a_stream_any_arrow_reader_opens() -> None:
    frames = [to_frame(encode([trajectory(member)])) for member in range(3)]
    with ipc.open_stream(pa.py_buffer(SCHEMA_MESSAGE + b"".join(frame.to_pybytes() for frame in frames))) as reader:
        read = list(reader.iter_batches_with_custom_metadata())
    assert [batch.batch.column("member").to_pylist() for batch in read] == [[0], [1], [2]]
    assert [int(batch.custom_metadata[b"checksum"], 16) for batch in read] == [frame_checksum(frame) for frame in frames]


def test_the_schema_is_the_golden_one() -> None:
    found = {"schema_version": 1, "columns": [[field.name, str(field.type), field.nullable] for field in SCHEMA]}
    assert found == json.loads(GOLDEN.read_text()), "the stream's schema changed: raise SCHEMA_VERSION and add a new golden file"


def test_token_ids_beyond_int32_are_refused_rather_than_wrapped() -> None:
    with pytest.raises(DataRefused, match="do not fit a column of int32"):
        encode([trajectory(0, segment(token_ids=np.full(12, 2**31, np.int64)))])


def test_decoded_arrays_cannot_be_written() -> None:
    (found,) = decode(encode([trajectory()]))
    with pytest.raises(ValueError, match="read-only"):
        found.segments[0].token_ids[0] = 1


def test_facts_sum_up_a_trajectory_over_its_segments() -> None:
    one, two = facts(Rows(encode([trajectory(0, segment(10, prompt=4, versions=(3, 5)), segment(6, prompt=2, versions=(5,))), trajectory(1)])))
    assert (one.num_tokens, one.num_trained_tokens, one.min_version, one.max_version) == (16, 10, 3, 5)
    assert (one.first_row, one.num_rows, two.first_row, two.num_rows) == (0, 2, 2, 1)


def test_versions_of_tokens_we_did_not_sample_do_not_count() -> None:
    (fact,) = facts(Rows(encode([trajectory(0, segment(10, prompt=5, versions=(1, 4)))])))
    assert (fact.min_version, fact.max_version) == (4, 4)
    (nothing,) = facts(Rows(encode([trajectory(0, segment(10, prompt=10))])))
    assert (nothing.num_trained_tokens, nothing.min_version, nothing.max_version) == (0, None, None)


def test_facts_agree_with_the_slow_reckoning_token_by_token() -> None:
    rng = np.random.default_rng(5)
    wanted = [
        trajectory(
            member, *(segment(int(rng.integers(2, 30)), prompt=int(rng.integers(1, 3)), versions=tuple(sorted(rng.integers(0, 9, 2)))) for _ in range(3))
        )
        for member in range(40)
    ]
    for fact, original in zip(facts(Rows(encode(wanted))), wanted, strict=True):
        assert (fact.min_version, fact.max_version) == original.version_range()
        assert (fact.num_tokens, fact.num_trained_tokens) == (original.num_tokens, original.num_trained_tokens)


BAD_SEGMENTS = {
    "loss_mask and token_ids of different length": {"loss_mask": np.ones(11, np.uint8)},
    "behaviour_logprobs and token_ids of different length": {"behaviour_logprobs": np.zeros(13, np.float32)},
    "neither 0 nor 1": {"loss_mask": np.full(12, 2, np.uint8)},
    "not finite": {"behaviour_logprobs": np.where(np.arange(12) == 8, np.nan, 0).astype(np.float32)},
    "tokens the policy did not sample": {"behaviour_logprobs": np.full(12, -1, np.float32)},
    "policy versions that fall": {"version_starts": np.array([0, 3], np.int32), "version_values": np.array([4, 3], np.int32)},
    "version_starts that do not rise": {"version_starts": np.array([0, 3, 3], np.int32), "version_values": np.array([1, 2, 3], np.int32)},
    "begin at 0": {"version_starts": np.array([1], np.int32)},
    "no policy version": {"version_starts": np.empty(0, np.int32), "version_values": np.empty(0, np.int32)},
    "starts after its last token": {"version_starts": np.array([0, 12], np.int32), "version_values": np.array([1, 2], np.int32)},
    "version_starts and version_values of different length": {"version_values": np.array([1, 2], np.int32)},
    "negative policy version": {"version_values": np.array([-1], np.int32)},
    "turn_roles and turn_starts of different length": {"turn_roles": ("user",)},
    "turn_starts that fall": {"turn_starts": np.array([4, 0], np.int32)},
    "starts outside its tokens": {"turn_starts": np.array([0, 13], np.int32)},
    "other than a BLAKE3 hash": {"media": (MediaSpan("ab", "image/png", 0, 1),)},
    "an image outside its tokens": {"media": (MediaSpan("ab" * 32, "image/png", 11, 2),)},
    "images that overlap": {"media": (MediaSpan("ab" * 32, "image/png", 0, 2), MediaSpan("cd" * 32, "image/png", 1, 1))},
    "behaviour_logprobs above 0": {"behaviour_logprobs": np.where(np.arange(12) == 7, 0.01, -0.0).astype(np.float32)},
    "a negative token id": {"token_ids": np.where(np.arange(12) == 2, -7, 3).astype(np.int32)},
    "a turn_reward that is not finite": {"turn_rewards": (None, float("nan"))},
    "trains on its first token": {"loss_mask": np.array([1, *[0] * 3, *[1] * 8], np.uint8)},
    "has token id 50000: the policy knows 0 to 49999": {"token_ids": np.where(np.arange(12) == 2, 50_000, 49_999).astype(np.int32)},
    "an image at tokens the policy sampled": {"media": (MediaSpan("ab" * 32, "image/png", 3, 2),)},
}


@pytest.mark.parametrize(("reason", "changes"), BAD_SEGMENTS.items())
def test_a_malformed_segment_is_refused_by_name(reason: str, changes: dict[str, Any]) -> None:
    with pytest.raises(DataRefused, match=rf"group 7 member 1 attempt 0 segment 1 .*{reason}"):
        facts(Rows(encode([trajectory(0), trajectory(1, segment(), segment(**changes)), trajectory(2)])), vocabulary=50_000)


BAD_TRAJECTORIES = {
    "is none of": {"status": "truncated", "stop_reason": "infra"},
    "failed and yet has a reward": {"status": "failed", "stop_reason": "env", "reward": 0.0},
    "reward that is not finite": {"reward": float("nan")},
    "negative identity": {"key": TrajectoryKey(0, 7, -1, 0)},
    "purpose other than": {"purpose": "play"},
    "sampled with top_p below 1": {"top_p": 0.9},
    "or a top_k": {"top_k": 40},
    "another temperature than actors.sampling.temperature, 1": {"temperature": 0.7},
}


@pytest.mark.parametrize(("reason", "changes"), BAD_TRAJECTORIES.items())
def test_a_malformed_trajectory_is_refused_by_name(reason: str, changes: dict[str, Any]) -> None:
    with pytest.raises(DataRefused, match=reason):
        facts(Rows(encode([trajectory(1, **changes)])), 1.0)


def test_how_evaluations_were_sampled_is_nobodys_business() -> None:
    assert len(facts(Rows(encode([trajectory(1, purpose="eval", top_p=0.9, top_k=40, temperature=0.0)])), 1.0)) == 1


ODD = {
    "None": None,
    "an object": np.array([None] * 12, object),
    "text": np.array(["7"] * 12),
    "complex": np.zeros(12, complex) + 1j,
    "a number": np.int32(3),
    "rows": np.zeros((12, 1)),
    "dates": np.zeros(12, "datetime64[s]"),
    "large": [2**40] * 12,
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", ["token_ids", "loss_mask", "behaviour_logprobs", "version_values", "turn_starts", "turn_rewards", "turn_roles"])
def test_whatever_is_no_column_is_refused_by_the_name_of_its_trajectory(name: str, odd: Any) -> None:
    made = trajectory(1, segment(**{name: odd}))
    with pytest.raises(DataRefused, match=r"member=1|member 1|turn_\w+ holds"):
        facts(Rows(encode([made])), vocabulary=50_000)


@pytest.mark.parametrize("name", ["reward_parts", "env_metrics", "messages", "env_id", "task_index", "seed", "error"])
def test_a_field_of_another_type_is_refused_too(name: str) -> None:
    with pytest.raises(DataRefused, match="member=1"):
        encode([trajectory(1, **{name: {3: object()}})])


def test_the_same_trajectory_twice_in_one_batch_is_refused() -> None:
    with pytest.raises(DataRefused, match="same trajectory twice"):
        facts(Rows(encode([trajectory(1), trajectory(2), trajectory(1)])))


def test_segments_out_of_order_are_refused() -> None:
    batch = encode([trajectory(0, segment(), segment(), segment())]).take(pa.array([0, 2, 1]))
    with pytest.raises(DataRefused, match="does not follow"):
        facts(Rows(batch))
    with pytest.raises(Corrupt, match="does not follow"):
        decode(batch)
