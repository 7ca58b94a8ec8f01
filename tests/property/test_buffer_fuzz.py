"""Whatever arrives, the buffer answers or ignores it, counts it, stores nothing of it, and goes on."""

from __future__ import annotations

import functools
import operator
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wire_goldens
from framed import RUN_ID, Buffer
from rollstream.buffer import wire
from rollstream.buffer.columns import encode, frame_checksum, from_frame, to_frame
from rollstream.buffer.types import Segment, Trajectory, TrajectoryKey


@pytest.fixture(scope="module")
def buffer() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        made = Buffer(Path(folder))
        made.hello()
        yield made
        made.close()


def frame(group_id: int = 0, member: int = 0, attempt: int = 0) -> bytes:
    zeros = np.zeros(1, np.int32)
    segment = Segment(np.arange(6, dtype=np.int32), (np.arange(6) > 0).astype(np.uint8), np.zeros(6, np.float32), zeros, zeros, zeros, ("assistant",), (None,))
    key = TrajectoryKey(0, group_id, member, attempt)
    return to_frame(encode([Trajectory(key, "Acme/Calculator-v0", 0, 0, "train", (segment,), 1.0, "terminated", "terminated")])).to_pybytes()


def checksum(data: bytes) -> int:
    return frame_checksum(pa.py_buffer(data))


fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
numbers = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 5)
names = st.text(max_size=8)
reals = st.floats()
messages = st.one_of(
    st.builds(wire.Credit, numbers, numbers),
    st.builds(wire.Append, numbers, numbers),
    st.builds(wire.Heartbeat, st.lists(numbers), st.dictionaries(names, reals), st.dictionaries(names, reals), names),
    st.builds(wire.Release, st.lists(numbers)),
    st.builds(wire.PullBatch, numbers),
    st.builds(wire.Trained, numbers),
    st.builds(wire.Published, numbers, names),
    st.just(wire.StatusRequest()),
    st.just(wire.Sync()),
    st.builds(wire.Hello, st.just("actor"), names, names, numbers, st.lists(numbers), st.none() | numbers),
)


@given(frames=st.lists(st.binary(max_size=60), max_size=4))
@fuzz
def test_arbitrary_frames_are_refused(buffer: Any, frames: list[bytes]) -> None:
    stored = buffer.stored()
    assert any(isinstance(answer, wire.Refused) for answer in buffer.say(*frames))
    assert buffer.stored() == stored


@given(message=messages, payload=st.lists(st.binary(max_size=200), max_size=3))
@fuzz
def test_well_formed_messages_with_any_content_never_end_the_loop(buffer: Any, message: wire.ClientMessage, payload: list[bytes]) -> None:
    stored = buffer.stored()
    buffer.tell(message, *payload)
    buffer.handlers.books.check()
    assert buffer.stored() == stored
    assert any(isinstance(answer, wire.StatusReply) for answer in buffer.tell(wire.StatusRequest())) or buffer.hello() is None


@given(data=st.data())
@fuzz
def test_damaged_appends_are_refused_as_corrupt(buffer: Any, data: st.DataObject) -> None:
    whole = frame()
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[place] ^= data.draw(st.integers(1, 255))
    buffer.hello()
    answers = buffer.tell(wire.Append(1, checksum(whole)), bytes(damaged))
    assert [answer.code for answer in answers if isinstance(answer, wire.Refused)] == ["corrupt"]
    assert buffer.stored() == 0


def forged(whole: bytes) -> tuple[bytes, int]:
    """``whole`` with a checksum that fits whatever it holds now."""
    end = 8 + int.from_bytes(whole[4:8], "little", signed=True)
    found = checksum(frame())
    place = frame()[:end].index(f"{found:016x}".encode())
    blank = whole[:place] + b"0" * 16 + whole[place + 16 :]
    made = xxhash.xxh3_64_intdigest(blank)
    return whole[:place] + f"{made:016x}".encode() + whole[place + 16 :], made


@given(data=st.data())
@fuzz
def test_nonsense_with_a_right_checksum_never_ends_the_loop(buffer: Any, data: st.DataObject) -> None:
    """What a broken or hostile writer could send: Arrow messages whose insides were changed before they were signed."""
    changed = bytearray(frame(group_id=10**6))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(8, len(changed) - 1))] = data.draw(st.integers(0, 255))
    signed, made = forged(bytes(changed))
    buffer.hello()
    answers = buffer.tell(wire.Append(1, made), signed)
    assert any(isinstance(answer, wire.Refused | wire.Appended) for answer in answers)


def test_another_run_protocol_or_schema_is_refused_by_name(buffer: Any) -> None:
    buffer.hello()
    refusals = [
        buffer.tell(wire.StatusRequest(), run_id="run-b"),
        buffer.tell(wire.StatusRequest(), protocol=99),
        buffer.tell(wire.Hello("actor", "actor-0", "one", 99)),
        buffer.say(msgspec.msgpack.encode(wire.Envelope(wire.PROTOCOL_VERSION, RUN_ID, 1, wire.StatusRequest())), route=b"stranger"),
    ]
    assert [answers[0].code for answers in refusals] == ["wrong_run", "wrong_protocol", "wrong_schema", "unknown_peer"]


def test_refused_messages_are_counted(buffer: Any) -> None:
    buffer.hello()
    before = buffer.handlers.books.counters["refused"]
    buffer.say(b"nonsense")
    buffer.tell(wire.Trained(77))
    assert buffer.handlers.books.counters["refused"] == before + 2


def numbers_of(message: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a message holds integers."""
    for key, value in message.items() if isinstance(message, dict) else enumerate(message) if isinstance(message, list) else ():
        if type(value) is int and key != "checksum":
            yield (*path, key)
        yield from numbers_of(value, (*path, key))


def everything() -> list[tuple[type[wire.Message], tuple[Any, ...]]]:
    """Every integer of every message that somebody says to the buffer."""
    return [
        (kind, path)
        for side, kind in wire_goldens.messages().values()
        if side == "client"
        for path in numbers_of(msgspec.to_builtins(wire_goldens.sample(kind)))
    ]


@pytest.mark.parametrize(("kind", "path"), everything(), ids=lambda value: value.__name__ if isinstance(value, type) else ".".join(map(str, value)))
@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_a_number_that_no_column_could_hold_is_refused_wherever_it_stands(tmp_path: Path, kind: type[wire.Message], path: tuple[Any, ...], number: int) -> None:
    content = msgspec.to_builtins(wire_goldens.sample(kind))
    place = functools.reduce(operator.getitem, path[:-1], content)
    place[path[-1]] = number
    made = Buffer(tmp_path)
    made.hello()
    answers = made.say(msgspec.msgpack.encode([wire.PROTOCOL_VERSION, RUN_ID, 1, content]))
    assert [(answer.code, "int" in answer.reason) for answer in answers] == [("malformed", True)]
    made.close()


def test_more_tasks_than_can_be_put_in_order_are_refused_and_the_next_actor_plays(tmp_path: Path) -> None:
    made = Buffer(tmp_path)
    (refusal,) = made.tell(wire.Hello("actor", "actor-0", "one", 1, tasks={"Acme/Calculator-v0": 10**12}))
    assert (refusal.code, "at most 10,000,000" in refusal.reason) == ("wrong_tasks", True)
    made.hello()
    (leases,) = made.tell(wire.Credit(1))
    assert leases.leases[0].task_index == 0
    made.close()


def test_rows_already_stored_are_left_out_of_the_log_and_the_rest_is_served(tmp_path: Path) -> None:
    made = Buffer(tmp_path)
    made.hello()
    (leases,) = made.tell(wire.Credit(1))
    (group_id,) = [lease.group_id for lease in leases.leases]
    first, both = frame(group_id, 0), together(group_id)
    assert made.tell(wire.Append(1, checksum(first)), first)[-1] == wire.Appended(1, 0, made.handlers.peers.credit_bytes())
    assert made.tell(wire.Append(2, checksum(both)), both)[-1] == wire.Appended(1, 0, made.handlers.peers.credit_bytes())
    assert made.tell(wire.Append(2, checksum(both)), both)[-1] == wire.Appended(0, 0, made.handlers.peers.credit_bytes())
    assert (made.stored(), made.handlers.books.counters["duplicates"]) == (2, 3)
    reply = made.say(
        msgspec.msgpack.encode(wire.Envelope(wire.PROTOCOL_VERSION, RUN_ID, 1, wire.Hello("learner", "learner", "one", 1, version=0))), route=b"learner"
    )
    assert isinstance(reply[0], wire.Welcome)
    (batch,) = made.say(msgspec.msgpack.encode(wire.Envelope(wire.PROTOCOL_VERSION, RUN_ID, 2, wire.PullBatch(1))), route=b"learner")
    assert (batch.groups, batch.num_trajectories, len(batch.checksums)) == ([group_id], 2, 1)
    made.ledger.close()
    made.log.close()


def together(group_id: int) -> bytes:
    whole = [from_frame(pa.py_buffer(data), checksum(data)) for data in (frame(group_id, 0), frame(group_id, 1))]
    return to_frame(pa.concat_batches(whole)).to_pybytes()
