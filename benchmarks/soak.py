"""A soak: the whole system at full rate for ten minutes; nothing may grow and the books must close.

Two runs one after the other, each for half of the time: the quickstart with its real roles (supervisor, buffer, learner, actor: weights are pushed at every
version), and the bare stream with two producers that play in no time. Every few seconds: resident memory, open files and threads of each process, bytes in
``/dev/shm``, Unix sockets. Reported is the second half's growth over the first half's median, the yardstick. ``--quick`` takes half a minute.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from report import Row, options, report, row
from stream import LONGEST, NUM_PRODUCERS, SHORTEST, SPAWN, buffer_main, consumer_of, make_pool, make_run, processes, producer_main

EVERY_S = 2.0
CHECKPOINT_EVERY = 50
SHARED_MEMORY = Path("/dev/shm")


@dataclasses.dataclass(frozen=True)
class Sample:
    """What all processes of a run hold at one moment."""

    resident_mb: float
    num_files: float
    num_threads: float
    shared_mb: float


def sample(root: psutil.Process) -> Sample:
    """Sums over ``root`` and everything it started."""
    live = [root, *root.children(recursive=True)]
    resident = files = threads = 0
    for process in live:
        try:
            resident += process.memory_info().rss
            files += process.num_fds()
            threads += process.num_threads()
        except psutil.Error:  # it ended between the list and the look
            continue
    shared = sum(path.stat().st_size for path in SHARED_MEMORY.iterdir() if path.is_file()) if SHARED_MEMORY.is_dir() else 0
    return Sample(resident / 1e6, files, threads, shared / 1e6)


def watch(root: psutil.Process, seconds: float, step: Callable[[], None]) -> list[Sample]:
    """Samples for so long, the first fifth of the time left out; ``step`` runs in between."""
    began, taken, due = time.monotonic(), [], 0.0
    while (passed := time.monotonic() - began) < seconds:
        step()
        if passed >= seconds / 5 and passed >= due:
            taken.append(sample(root))
            due = passed + EVERY_S
    return taken


def soak_roles(seconds: float) -> list[Sample]:
    """The quickstart's roles, stopped like a user stops them; the audit must be clean."""
    with tempfile.TemporaryDirectory(prefix="rollstream-soak-") as folder:
        command = [sys.executable, "-m", "rollstream", "train", "quickstart", "name=soak", f"folder={folder}", "learner.versions=100000", "--quiet"]
        process = subprocess.Popen(command)
        metrics = Path(folder) / "soak" / "metrics.jsonl"
        while not metrics.exists() or not metrics.read_text():
            time.sleep(0.5)
            if process.poll() is not None:
                raise SystemExit(f"the run ended with exit code {process.returncode} before its first version")
        taken = watch(psutil.Process(process.pid), seconds, lambda: time.sleep(0.2))
        process.send_signal(signal.SIGINT)
        process.wait()
        print(f"real roles: {len(metrics.read_text().splitlines())} versions", flush=True)
        audit = subprocess.run([sys.executable, "-m", "rollstream", "audit", f"{folder}/soak"], check=False)
        if audit.returncode:
            raise SystemExit("the books of the run with the real roles do not close")
    return taken


def soak_stream(seconds: float) -> list[Sample]:
    """The bare stream at full rate; the buffer checks the books at every version.

    Syncs and empty checkpoint folders stand in for the learner's: retention removes the rows behind them, so that the disk does not fill.
    """
    folder = Path(tempfile.mkdtemp(prefix="rollstream-soak-"))
    run = make_run(folder, 16, keep_gb=4.0)
    pool = make_pool(64, SHORTEST, LONGEST)
    producers = [SPAWN.Process(target=producer_main, args=(run, f"actor-{index}", pool, 32), daemon=True) for index in range(NUM_PRODUCERS)]
    version = num_trajectories = 0

    def step() -> None:
        nonlocal version, num_trajectories
        batch = learner.pull(version + 1, lambda reason: None, threading.Event())
        assert batch is not None
        version, num_trajectories = version + 1, num_trajectories + len(batch.trajectories)
        learner.trained(version)
        if version % CHECKPOINT_EVERY == 0:
            learner.sync()
            (run.checkpoints_folder / f"v{version:06d}").mkdir(parents=True)

    try:
        with (
            processes(SPAWN.Process(target=buffer_main, args=(run,), daemon=True), *producers),
            consumer_of(run) as learner,
        ):
            learner.hello(0)
            taken = watch(psutil.Process(os.getpid()), seconds, step)
        print(f"bare stream: {num_trajectories:,} trajectories in {version:,} batches", flush=True)
        return taken
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(run.socket_folder, ignore_errors=True)


def rows_of(name: str, taken: list[Sample]) -> list[Row]:
    """Each figure of the second half against the first half's median."""
    half = len(taken) // 2
    found: list[Row] = []
    for entry in dataclasses.fields(Sample):
        unit = "MB" if entry.name.endswith("_mb") else ""
        first = row("", [getattr(one, entry.name) for one in taken[:half]], unit).value
        label = f"{name}, {entry.name.removesuffix('_mb').removeprefix('num_').replace('_', ' ')}"
        found.append(row(label, [getattr(one, entry.name) for one in taken[half:]], unit, yardstick="first half", over=first or None))
    return found


def main() -> None:
    """Both runs."""
    arguments = options(__doc__)
    seconds = 15.0 if arguments.quick else 300.0
    rows = rows_of("real roles", soak_roles(seconds)) + rows_of("bare stream", soak_stream(seconds))
    left = [path for path in SHARED_MEMORY.rglob("*") if path.is_file() and "rollstream" in str(path)] if SHARED_MEMORY.is_dir() else []
    rows.append(row("shared memory left behind", [float(len(left))], "files"))
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
