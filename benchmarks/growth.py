"""Does a trajectory cost more when the run is long? The buffer of three runs of 10 k, 100 k and 1 M stored trajectories of 16 tokens, live side by side.

Each run is filled through the real stream (producer → durable buffer → consumer), then all are measured in turns: CPU microseconds of the buffer's process
per trajectory stored and served, user and system, its threads included. The yardstick is the shortest run. At the end each buffer is killed and started
again: seconds until it answers the learner.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
from report import Row, options, report, row
from stream import GROUP_SIZE, SPAWN, buffer_main, consumer_of, make_pool, make_run, producer_main

NUM_TOKENS = 16
BATCH_GROUPS = 64
PER_BATCH = BATCH_GROUPS * GROUP_SIZE


class Grown:
    """One run: its buffer lives all the time, its producer only while it is filled or measured."""

    def __init__(self, label: str, folder: Path) -> None:
        self.label = label
        self.run = make_run(folder, BATCH_GROUPS)
        self.pool = make_pool(64, NUM_TOKENS, NUM_TOKENS + 1)
        self.version = 0
        self.cpu_us: list[float] = []
        self.resident_mb: list[float] = []
        self._start_buffer()

    def _start_buffer(self) -> None:
        self.buffer: BaseProcess = SPAWN.Process(target=buffer_main, args=(self.run,), daemon=True)
        self.buffer.start()
        self.learner = consumer_of(self.run)
        self.learner.hello(self.version)

    def consume(self, num_batches: int) -> None:
        """Pulls and trains so many batches."""
        for _ in range(num_batches):
            assert self.learner.pull(self.version + 1, lambda reason: None, threading.Event()) is not None
            self.version += 1
            self.learner.trained(self.version)

    def fill(self, num_trajectories: int) -> None:
        """Runs the stream until so many are stored and trained."""
        with self._producing():
            self.consume(max(0, num_trajectories // PER_BATCH - self.version))

    def measure(self, num_batches: int) -> None:
        """One stretch of the stream."""
        with self._producing():
            self.consume(4)
            process = psutil.Process(self.buffer.pid)
            before = sum(process.cpu_times()[:2])
            self.consume(num_batches)
            self.cpu_us.append((sum(process.cpu_times()[:2]) - before) / (num_batches * PER_BATCH) * 1e6)
            self.resident_mb.append(process.memory_info().rss / 1e6)

    def restart_s(self) -> float:
        """Kills the buffer and starts it again; seconds until it answers, the start of the process included."""
        self.buffer.kill()
        self.buffer.join()
        self.learner.close()
        began = time.perf_counter()
        self._start_buffer()
        return time.perf_counter() - began

    def end(self) -> None:
        """Ends the buffer and removes what it wrote."""
        self.learner.close()
        self.buffer.kill()
        self.buffer.join()
        shutil.rmtree(self.run.folder, ignore_errors=True)
        shutil.rmtree(self.run.socket_folder, ignore_errors=True)

    def _producing(self) -> _Producer:
        return _Producer(self)


class _Producer:
    """A producer of ``grown`` while the block runs."""

    def __init__(self, grown: Grown) -> None:
        self._process = SPAWN.Process(target=producer_main, args=(grown.run, "actor-0", grown.pool, 2 * BATCH_GROUPS), daemon=True)

    def __enter__(self) -> None:
        self._process.start()

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def main() -> None:
    """Fill, measure in turns, restart."""
    arguments = options(__doc__)
    sizes = {"2 k": 2_000, "8 k": 8_000, "32 k": 32_000} if arguments.quick else {"10 k": 10_000, "100 k": 100_000, "1 M": 1_000_000}
    repeats, num_batches = (3, 8) if arguments.quick else (9, 40)
    runs = [Grown(label, Path(tempfile.mkdtemp(prefix="rollstream-growth-"))) for label in sizes]
    try:
        for grown, size in zip(runs, sizes.values(), strict=True):
            began = time.perf_counter()
            grown.fill(size)
            print(f"{grown.label}: {size:,} trajectories stored and served in {time.perf_counter() - began:.0f} s", flush=True)
        for _ in range(repeats):
            for grown in runs:
                grown.measure(num_batches)
        report(rows_of(runs), arguments.json)
    finally:
        for grown in runs:
            grown.end()


def rows_of(runs: list[Grown]) -> list[Row]:
    """The figures of all runs; the first is the yardstick."""
    rows: list[Row] = []
    for grown in runs:
        over = rows[0].value if rows else None
        rows.append(row(f"buffer CPU per trajectory, {grown.label} stored", grown.cpu_us, "µs", yardstick=runs[0].label, over=over))
    rows += [row(f"buffer resident, {grown.label} stored", grown.resident_mb, "MB") for grown in runs]
    rows += [row(f"restart, {grown.label} stored", [grown.restart_s()], "s") for grown in runs]
    return rows


if __name__ == "__main__":
    main()
