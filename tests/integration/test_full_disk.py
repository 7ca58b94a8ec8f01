"""A disk that has no room: the learner waits for it as the buffer does, and nothing is left out; who does not want to wait is told what was not written."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollstream.buffer.audit import audit
from rollstream.errors import CheckpointError
from rollstream.learner.checkpoint import begin_checkpoint, refused_by_disk
from rollstream.learner.tracker import Tracker
from whole_runs import PatientJob


def _write(tensors: dict[str, Any], path: Path) -> None:
    path.write_bytes(b"".join(tensor.numpy().tobytes() for tensor in tensors.values()))


@pytest.mark.parametrize("save", [torch.save, save_file, _write])
def test_a_full_disk_is_named_with_the_last_good_checkpoint_and_the_half_written_one_goes(save: Callable[..., None], small_disk: Path) -> None:
    temporary = begin_checkpoint(small_disk, 3)
    with pytest.raises(CheckpointError, match=r"v000003 was not written: .*No space left on device"), refused_by_disk(small_disk, 3):
        save({"weights": torch.zeros(8 * 2**20)}, temporary / "file")
    assert list(small_disk.iterdir()) == []


@contextlib.contextmanager
def filled(disk: Path) -> Generator[None]:
    """No byte is free until the end."""
    ballast = disk / "ballast"
    for size in (65536, 1):
        with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(size))
    try:
        yield
    finally:
        ballast.unlink()


def wait_until_it_waits(job: PatientJob) -> None:
    """No version for four seconds; its logs may have no room to say so."""
    seen = [(time.monotonic(), job.version())]

    def stands() -> bool:
        if job.version() != seen[-1][1]:
            seen.append((time.monotonic(), job.version()))
        return time.monotonic() - seen[-1][0] > 4.0

    job.wait_for(stands, "the run to wait for space")


@pytest.mark.timeout(300)
def test_a_run_waits_for_space_and_leaves_nothing_out(small_disk: Path) -> None:
    job = PatientJob(small_disk, "learner.versions=60", "learner.checkpoint.every=2")
    try:
        job.wait_for_version(8)
        with filled(small_disk):
            wait_until_it_waits(job)
        code, out, err = job.end()
    finally:
        job.finish()
    assert code == 0, f"{out}\n{err}\n{job.logs()}"
    assert [row["version"] for row in job.rows()] == list(range(1, 61))
    report = audit(job.run_folder)
    assert (report.closes, report.problems, report.version) == (True, [], 60)
    board = EventAccumulator(str(job.run_folder / "tensorboard"), {"scalars": 0})
    board.Reload()
    assert [event.step for event in board.Scalars("train/success")] == list(range(1, 61))


@pytest.mark.timeout(300)
def test_a_run_that_is_stopped_while_the_disk_is_full_ends_in_order_and_goes_on_with_resume(small_disk: Path) -> None:
    job = PatientJob(small_disk, "learner.versions=60", "learner.checkpoint.every=2")
    try:
        job.wait_for_version(4)
        with filled(small_disk):
            wait_until_it_waits(job)
            job.process.send_signal(signal.SIGINT)
            code, out, err = job.end()
    finally:
        job.finish()
    assert code in (1, 130), err  # a checkpoint that was due is an error, one that was not is none
    assert "by force" not in out
    assert job.leftovers() == []
    again = PatientJob(small_disk, "learner.versions=60", "--resume")
    try:
        code, out, err = again.end()
    finally:
        again.finish()
    assert code == 0, f"{out}\n{err}"
    assert [row["version"] for row in again.rows()] == list(range(1, 61))
    report = audit(again.run_folder)
    assert (report.closes, report.problems) == (True, [])


def test_a_row_waits_for_space_whole(small_disk: Path) -> None:
    tracker = Tracker(small_disk / "metrics.jsonl", small_disk / "tensorboard", 0, None, threading.Event())
    tracker.row(0, 1, {"a/b": 1.0})
    writing = threading.Thread(target=lambda: [tracker.row(0, version, {f"a/{name}": 1.0 for name in range(900)}) for version in range(2, 12)])
    with filled(small_disk):
        writing.start()
        time.sleep(3.0)
        assert writing.is_alive()
    writing.join(20)
    tracker.close()
    lines = (small_disk / "metrics.jsonl").read_text().splitlines()
    assert [line.startswith(f'{{"version": {version},') and line.endswith("}") for version, line in enumerate(lines, 1)] == [True] * 11


def test_a_row_that_may_not_wait_names_its_file(small_disk: Path) -> None:
    stop = threading.Event()
    tracker = Tracker(small_disk / "metrics.jsonl", small_disk / "tensorboard", 0, None, stop)
    stop.set()
    with filled(small_disk), pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
        tracker.row(0, 1, {f"a/{name}": 1.0 for name in range(900)})
