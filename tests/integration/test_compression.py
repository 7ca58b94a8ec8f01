"""Compressed rows: smaller on the wire and in the log, the same to every reader, which needs no setting."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc

import streams
from rollstream.buffer.audit import audit
from rollstream.buffer.client import ActorClient, LearnerClient
from rollstream.buffer.columns import SCHEMA_MESSAGE, aligned, decode, encode, frame_checksum, from_frame, to_frame
from rollstream.buffer.inspect import Filter, Inspector
from rollstream.buffer.wire import Lease
from rollstream.errors import Corrupt

LEASE = Lease(0, 7, 0, 0, "train", "Acme/Calculator-v0", 7, 99, [0, 1], 0)
CHAT = json.dumps([{"role": "user", "content": "add two and two " * 400}])


def content(trajectories: Any) -> Any:
    return [(item.key, item.reward, item.messages, item.segments[0].token_ids.tolist(), item.segments[0].behaviour_logprobs.tolist()) for item in trajectories]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_frame_says_so_itself_and_its_checksum_is_over_the_bytes_as_sent(compression: Any) -> None:
    wanted = [streams.play(LEASE, member, 2000, messages=CHAT) for member in range(2)]
    plain, frame = to_frame(encode(wanted)), to_frame(encode(wanted), compression)
    assert frame.size < 0.8 * plain.size
    assert content(decode(from_frame(frame, frame_checksum(frame)))) == content(wanted)
    with ipc.open_stream(pa.py_buffer(SCHEMA_MESSAGE + frame.to_pybytes())) as reader:
        assert content(decode(reader.read_next_batch())) == content(wanted)
    for place in range(0, frame.size, 97):
        damaged = bytearray(frame.to_pybytes())
        damaged[place] ^= 0x20
        with pytest.raises(Corrupt):
            from_frame(aligned(bytes(damaged)), frame_checksum(frame))


def test_rows_that_do_not_compress_still_travel() -> None:
    for compression in ("lz4", "zstd"):
        frame = to_frame(encode([streams.play(LEASE, 0, 1)]), compression)
        assert decode(from_frame(frame, frame_checksum(frame)))[0].num_tokens == 1


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_a_run_streams_and_is_read_alike_with_each_compression(compression: Any, tmp_path: Path) -> None:
    run = streams.run_in(tmp_path, compression=compression, segment_mb=1)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0", compression=compression) as client:
            await streams.play_groups(client, 2, num_tokens=4000, messages=CHAT)

    with streams.serving(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        asyncio.run(act())
        batch = streams.pull(learner, 1)
        counters = learner.status().counters
    assert content(batch.trajectories) == content(streams.play(lease_of(item), item.key.member, 4000, messages=CHAT) for item in batch.trajectories)
    raw = 2 * streams.GROUP_SIZE * (4000 * 9 + len(CHAT))
    assert counters["bytes_received"] == counters["bytes_stored"]
    assert (counters["bytes_stored"] > raw) == (compression == "none")
    report = audit(run.folder)
    assert (report.closes, report.problems, report.num_trajectories) == (True, [], 2 * streams.GROUP_SIZE)
    with Inspector(run.folder) as inspector:
        assert len(inspector.listed(Filter())) == inspector.query("SELECT * FROM trajectories").num_rows == 2 * streams.GROUP_SIZE


def lease_of(item: Any) -> Lease:
    return Lease(item.key.lineage, item.key.group_id, 0, item.key.attempt, item.purpose, item.env_id, item.task_index, item.seed, [item.key.member], 0)
