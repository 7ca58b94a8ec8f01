"""Weights & Biases: offline files are read back, a resume keeps the run id, and nothing that goes wrong there touches the training."""

from __future__ import annotations

import importlib.util
import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wandb.proto import wandb_internal_pb2

from rollstream import cli
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.buffer.wire import StatusReply, Welcome
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.errors import MissingExtra
from rollstream.learner import wandb_tracker
from rollstream.learner.loop import learn_from
from rollstream.learner.wandb_tracker import WandbTracker

BLOCK, IDENT, HEADER = 32 * 1024, 7, 7


def run_in(folder: Path, *overrides: str) -> Run:
    tiny = "model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}"
    sizes = ("learner.batch_groups=1", "learner.group_size=2", "learner.versions=3", "learner.alarms.ess_stop=null")
    folder.mkdir(parents=True, exist_ok=True)
    return Run(folder, load_config("quickstart", ["warmup=null", tiny, *sizes, "tracking.wandb={project: demo}", *overrides]), "abc123")


class Recording:
    """Recorded batches in the place of the buffer, up to ``last``."""

    def __init__(self, last: int = 3) -> None:
        self.last = last

    def hello(self, version: int, lineage: int, vocabulary: int) -> Welcome:
        return Welcome(0, version)

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
        return batch(version) if version <= self.last else None

    def trained(self, version: int) -> None:
        return

    def published(self, version: int, digest: str) -> str:
        return ""

    def sync(self) -> None:
        return

    def status(self) -> StatusReply:
        return StatusReply(0, 0, {}, {}, [], "")


def batch(version: int) -> Batch:
    def trajectory(member: int) -> Trajectory:
        mask = np.array([0, 0, 1, 1, 1, 1], np.uint8)
        ids = np.random.default_rng([version, member]).integers(0, 200, 6).astype(np.int32)
        zeros = np.zeros(1, np.int32)
        segment = Segment(ids, mask, np.where(mask, -5.6, 0.0).astype(np.float32), zeros, zeros + version - 1, zeros, ("assistant",), (None,))
        return Trajectory(TrajectoryKey(0, version, member, 0), "env", 0, 0, "train", (segment,), float(member), "terminated", "terminated")

    return Batch(0, version, (version,), (trajectory(0), trajectory(1)))


def records(path: Path) -> Iterator[Any]:
    """The records of a file of the library: LevelDB's log format behind seven bytes of its own."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = IDENT, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # full, last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def history(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            found.append({name: value for name, value in items.items() if not name.startswith("_")})
    return found


def patience(seen: Callable[[], bool]) -> None:
    """The library's own process writes the file; on a busy machine that takes a moment."""
    deadline = time.monotonic() + 30
    while not seen() and time.monotonic() < deadline:
        time.sleep(0.1)


def offline_files(run: Run) -> list[Path]:
    return sorted((run.folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)


def rows(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics_path.read_text().splitlines()]


def test_offline_files_hold_the_rows_and_a_resume_goes_on_under_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_tracker, "CLOSE_S", 100.0)  # a busy machine may take long to start it
    run = run_in(tmp_path / "run")
    learn_from(run, Recording(last=2), threading.Event())
    (first,) = offline_files(run)
    patience(lambda: len(history(first)) == 2)
    assert first.name == f"run-{run.run_id}.wandb"
    assert history(first) == rows(run)
    (made,) = [record.run for record in records(first) if record.WhichOneof("record_type") == "run"][:1]
    assert (made.project, made.display_name, made.run_id) == ("demo", run.config.name, run.run_id)
    configured = {item.key: json.loads(item.value_json) for item in made.config.update}
    assert configured["learner"]["batch_groups"] == 1

    learn_from(run, Recording(), threading.Event())
    again = [path for path in offline_files(run) if path != first]
    assert [path.name for path in again] == [first.name], "the same id, so that wandb sync joins both"
    patience(lambda: len(history(again[0])) == 1)
    assert [row["version"] for row in history(again[0])] == [3]
    assert [row["version"] for row in rows(run)] == [1, 2, 3]


@pytest.mark.parametrize("server", ["no key", "nobody listens"])
def test_an_account_or_server_that_fails_is_told_once_and_costs_no_row(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(wandb_tracker, "CLOSE_S", 3.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    if server == "nobody listens":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    run = run_in(tmp_path / "run", "tracking.wandb.mode=online")
    with caplog.at_level(logging.WARNING, "rollstream"):
        learn_from(run, Recording(), threading.Event())
    assert [row["version"] for row in rows(run)] == [1, 2, 3]
    told = [record.getMessage() for record in caplog.records if "wandb=off" in record.getMessage()]
    assert len(told) == 1
    assert f"rows_are_in={run.metrics_path}" in told[0]


def test_a_folder_it_cannot_write_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_in(tmp_path / "run")
    tracker = WandbTracker(run.config.tracking.wandb, Run(Path("/proc/nowhere"), run.config, run.run_id))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "rollstream"):
        for version in range(3):
            tracker.row(version, {"train/tokens": 1.0})
        tracker.close()
    assert sum("wandb=off" in record.getMessage() for record in caplog.records) <= 1


def test_without_the_library_a_run_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None if name == "wandb" else find(name, package))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", "quickstart", "tracking.wandb={}"])
    line = capsys.readouterr().err
    assert caught.value.code == 2
    assert "pip install 'rollstream[wandb]'" in line
    with pytest.raises(MissingExtra):
        WandbTracker(run_in(tmp_path / "run").config.tracking.wandb, run_in(tmp_path / "run"))  # type: ignore[arg-type]
    assert not list((tmp_path / "run").iterdir())
