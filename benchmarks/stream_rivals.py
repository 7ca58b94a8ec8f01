"""What ``stream.py`` is compared with: Python lists and pickled arrays over a plain ZeroMQ pipe, and Ray. None of them stores anything."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import psutil
import zmq

from rollstream.buffer.types import Trajectory

SPAWN = multiprocessing.get_context("spawn")


def as_lists(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as most trainers send it."""
    segment = trajectory.segments[0]
    return {
        "token_ids": segment.token_ids.tolist(),
        "loss_mask": segment.loss_mask.tolist(),
        "logprobs": segment.behaviour_logprobs.tolist(),
        "reward": trajectory.reward,
    }


def as_arrays(trajectory: Trajectory) -> dict[str, Any]:
    """The same with NumPy arrays."""
    segment = trajectory.segments[0]
    return {"token_ids": segment.token_ids, "loss_mask": segment.loss_mask, "logprobs": segment.behaviour_logprobs, "reward": trajectory.reward}


def to_columns(item: dict[str, Any]) -> dict[str, Any]:
    """Lists as arrays, ready to train as our consumer's are."""
    dtypes = {"token_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32}
    return {name: np.asarray(values, dtypes[name]) if name in dtypes else values for name, values in item.items()}


RIVALS: dict[str, tuple[Callable[[Trajectory], Any], Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "pickled lists": (as_lists, pickle.dumps, pickle.loads),
    "msgpack lists": (as_lists, msgspec.msgpack.encode, msgspec.msgpack.decode),
    "pickled arrays": (as_arrays, lambda item: pickle.dumps(item, protocol=5), pickle.loads),
}


def _send(endpoint: str, name: str, pool: list[Trajectory], stop: Any) -> None:
    convert, pack, _ = RIVALS[name]
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 64)
    socket.setsockopt(zmq.SNDTIMEO, 100)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    index = 0
    while not stop.is_set():
        message = pack(convert(pool[index % len(pool)]))
        index += 1
        while not stop.is_set():
            try:
                socket.send(message)
                break
            except zmq.Again:
                continue
    socket.close()
    context.term()


class Pipe:
    """A PULL socket of this process, fed by one producer process at a time."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="rollstream-bench-")
        self._context = zmq.Context()
        self._num_measured = 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.destroy(0)
        self._folder.cleanup()

    def measure(self, name: str, pool: list[Trajectory], seconds: float) -> tuple[float, float]:
        """Tokens per second, and CPU seconds of both ends per million tokens."""
        unpack = RIVALS[name][2]
        self._num_measured += 1
        endpoint = f"ipc://{Path(self._folder.name) / str(self._num_measured)}"  # a closed socket removes its file a little later
        stop = SPAWN.Event()
        producer = SPAWN.Process(target=_send, args=(endpoint, name, pool, stop), daemon=True)
        with self._context.socket(zmq.PULL) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 64)
            socket.setsockopt(zmq.RCVTIMEO, 30_000)
            socket.bind(endpoint)
            producer.start()
            live = [psutil.Process(), psutil.Process(producer.pid)]
            for _ in range(4):
                to_columns(unpack(socket.recv()))
            before, began, num_tokens = _cpu_s(live), time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                num_tokens += len(to_columns(unpack(socket.recv()))["token_ids"])
            wall_s, cpu_s = time.perf_counter() - began, _cpu_s(live) - before
            stop.set()
            producer.join()
        return num_tokens / wall_s, cpu_s / num_tokens * 1e6


def _cpu_s(live: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in live]
    return sum(entry.user + entry.system for entry in times)


def ray_rates(pool: list[Trajectory], seconds: float, repeats: int) -> dict[str, list[float]]:
    """Tokens per second through Ray's object store and queue, as dictionaries of NumPy arrays."""
    import ray
    from ray.util.queue import Queue

    items = [as_arrays(trajectory) for trajectory in pool]
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")

    @ray.remote(num_cpus=0)
    class Producer:
        def put_some(self, num: int) -> list[Any]:
            return [ray.put(items[index % len(items)]) for index in range(num)]

        def fill(self, queue: Any, num: int) -> None:
            for index in range(num):
                queue.put(items[index % len(items)])

    try:
        producer: Any = Producer.remote()
        rates: dict[str, list[float]] = {"Ray object store": [], "Ray queue": []}
        ray.get(ray.get(producer.put_some.remote(len(items))))  # its process has to start
        for _ in range(repeats):
            began, num_tokens = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                num_tokens += sum(len(item["token_ids"]) for item in ray.get(ray.get(producer.put_some.remote(len(items)))))
            rates["Ray object store"].append(num_tokens / (time.perf_counter() - began))
            queue: Any = Queue(maxsize=len(items))
            queue.put(0)
            queue.get()
            began, num_tokens = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                filled = producer.fill.remote(queue, len(items))
                num_tokens += sum(len(queue.get()["token_ids"]) for _ in items)
                ray.get(filled)
            rates["Ray queue"].append(num_tokens / (time.perf_counter() - began))
            queue.shutdown()
        return rates
    finally:
        ray.shutdown()
