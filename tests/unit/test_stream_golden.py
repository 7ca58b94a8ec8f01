"""Streams that earlier versions wrote, read by this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

import stream_goldens as goldens
from rollstream.buffer.columns import SCHEMA, SCHEMA_VERSION, decode, frame_checksum, from_frame
from rollstream.buffer.sealed import Sealed

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = range(1, SCHEMA_VERSION + 1)


def said(version: int) -> Any:
    path = GOLDEN / f"stream_v{version}.json"
    assert path.is_file(), f"no golden stream of schema version {version}: run `python tests/golden/stream_goldens.py` and commit what it writes"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_log_segment_of_every_schema_version_is_still_read(version: int) -> None:
    wanted = said(version)
    data = pa.py_buffer((GOLDEN / f"stream_v{version}.arrows").read_bytes())
    with ipc.open_stream(data) as reader:
        assert reader.schema.metadata[b"schema_version"] == str(version).encode()
        batches = list(reader)
    assert [goldens.plain(found) for batch in batches for found in decode(batch)] == wanted


@pytest.mark.parametrize("version", VERSIONS)
def test_a_sealed_segment_of_every_schema_version_is_still_read(version: int) -> None:
    sealed = Sealed(GOLDEN / f"stream_v{version}.parquet")
    batches = [sealed.read(offset) for offset, _ in sealed.index]
    assert [goldens.plain(found) for batch in batches for found in decode(batch)] == said(version)
    assert pq.read_schema(sealed.path).metadata[b"schema_version"] == str(version).encode()


def test_the_frames_of_the_golden_log_have_the_checksums_they_carry() -> None:
    data = (GOLDEN / f"stream_v{SCHEMA_VERSION}.arrows").read_bytes()
    sealed = Sealed(GOLDEN / f"stream_v{SCHEMA_VERSION}.parquet")
    starts = [offset for offset, _ in sealed.index]
    for start, stop in zip(starts, [*starts[1:], len(data) - 8], strict=True):
        frame = pa.py_buffer(data[start:stop])
        assert decode(from_frame(frame, frame_checksum(frame)))


def test_no_column_of_the_golden_stream_is_empty() -> None:
    table = Sealed(GOLDEN / f"stream_v{SCHEMA_VERSION}.parquet").row_group(0)
    for field in SCHEMA:
        assert any(value not in (None, "", [], 0) for value in table.column(field.name).to_pylist()), field.name
