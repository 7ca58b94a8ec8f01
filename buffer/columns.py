"""Trajectories as Arrow columns, and those columns as frames of bytes.

One row per segment; what belongs to the trajectory is repeated in each of its rows. A *frame* is one encapsulated Arrow IPC record-batch message without
its schema: it crosses the wire, and is written to the log, as the very same bytes. Its metadata holds ``checksum``, sixteen hex digits of the xxh3-64 of the
whole frame in which those digits read as zeros; so one pass proves that neither the columns nor their description changed.

Encoding concatenates the arrays once and lets Arrow write them once; decoding gives read-only NumPy views into the received bytes. Neither touches
single tokens in Python.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from pyarrow import ipc

from ..errors import Corrupt, DataRefused
from .types import MediaSpan, Segment, Trajectory, TrajectoryKey

SCHEMA_VERSION = 1

_SPAN = pa.struct([("digest", pa.string()), ("mime", pa.string()), ("start", pa.int32()), ("length", pa.int32())])

SCHEMA = pa.schema(
    [
        pa.field("lineage", pa.int16(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("member", pa.int16(), nullable=False),
        pa.field("segment", pa.int16(), nullable=False),
        pa.field("attempt", pa.int16(), nullable=False),
        pa.field("env_id", pa.string(), nullable=False),
        pa.field("task_index", pa.int64(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("purpose", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("behaviour_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("version_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("version_values", pa.list_(pa.int32()), nullable=False),
        pa.field("turn_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("turn_roles", pa.list_(pa.string()), nullable=False),
        pa.field("turn_rewards", pa.list_(pa.float64()), nullable=False),
        pa.field("reward", pa.float64(), nullable=True),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("env_metrics", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("stop_reason", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error", pa.string(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("routed_experts", pa.list_(pa.binary()), nullable=True),
        pa.field("media", pa.list_(_SPAN), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("actor_id", pa.string(), nullable=False),
        pa.field("started_at", pa.float64(), nullable=False),
        pa.field("finished_at", pa.float64(), nullable=False),
        pa.field("sampler_s", pa.float64(), nullable=False),
        pa.field("env_s", pa.float64(), nullable=False),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
"""The rows of the stream. ``reward`` null means not scored, which is not 0; ``routed_experts`` is reserved
and most often null; the digests in ``media`` name blobs (see ``blobs``)."""

SCHEMA_MESSAGE: bytes = SCHEMA.serialize().to_pybytes()
"""What every Arrow IPC stream of these rows starts with."""

_NAMES: list[str] = SCHEMA.names
_BLANK = b"0" * 16
_METADATA_SLACK = 1024  # room for the custom metadata, which Arrow's own size estimate leaves out


# --- encode -------------------------------------------------------------------------------------------------------------------------

_KEY = ("lineage", "group_id", "member", "attempt")
_TOKEN_ARRAYS = ("token_ids", "loss_mask", "behaviour_logprobs")
_RUN_ARRAYS = ("version_starts", "version_values", "turn_starts")
_SCALARS = (
    *("env_id", "task_index", "seed", "purpose", "reward", "status", "stop_reason", "error"),
    *("temperature", "top_p", "top_k", "messages", "actor_id", "started_at", "finished_at", "sampler_s", "env_s"),
)
_SMALL = pa.struct([SCHEMA.field(name) for name in (*_KEY, *_SCALARS, "reward_parts", "env_metrics", "segment", "turn_roles", "turn_rewards", "media")])
_LISTS = [(name, SCHEMA.field(name).type, np.dtype(SCHEMA.field(name).type.value_type.to_pandas_dtype())) for name in (*_TOKEN_ARRAYS, *_RUN_ARRAYS)]
_SMALL_NAMES = [field.name for field in _SMALL]  # Arrow makes an object of every field that is asked for
_EXPERTS = SCHEMA.field("routed_experts").type
_of_trajectory = operator.attrgetter(*_SCALARS)


def encode(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """Columns of ``trajectories``, one row per segment, in :data:`SCHEMA`.

    Raises:
        DataRefused: a value that does not fit its column (a token id beyond int32).

    """
    try:
        return pa.RecordBatch.from_arrays(_columns(trajectories), schema=SCHEMA)
    except (pa.ArrowException, ValueError, OverflowError, TypeError, AttributeError) as error:
        named = trajectories[0].key if len(trajectories) == 1 else f"one of {len(trajectories)} trajectories"
        raise DataRefused(f"{named} does not fit the columns of the stream: {error}") from error


def _columns(trajectories: Sequence[Trajectory]) -> list[pa.Array]:
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    small: list[tuple[Any, ...]] = []
    for trajectory in trajectories:
        shared = (*trajectory.key, *_of_trajectory(trajectory), list(trajectory.reward_parts.items()), list(trajectory.env_metrics.items()))
        for index, segment in enumerate(trajectory.segments):
            spans = [(span.digest, span.mime, span.start, span.length) for span in segment.media] if segment.media else ()
            small.append((*shared, index, segment.turn_roles, segment.turn_rewards, spans))
    columns: dict[str, pa.Array] = dict(zip(_SMALL_NAMES, pa.array(small, _SMALL).flatten(), strict=True))
    known: dict[tuple[int, ...], tuple[int, pa.Buffer]] = {}
    for name, list_type, dtype in _LISTS:
        arrays = [getattr(segment, name) for segment in segments]
        lengths = tuple(map(len, arrays))
        if lengths not in known:  # columns of one length share their offsets
            known[lengths] = _offsets(lengths)
        columns[name] = _lists(arrays, *known[lengths], list_type, dtype)
    columns["routed_experts"] = _experts(segments)
    return [columns[name] for name in _NAMES]


def _experts(segments: Sequence[Segment]) -> pa.Array:
    """The reserved column; most streams have nothing in it."""
    if all(segment.routed_experts is None for segment in segments):
        return pa.nulls(len(segments), _EXPERTS)
    return pa.array([segment.routed_experts for segment in segments], _EXPERTS)


def _offsets(lengths: Sequence[int]) -> tuple[int, pa.Buffer]:
    """Sum of ``lengths``, and the offsets of lists of these lengths."""
    offsets = list(itertools.accumulate(lengths, initial=0))
    if offsets[-1] > _INT32_MAX:
        raise ValueError(f"one record batch holds at most {_INT32_MAX} tokens, this one has {offsets[-1]}; append fewer trajectories at a time")
    return offsets[-1], pa.py_buffer(np.array(offsets, np.int32))


def _lists(arrays: list[npt.NDArray[Any]], total: int, offsets: pa.Buffer, list_type: pa.ListType, dtype: np.dtype[Any]) -> pa.Array:
    """One list per array, values concatenated once, into memory of Arrow's pool (fresh pages cost more than the copy)."""
    target = pa.allocate_buffer(total * dtype.itemsize)
    if total:
        values = np.frombuffer(target, dtype)
        try:
            np.concatenate(arrays, out=values, casting="equiv")
        except TypeError:  # some have another type
            np.concatenate([_converted(array, dtype) for array in arrays], out=values)
    flat = pa.Array.from_buffers(list_type.value_type, total, [None, target], 0)
    return pa.Array.from_buffers(list_type, len(arrays), [None, offsets], 0, children=[flat])


_INT32_MAX = int(np.iinfo(np.int32).max)


def _converted(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Values in the column's type; integers must survive unchanged."""
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"an array of {values.dtype} is none of numbers; give one of {dtype}")
    converted = values.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(converted, values):
        raise ValueError(f"values between {values.min()} and {values.max()} do not fit a column of {dtype}")
    return converted


# --- decode -------------------------------------------------------------------------------------------------------------------------


def decode(batch: pa.RecordBatch) -> list[Trajectory]:
    """The trajectories of ``batch``, in row order; token arrays are read-only views that keep the batch's bytes alive.

    Raises:
        Corrupt: rows of one trajectory that do not follow one another, or whose first is missing.

    """
    column = Rows(batch)
    arrays = [_views(column[name]) for name in (*_TOKEN_ARRAYS, *_RUN_ARRAYS)]
    roles, rewards = (map(tuple, column.listed(name)) for name in ("turn_roles", "turn_rewards"))
    segments = list(map(Segment, *arrays, roles, rewards, _media(column["media"]), _routes(column["routed_experts"])))
    keys = list(map(TrajectoryKey, *map(column.listed, _KEY)))
    owned = _grouped(segments, keys, column.listed("segment"))
    fields = {name: column.listed(name) for name in _SCALARS}
    for name in ("reward_parts", "env_metrics"):
        fields[name] = list(map(dict, column.listed(name)))
    fields["key"] = keys
    if len(owned) < len(segments):
        fields = {name: [values[row] for row in owned] for name, values in fields.items()}
    fields["segments"] = list(owned.values())
    return list(map(Trajectory, *(fields[name] for name in Trajectory.__struct_fields__)))


class Rows:
    """The columns of a record batch by name, looked up at once (asking the batch for one after another takes several times as long)."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self._arrays: dict[str, pa.Array] = dict(zip(_NAMES, batch.to_struct_array().flatten(), strict=True))
        self._listed: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> pa.Array:
        return self._arrays[name]

    def listed(self, name: str) -> list[Any]:
        """A column as a list, made once; not to be changed."""
        if name not in self._listed:
            self._listed[name] = self._arrays[name].to_pylist()
        return self._listed[name]


def with_reward(trajectory: Trajectory, reward: float | None) -> Trajectory:
    """``trajectory`` with the reward that came after its rows were stored; itself where it has its own."""
    return trajectory if reward is None or trajectory.reward is not None else msgspec.structs.replace(trajectory, reward=reward)


def _views(array: pa.Array) -> list[npt.NDArray[Any]]:
    """One read-only view per row of a list column."""
    values = array.values.to_numpy(zero_copy_only=True)
    bounds = array.offsets.to_numpy(zero_copy_only=True).tolist()
    return [values[start:stop] for start, stop in itertools.pairwise(bounds)]


def _media(array: pa.Array) -> list[tuple[MediaSpan, ...]]:
    """The media spans of each row; most streams have none."""
    if len(array.values) == 0:
        return [()] * len(array)
    return [tuple(MediaSpan(**span) for span in spans) for spans in array.to_pylist()]


def _routes(array: pa.Array) -> list[tuple[bytes, ...] | None]:
    """The reserved column of each row; most streams have nothing in it."""
    if array.null_count == len(array):
        return [None] * len(array)
    return [None if routes is None else tuple(routes) for routes in array.to_pylist()]


def _grouped(segments: list[Segment], keys: list[TrajectoryKey], numbers: list[int]) -> dict[int, tuple[Segment, ...]]:
    """The segments of each trajectory, under the row of its first one."""
    owned: dict[int, tuple[Segment, ...]] = {}
    first = 0
    for row, number in enumerate(numbers):
        if number == 0:
            first = row
            owned[row] = (segments[row],)
        elif row == 0 or keys[row] != keys[row - 1] or number != numbers[row - 1] + 1:
            raise Corrupt(f"segment {number} of group {keys[row].group_id} member {keys[row].member} does not follow the one before it")
        else:
            owned[first] += (segments[row],)
    return owned


def rows_of(batch: pa.RecordBatch, rows: Sequence[int]) -> pa.RecordBatch:
    """Some rows of ``batch``, in their order; runs of neighbours are copied together (Arrow's own ``take`` would load its compute library in mid-stream)."""
    if len(rows) == batch.num_rows:
        return batch
    starts = [index for index, row in enumerate(rows) if index == 0 or row != rows[index - 1] + 1]
    return pa.concat_batches([batch.slice(rows[start], stop - start) for start, stop in itertools.pairwise([*starts, len(rows)])])


# --- frames -------------------------------------------------------------------------------------------------------------------------


Compression = Literal["none", "lz4", "zstd"]
_options: dict[str, ipc.IpcWriteOptions] = {}


def to_frame(batch: pa.RecordBatch, compression: Compression = "none", schema: pa.Schema = SCHEMA, schema_message: bytes = SCHEMA_MESSAGE) -> pa.Buffer:
    """``batch`` as one IPC message whose metadata carries its checksum; framing what was received uncompressed gives the same bytes again.

    With ``compression`` Arrow compresses each column's buffers; the frame says so itself, and readers need no setting.
    """
    if compression != "none":
        return _compressed_frame(batch, compression)
    target = pa.allocate_buffer(ipc.get_record_batch_size(batch) + len(schema_message) + _METADATA_SLACK)
    sink = pa.FixedSizeBufferWriter(target)
    ipc.new_stream(sink, schema).write_batch(batch, custom_metadata={"checksum": _BLANK})
    return _sealed_with_checksum(target, sink.tell(), len(schema_message))


def _compressed_frame(batch: pa.RecordBatch, compression: str) -> pa.Buffer:
    if compression not in _options:
        _options[compression] = ipc.IpcWriteOptions(compression=compression, use_threads=False)
    sink = pa.BufferOutputStream()
    ipc.new_stream(sink, SCHEMA, options=_options[compression]).write_batch(batch, custom_metadata={"checksum": _BLANK})
    end = sink.tell()
    written = sink.getvalue()
    target = pa.allocate_buffer(end)  # what the stream gives cannot be written to
    memoryview(target).cast("B")[:] = memoryview(written).cast("B")[:end]
    return _sealed_with_checksum(target, end)


def _sealed_with_checksum(stream: pa.Buffer, end: int, begin: int = len(SCHEMA_MESSAGE)) -> pa.Buffer:
    """The record-batch message of a stream that ends at ``end``, its checksum written into it."""
    frame = stream.slice(begin, end - begin)
    place = begin + _digits_place(bytes(frame.slice(0, _metadata_end(frame))))
    memoryview(stream).cast("B")[place : place + 16] = f"{xxhash.xxh3_64_intdigest(frame):016x}".encode()
    return frame


def frame_checksum(frame: pa.Buffer) -> int:
    """xxh3-64 of the bytes of ``frame``, its own digits read as zeros.

    Raises:
        Corrupt: the frame is not one whole message, or carries no checksum or a wrong one.

    """
    end = _metadata_end(frame)
    metadata = bytes(frame.slice(0, end))
    place = _digits_place(metadata)
    digest = xxhash.xxh3_64(metadata[:place])
    digest.update(_BLANK)
    digest.update(metadata[place + 16 :])
    digest.update(frame.slice(end))
    found = digest.intdigest()
    if f"{found:016x}".encode() != metadata[place : place + 16]:
        raise Corrupt(
            f"a record batch of {frame.size} bytes has checksum {found:016x}, its metadata says {metadata[place : place + 16].decode('ascii', 'replace')}"
        )
    return found


def stated_checksum(frame: pa.Buffer) -> int:
    """The checksum that a frame carries, not verified: for one that was made here and now."""
    metadata = bytes(frame.slice(0, _metadata_end(frame)))
    place = _digits_place(metadata)
    return int(metadata[place : place + 16], 16)


def from_frame(frame: pa.Buffer, expected: int, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """The record batch in ``frame``, without copying it.

    Raises:
        Corrupt: the bytes do not match ``expected``, are not one whole message, or do not follow the schema.

    """
    found = frame_checksum(frame)
    if found != expected:
        raise Corrupt(f"a record batch of {frame.size} bytes has checksum {found:016x}, announced was {expected:016x}")
    try:
        message = ipc.read_message(frame)
        if message.type != "record batch" or _metadata_end(frame) + message.body.size != frame.size:
            raise Corrupt(f"a frame of {frame.size} bytes is not one whole record batch")
        batch = ipc.read_record_batch(message, schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Corrupt(f"a frame of {frame.size} bytes does not follow schema version {schema.metadata[b'schema_version'].decode()}: {error}") from error
    return batch


def aligned(data: memoryview | bytes) -> pa.Buffer:
    """Received bytes as an Arrow buffer; copied only where the network layer left them off an 8-byte boundary."""
    buffer = pa.py_buffer(data)
    if buffer.address % 8 == 0:
        return buffer
    target = pa.allocate_buffer(buffer.size)
    memoryview(target).cast("B")[:] = memoryview(buffer).cast("B")
    return target


def _metadata_end(frame: pa.Buffer) -> int:
    """Where the message's metadata ends and its body begins.

    Raises:
        Corrupt: the frame is shorter than its own header says, or not an encapsulated message.

    """
    if frame.size < 8:
        raise Corrupt(f"a frame of {frame.size} bytes is no Arrow message")
    marker, length = struct.unpack("<Ii", frame.slice(0, 8))
    if marker != 0xFFFFFFFF or length <= 0 or length % 8 or 8 + length > frame.size or frame.size % 8:
        raise Corrupt(f"a frame of {frame.size} bytes is no whole Arrow message")
    return 8 + length


def _digits_place(metadata: bytes) -> int:
    """Offset of the sixteen checksum digits: the flatbuffer string of that length beside the key ``checksum``."""
    place = metadata.find(_DIGITS_LENGTH)
    while place >= 0:
        digits = metadata[place + 4 : place + 20]
        if len(digits) == 16 and all(byte in b"0123456789abcdef" for byte in digits):
            return place + 4
        place = metadata.find(_DIGITS_LENGTH, place + 1)
    raise Corrupt("a record batch carries no checksum in its metadata")


_DIGITS_LENGTH = struct.pack("<I", 16)
