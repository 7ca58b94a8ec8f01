"""Asynchronous against synchronous training of the quickstart recipe, with a slow environment.

The same recipe and the same code twice, interleaved: ``depth 2, max_lag 4`` and ``depth 0`` (on-policy: the learner waits for its batch, the actors
wait for their weights). Every episode waits once for a tool: lognormal, median 0.3 s, 99th percentile 3 s. Reported: seconds from version 0 to a success
rate of 0.9 (mean of five versions), and trained samples per second. The yardstick of each figure is the synchronous mode in the same run. ``ceiling`` is
what a discrete-event simulation of the window (ARCHITECTURE, "Staleness") gives for these latencies when nothing but learning costs time.
"""

from __future__ import annotations

import heapq
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import Row, options, report, row
from slow_key_value import STANDARD_NORMAL_P99

HERE = Path(__file__).resolve().parent
TARGET = 0.9
WINDOW = 5
MODES = {"async": (2, 4), "sync": (0, 0)}
BATCH_GROUPS, GROUP_SIZE = 12, 8


def train(mode: str, seed: int, versions: int, folder: Path, *extra: str) -> dict[str, float]:
    """One run, stopped as soon as the target is reached; its figures."""
    depth, max_lag = MODES[mode]
    overrides = {
        "name": f"{mode}-{seed}",
        "folder": folder,
        "seed": seed,
        "imports": f"[{HERE / 'slow_key_value.py'}]",
        "env.id": "bench/SlowKeyValue-v0",
        "buffer.depth": depth,
        "buffer.max_lag": max_lag,
        "actors.slots": (MODES["async"][0] + 1) * BATCH_GROUPS * GROUP_SIZE,
        "learner.versions": versions,
    }
    command = [sys.executable, "-m", "rollstream", "train", "quickstart", *(f"{key}={value}" for key, value in overrides.items()), *extra]
    metrics = folder / f"{mode}-{seed}" / "metrics.jsonl"
    with (folder / f"{mode}-{seed}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.5)
            if reached(rows := read(metrics)) is not None and len(rows) >= WINDOW:
                process.send_signal(signal.SIGINT)
                process.wait()
    rows = read(metrics)
    if len(rows) < WINDOW:
        raise SystemExit(f"the {mode} run ended after {len(rows)} versions:\n{(folder / f'{mode}-{seed}.log').read_text()[-2000:]}")
    began = rows[0]["time/wall_s"] - rows[0]["time/step_s"]
    first = reached(rows)
    episodes = sum(entry["train/episodes"] for entry in rows[1:])
    return {
        "to_target_s": (first["time/wall_s"] - began) if first else math.nan,
        "samples_per_s": episodes / (rows[-1]["time/wall_s"] - rows[0]["time/wall_s"]),
        "busy_s": statistics.median(entry["time/forward_backward_s"] + entry["time/optimizer_s"] for entry in rows),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The metric rows so far."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def reached(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first row at which the mean success of five versions is above the target."""
    for end in range(WINDOW, len(rows) + 1):
        if statistics.fmean(entry["train/success"] for entry in rows[end - WINDOW : end]) >= TARGET:
            return rows[end - 1]
    return None


def simulated_version_s(depth: int, max_lag: int, busy_s: float, *, versions: int = 300, seed: int = 0) -> float:
    """Mean seconds per version when groups take their latency, batches ``busy_s``, and nothing else costs anything."""
    random = np.random.default_rng(seed)
    sigma = math.log(3.0 / 0.3) / STANDARD_NORMAL_P99
    window, capacity = (max_lag - depth) * BATCH_GROUPS + 1, (depth + 1) * BATCH_GROUPS
    events: list[tuple[float, int]] = []
    ready: set[int] = set()
    taken: set[int] = set()
    leased = outstanding = head = done = 0
    now = 0.0
    training = False
    while done < versions:
        while outstanding < capacity:
            heapq.heappush(events, (now + 0.3 * math.exp(sigma * random.standard_normal(GROUP_SIZE).max()), leased))
            leased, outstanding = leased + 1, outstanding + 1
        batch: list[int] = []
        first = head
        while not training and len(batch) < BATCH_GROUPS:
            while first in taken or first in batch:
                first += 1
            choice = min((group for group in ready if group < first + window and group not in batch), default=None)
            if choice is None:
                break
            batch.append(choice)
        if len(batch) == BATCH_GROUPS:
            ready.difference_update(batch)
            taken.update(batch)
            while head in taken:
                taken.discard(head)
                head += 1
            training = True
            heapq.heappush(events, (now + busy_s, -1))
        now, group = heapq.heappop(events)
        if group >= 0:
            ready.add(group)
        else:
            training, done, outstanding = False, done + 1, outstanding - BATCH_GROUPS
    return now / versions


def main() -> None:
    """Run both modes in turn and report."""
    arguments = options(__doc__)
    seeds, versions = ([0], 5) if arguments.quick else ([0, 1, 2], 260)
    extra = ["warmup.steps=10"] if arguments.quick else []
    figures: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for mode in MODES:
                figures[mode].append(train(mode, seed, versions, Path(folder), *extra))
                print(f"{mode} seed {seed}: " + ", ".join(f"{key} {value:.3g}" for key, value in figures[mode][-1].items()), flush=True)
    busy_s = statistics.median(entry["busy_s"] for entry in figures["async"])
    ceiling = simulated_version_s(0, 0, busy_s) / simulated_version_s(*MODES["async"], busy_s)
    rows: list[Row] = []
    for key, unit in (("samples_per_s", "samples/s"), ("to_target_s", "s"))[: 1 if arguments.quick else 2]:
        sync = statistics.median(entry[key] for entry in figures["sync"])
        for mode in MODES:
            rows.append(row(f"{mode} {key}", [entry[key] for entry in figures[mode]], unit, yardstick="synchronous mode", over=sync))
    speedup = statistics.median(entry["samples_per_s"] for entry in figures["async"]) / statistics.median(entry["samples_per_s"] for entry in figures["sync"])
    rows.append(row("async over sync, samples/s", [speedup], "×", yardstick="simulated ceiling", over=ceiling))
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
