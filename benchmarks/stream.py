"""The stream at full rate: producer processes → durable buffer → consumer, in groups of 8 trajectories of 1 k to 32 k tokens (log-uniform).

Yardsticks of the same run, interleaved with it: one *copy* is a memcpy of the same bytes; a *plain write* gives as many bytes to the kernel, for a file that
grows (on a virtual machine a page may cost more at its first use than all else); a *bare relay* (``bare_relay``) is the least that any stream does that goes
over sockets and through a file, four processes that look at nothing; the same trajectories as pickled and as msgpack Python lists, and as pickled NumPy arrays,
over a plain ZeroMQ pipe between two processes, which stores nothing; Ray's object store and queue where ray is installed.

Rate: columns that reached the consumer (9 bytes a token and the small ones) per second, decoded and ready to train. CPU: producers, buffer and consumer
together, user and system. Latency: from the actor's ``append`` of a trajectory until the learner holds its batch, once under full load (queueing
included) and once quiet: one group of 8 × 1 k tokens at a time.
Once more with four images of 200 kB per trajectory, all different: their bytes count, and the consumer holds them. One copy is a memcpy there too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import multiprocessing
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import psutil
from bare_relay import BareRelay
from report import Row, options, report, row
from stream_rivals import RIVALS, Pipe, ray_rates

from rollstream.buffer.blobs import Blob
from rollstream.buffer.client import ActorClient, LearnerClient
from rollstream.buffer.columns import decode, encode, frame_checksum, from_frame, to_frame
from rollstream.buffer.log_files import local_files
from rollstream.buffer.server import serve
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.buffer.wire import Lease
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config

GROUP_SIZE = 8
SHORTEST, LONGEST = 1024, 32 * 1024
BYTES_PER_TOKEN = 9
NUM_PRODUCERS = 2
NUM_IMAGES, IMAGE = 4, np.random.default_rng(1).bytes(200_000)
SPAWN = multiprocessing.get_context("spawn")


def make_trajectory(num_tokens: int, seed: int) -> Trajectory:
    """One trajectory of four turns, half of its tokens sampled."""
    random = np.random.default_rng(seed)
    mask = (np.arange(num_tokens) % (num_tokens // 2) >= num_tokens // 4).astype(np.uint8)
    segment = Segment(
        random.integers(0, 150_000, num_tokens).astype(np.int32),
        mask,
        np.where(mask == 1, -random.random(num_tokens), 0.0).astype(np.float32),
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        (np.arange(4) * (num_tokens // 4)).astype(np.int32),
        ("user", "assistant", "user", "assistant"),
        (None, None, None, 1.0),
    )
    key = TrajectoryKey(0, 0, 0, 0)
    return Trajectory(key, "bench/Stream-v0", 0, 0, "train", (segment,), 1.0, "terminated", "terminated", {"answer": 1.0}, {"success": 1.0})


def make_pool(size: int, shortest: int, longest: int) -> list[Trajectory]:
    """Trajectories to send again and again, of log-uniform lengths."""
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(shortest), np.log(longest), size)).astype(int)
    return [make_trajectory(int(length), index) for index, length in enumerate(lengths)]


# --- our stream -----------------------------------------------------------------------------------------------------------------------


def make_run(folder: Path, batch_groups: int, **buffer: float) -> Run:
    """A run of nothing but its stream."""
    settings = {
        "name": "stream",
        "env": {"id": "bench/Stream-v0"},
        "buffer": {"depth": 2, "max_lag": 4, **buffer},
        "learner": {"versions": 10**6, "batch_groups": batch_groups, "group_size": GROUP_SIZE},
    }
    return Run(folder, Config.model_validate(settings), f"bench-{folder}")


def buffer_main(run: Run) -> None:
    """The buffer's process; ended by the parent."""
    serve(run, threading.Event())


def consumer_of(run: Run) -> LearnerClient:
    """A learner beside the buffer, as ``rollstream train`` starts it."""
    return LearnerClient(run.endpoint, run.run_id, files=local_files(run))


def producer_main(run: Run, name: str, pool: list[Trajectory], num_groups: int, num_images: int = 0) -> None:
    """An actor that plays in no time: ``num_groups`` leases at once, ``num_images`` per trajectory."""
    asyncio.run(produce(run, name, pool, num_groups, num_images))


def images_of(key: TrajectoryKey, num_images: int) -> list[Blob]:
    """Images that nobody has sent before."""
    return [Blob.of(repr((key, index)).encode().ljust(64) + IMAGE, "image/png") for index in range(num_images)]


async def produce(run: Run, name: str, pool: list[Trajectory], num_groups: int, num_images: int) -> None:
    """Takes leases until the process is ended."""

    async def play(lease: Lease, member: int) -> None:
        key = TrajectoryKey(lease.lineage, lease.group_id, member, lease.attempt)
        made = pool[(lease.group_id * GROUP_SIZE + member) % len(pool)]
        images = images_of(key, num_images)
        spans = tuple(image.span(index * 64, 64) for index, image in enumerate(images))
        segment = msgspec.structs.replace(made.segments[0], version_values=np.array([lease.admit_version], np.int32), media=spans)
        await client.append(msgspec.structs.replace(made, key=key, segments=(segment,), finished_at=time.time()), images)

    async def play_group(lease: Lease) -> None:
        async with asyncio.TaskGroup() as members:
            for member in lease.members:
                members.create_task(play(lease, member))
        client.finish(lease.group_id)
        client.credit(num_groups)

    async with ActorClient(run.endpoint, run.run_id, name) as client, asyncio.TaskGroup() as groups:
        client.credit(num_groups)
        while (lease := await client.next_lease()) is not None:
            groups.create_task(play_group(lease))


@contextmanager
def processes(*made: BaseProcess) -> Iterator[list[psutil.Process]]:
    """Started, and ended at the end."""
    for process in made:
        process.start()
    try:
        yield [psutil.Process(process.pid) for process in made]
    finally:
        for process in made:
            process.kill()
            process.join()


def cpu_s(live: list[psutil.Process]) -> float:
    """User and system seconds of these processes and this one."""
    times = [process.cpu_times() for process in [psutil.Process(), *live]]
    return sum(entry.user + entry.system for entry in times)


@dataclasses.dataclass
class Figures:
    """One measured stretch."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_tokens: int = 0
    num_trajectories: int = 0
    image_bytes: int = 0
    latencies_ms: list[float] = dataclasses.field(default_factory=list)
    buffer_mb: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Bytes of the token columns and of the images."""
        return self.num_tokens * BYTES_PER_TOKEN + self.image_bytes

    def add(self, batch: Batch, now: float) -> None:
        """Counts one batch."""
        self.num_tokens += sum(item.num_tokens for item in batch.trajectories)
        self.num_trajectories += len(batch.trajectories)
        self.image_bytes += sum(map(len, batch.blobs.values()))
        self.latencies_ms.extend((now - item.finished_at) * 1000 for item in batch.trajectories)


def measure_stream(
    pool: list[Trajectory], batch_groups: int, seconds: float, repeats: int, between: Callable[[], None], *, num_images: int = 0
) -> list[Figures]:
    """``repeats`` stretches of one live stream, with ``between`` before each; the consumer is this process."""
    folder = Path(tempfile.mkdtemp(prefix="rollstream-bench-"))
    run = make_run(folder, batch_groups)
    arguments = (pool, 2 * batch_groups, num_images)
    producers = [SPAWN.Process(target=producer_main, args=(run, f"actor-{index}", *arguments), daemon=True) for index in range(NUM_PRODUCERS)]
    try:
        with processes(SPAWN.Process(target=buffer_main, args=(run,), daemon=True), *producers) as live, consumer_of(run) as learner:
            learner.hello(0)
            version = consume(learner, 1, 3.0 if repeats else 0.0, Figures())
            measured: list[Figures] = []
            for _ in range(repeats):
                between()
                version = consume(learner, version, 0.3, Figures())  # what piled up meanwhile
                figures = Figures()
                before, began = cpu_s(live), time.perf_counter()
                version = consume(learner, version, seconds, figures)
                figures.wall_s, figures.cpu_s = time.perf_counter() - began, cpu_s(live) - before
                figures.buffer_mb = live[0].memory_info().rss / 1e6
                measured.append(figures)
            return measured
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(run.socket_folder, ignore_errors=True)


def consume(learner: LearnerClient, version: int, seconds: float, figures: Figures) -> int:
    """Pulls batches for some time (at least two); gives the next version."""
    first, end = version, time.perf_counter() + seconds
    while time.perf_counter() < end or version < first + 2:
        batch = learner.pull(version, lambda reason: None, threading.Event())
        assert batch is not None
        figures.add(batch, time.time())
        learner.trained(version)
        version += 1
    return version


def measure_quiet(num_groups: int) -> list[float]:
    """Milliseconds from ``append`` to the learner, one group of 8 × 1 k tokens at a time, nothing else going on."""
    folder = Path(tempfile.mkdtemp(prefix="rollstream-bench-"))
    run = make_run(folder, 1)
    made = make_trajectory(1024, 0)
    try:
        with processes(SPAWN.Process(target=buffer_main, args=(run,), daemon=True)), consumer_of(run) as learner:
            learner.hello(0)
            return asyncio.run(_one_at_a_time(run, learner, made, num_groups))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(run.socket_folder, ignore_errors=True)


async def _one_at_a_time(run: Run, learner: LearnerClient, made: Trajectory, num_groups: int) -> list[float]:
    taken: list[float] = []

    def pull(version: int) -> float:
        assert learner.pull(version, lambda reason: None, threading.Event()) is not None
        return time.perf_counter()

    async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
        for version in range(1, num_groups + 1):
            client.credit(1)
            lease = await client.next_lease()
            assert lease is not None
            arrival = asyncio.create_task(asyncio.to_thread(pull, version))
            await asyncio.sleep(0.01)  # the learner waits for it
            began = time.perf_counter()
            keys = [TrajectoryKey(lease.lineage, lease.group_id, member, lease.attempt) for member in lease.members]
            await asyncio.gather(*(client.append(msgspec.structs.replace(made, key=key)) for key in keys))
            taken.append((await arrival - began) * 1000)
            await asyncio.to_thread(learner.trained, version)
            client.finish(lease.group_id)
    return taken[len(taken) // 10 :]


# --- yardsticks -----------------------------------------------------------------------------------------------------------------------


def copy_bytes_per_s(size_bytes: int = 13_600_000, repeats: int = 15) -> float:
    """A memcpy between two touched buffers."""
    source, target = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    taken: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - began)
    return size_bytes / statistics.median(taken)


def write_bytes_per_s(file: BinaryIO, size_bytes: int = 1_000_000, repeats: int = 200) -> float:
    """Plain writes to a file that grows, a megabyte at a time, as the log does."""
    piece = np.random.default_rng(2).bytes(size_bytes)
    began = time.perf_counter()
    for _ in range(repeats):
        file.write(piece)
    return size_bytes * repeats / (time.perf_counter() - began)


def columns_us(num_trajectories: int, repeats: int, *, framed: bool, num_tokens: int = 2048) -> float:
    """CPU microseconds per trajectory to encode and decode so many at a time; ``framed``: and to frame, checksum and verify them in between."""
    group = [msgspec.structs.replace(make_trajectory(num_tokens, member), key=TrajectoryKey(0, 0, member, 0)) for member in range(num_trajectories)]

    def once() -> None:
        batch = encode(group)
        if framed:
            frame = to_frame(batch)
            batch = from_frame(frame, frame_checksum(frame))
        assert len(decode(batch)) == num_trajectories

    once()  # its memory is new
    began = time.process_time()
    for _ in range(repeats):
        once()
    return (time.process_time() - began) / repeats / num_trajectories * 1e6


# --- all of it ------------------------------------------------------------------------------------------------------------------------


def stream_rows(measured: list[Figures], copies: list[float], writes: list[float], relays: list[tuple[float, float]]) -> list[Row]:
    """Our stream against a copy, a plain write and a bare relay (bytes per second, CPU seconds per byte)."""
    copy = statistics.median(copies)
    pairs = list(zip(measured, copies, strict=True))
    latencies = [latency for figures in measured for latency in figures.latencies_ms]
    per_million = [figures.cpu_s / figures.num_tokens * 1e6 for figures in measured]
    return [
        row("memory copy", [value / 1e9 for value in copies], "GB/s"),
        row("stream, durable", [figures.size_bytes / figures.wall_s / 1e9 for figures in measured], "GB/s", yardstick="copy", over=copy / 1e9),
        row("stream, trajectories", [figures.num_trajectories / figures.wall_s for figures in measured], "per s"),
        row("stream, CPU", per_million, "s/M tokens", yardstick="copy", over=BYTES_PER_TOKEN * 1e6 / copy),
        row("stream, CPU per trajectory", [figures.cpu_s / figures.num_trajectories * 1e6 for figures in measured], "µs"),
        row("stream, wall over copy", [figures.wall_s * value / figures.size_bytes for figures, value in pairs], "copies"),
        row("plain write to a file", [value / 1e9 for value in writes], "GB/s", yardstick="copy", over=copy / 1e9),
        row("stream, wall over write", [figures.wall_s * value / figures.size_bytes for figures, value in zip(measured, writes, strict=True)], "writes"),
        row("bare relay", [rate / 1e9 for rate, _ in relays], "GB/s", yardstick="copy", over=copy / 1e9),
        row("bare relay, CPU", [cpu * BYTES_PER_TOKEN * 1e6 for _, cpu in relays], "s/M tokens", yardstick="copy", over=BYTES_PER_TOKEN * 1e6 / copy),
        row("stream, wall over relay", [figures.wall_s * rate / figures.size_bytes for figures, (rate, _) in zip(measured, relays, strict=True)], "relays"),
        row("stream, CPU over relay", [figures.cpu_s / figures.size_bytes / cpu for figures, (_, cpu) in zip(measured, relays, strict=True)], "relays"),
        row("loaded latency p50", [float(np.percentile(latencies, 50))], "ms"),
        row("loaded latency p99", [float(np.percentile(latencies, 99))], "ms"),
        row("buffer, resident", [figures.buffer_mb for figures in measured], "MB"),
    ]


def main() -> None:
    """Measure and print."""
    arguments = options(__doc__)
    repeats, seconds = (3, 1.5) if arguments.quick else (7, 5.0)
    pool = make_pool(64, SHORTEST, LONGEST)
    copies: list[float] = []
    writes: list[float] = []
    relays: list[tuple[float, float]] = []
    rival_figures: dict[str, list[tuple[float, float]]] = {name: [] for name in RIVALS}
    with Pipe() as pipe, tempfile.TemporaryFile(buffering=0) as file:

        def between() -> None:
            copies.append(copy_bytes_per_s())
            writes.append(write_bytes_per_s(file))
            with BareRelay() as relay:
                relays.append(relay.measure(seconds / 3))

        measured = measure_stream(pool, 16, seconds, repeats, between)
        with_images = measure_stream(pool, 4, seconds, repeats, lambda: None, num_images=NUM_IMAGES)
        for _ in range(repeats):
            for name in RIVALS:
                rival_figures[name].append(pipe.measure(name, pool, seconds / 3))
    rows = stream_rows(measured, copies, writes, relays)
    rates = [figures.size_bytes / figures.wall_s / 1e9 for figures in with_images]
    rows.append(row(f"stream with {NUM_IMAGES} images of {len(IMAGE) // 1000} kB", rates, "GB/s", yardstick="copy", over=statistics.median(copies) / 1e9))
    ours_rate, ours_cpu = rows[1].value, rows[3].value
    for name, found in rival_figures.items():
        rows.append(row(f"{name} over ZeroMQ", [rate * BYTES_PER_TOKEN / 1e9 for rate, _ in found], "GB/s", yardstick="stream", over=ours_rate))
        rows.append(row(f"{name} over ZeroMQ, CPU", [cpu for _, cpu in found], "s/M tokens", yardstick="stream", over=ours_cpu))
    if importlib.util.find_spec("ray") is None:
        print("ray is not installed, so its object store and queue were not measured (pip install 'rollstream[ray]')")
    else:
        for name, rates in ray_rates(pool, seconds / 3, repeats).items():
            rows.append(row(name, [rate * BYTES_PER_TOKEN / 1e9 for rate in rates], "GB/s", yardstick="stream", over=ours_rate))
    quiet = measure_quiet(100 if arguments.quick else 500)
    rows.append(row("quiet latency p50, group of 8 × 1 k", [float(np.percentile(quiet, 50))], "ms"))
    rows.append(row("quiet latency p99, group of 8 × 1 k", [float(np.percentile(quiet, 99))], "ms"))
    for num in (GROUP_SIZE, 7 * GROUP_SIZE, 64 * GROUP_SIZE):  # a group; as much as one append coalesces; the 13.6 MB of a whole batch
        for framed, name in ((False, "encode + decode"), (True, "the same with frame and checksums")):
            rows.append(row(f"{name}, {num} of 2048 tokens", [columns_us(num, 4096 // num, framed=framed) for _ in range(repeats)], "µs/trajectory"))
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
