"""The least that a durable stream of this shape can do, as a yardstick: two producers → one process that writes → one that reads the file, in frames of 1 MB.

Each frame is copied once as columns and once into a message, hashed by its sender, by the one who writes it and by the one who reads it, and sent over a Unix
socket; the page cache is kept as the log keeps it. Nothing is encoded, looked at, entered into books, acknowledged or answered.
"""

from __future__ import annotations

import multiprocessing
import shutil
import struct
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import psutil
import pyarrow as pa
import xxhash
import zmq

from rollstream.buffer.memory import keep_freed_memory
from rollstream.buffer.page_cache import PageCache

SPAWN = multiprocessing.get_context("spawn")
_FRAME_BYTES = 2**20
_HIGH_WATER = 16
_PLACE = struct.Struct("<qqQ")  # offset, bytes, hash


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, _HIGH_WATER)
    for option in (zmq.SNDBUF, zmq.RCVBUF):
        socket.setsockopt(option, 4 * 2**20)
    return socket


def _source(endpoint: str) -> None:
    source = np.random.default_rng(0).integers(0, 255, _FRAME_BYTES, np.uint8)
    socket = _socket(zmq.Context(), zmq.PUSH)
    socket.connect(endpoint)
    while True:
        columns, frame = pa.allocate_buffer(_FRAME_BYTES), pa.allocate_buffer(_FRAME_BYTES)
        np.copyto(np.frombuffer(columns, np.uint8), source)
        np.copyto(np.frombuffer(frame, np.uint8), np.frombuffer(columns, np.uint8))
        digest = xxhash.xxh3_64_intdigest(frame)
        socket.send_multipart([_PLACE.pack(0, frame.size, digest), frame], copy=False)


def _writer(endpoint: str, onward: str, path: Path) -> None:
    keep_freed_memory()
    context = zmq.Context()
    inbound, outbound = _socket(context, zmq.PULL), _socket(context, zmq.PUSH)
    inbound.bind(endpoint)
    outbound.connect(onward)
    cache, offset = PageCache(), 0
    with path.open("wb", buffering=0) as file:
        while True:
            header, frame = inbound.recv_multipart(copy=False)
            _, size_bytes, digest = _PLACE.unpack(header.bytes)
            assert xxhash.xxh3_64_intdigest(frame.buffer) == digest
            file.write(frame.buffer)
            cache.wrote(path, offset, size_bytes)
            outbound.send(_PLACE.pack(offset, size_bytes, digest))
            offset += size_bytes


class BareRelay:
    """The four processes, of which the last is this one."""

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="rollstream-bench-"))
        inbound, onward = f"ipc://{self._folder}/in", f"ipc://{self._folder}/on"
        self._path = self._folder / "frames"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _socket(self._context, zmq.PULL)
        self._socket.bind(onward)
        targets = [(_writer, (inbound, onward, self._path)), *[(_source, (inbound,))] * 2]
        self._processes = [SPAWN.Process(target=target, args=arguments, daemon=True) for target, arguments in targets]
        for process in self._processes:
            process.start()
        self._next()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._context.destroy(0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def measure(self, seconds: float) -> tuple[float, float]:
        """Bytes per second, and CPU seconds of all processes per byte."""
        live = [psutil.Process(), *(psutil.Process(process.pid) for process in self._processes)]
        for _ in range(_HIGH_WATER * 4):  # what piled up meanwhile
            self._next()
        before, began, num_bytes = _cpu_s(live), time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            num_bytes += self._next()
        return num_bytes / (time.perf_counter() - began), (_cpu_s(live) - before) / num_bytes

    def _next(self) -> int:
        offset, size_bytes, digest = _PLACE.unpack(self._socket.recv())
        with pa.memory_map(str(self._path)) as mapped:
            mapped.seek(offset)
            assert xxhash.xxh3_64_intdigest(mapped.read_buffer(size_bytes)) == digest
        return size_bytes


def _cpu_s(live: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in live]
    return sum(entry.user + entry.system for entry in times)


if __name__ == "__main__":
    with BareRelay() as relay:
        for _ in range(5):
            rate, cpu = relay.measure(3.0)
            print(f"{rate / 1e9:.3f} GB/s, {cpu * 1e9:.2f} CPU s per GB")
