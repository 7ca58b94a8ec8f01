"""Training from a recorded stream gives the recorded loss curve: bit for bit twice on one machine, and to 1e-5 the one that is committed.

``tests/golden/loss_curve`` holds the stream (Arrow), the curves, and the script that recorded both.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollstream.buffer.columns import decode
from rollstream.buffer.types import Batch
from rollstream.buffer.wire import StatusReply, Welcome
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.learner.loop import learn_from

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "loss_curve"
TOLERANCE = 1e-5
SETTINGS = {
    "async": ("learner.preset=async", "learner.loss.entropy_coef=0.01"),
    "grpo": ("learner.preset=grpo", "learner.updates={mini_batches: 3, epochs: 2}"),
    "gspo": ("learner.preset=gspo", "learner.loss={kl: k2, kl_coef: 0.01}"),
}
"""What is trained from the stream: a step per batch, several steps per batch, ratios and a reference per sequence."""


class Stream:
    """The recorded batches in the place of the buffer."""

    def __init__(self) -> None:
        with pa.OSFile(str(FOLDER / "stream.arrow")) as source, pa.ipc.open_stream(source) as reader:
            self.batches = [self._batch(version, part) for version, part in enumerate(reader, start=1)]
        self.digests: dict[int, str] = {}

    @staticmethod
    def _batch(version: int, part: pa.RecordBatch) -> Batch:
        trajectories = decode(part)
        return Batch(0, version, tuple(dict.fromkeys(one.key.group_id for one in trajectories)), tuple(trajectories))

    def hello(self, version: int, lineage: int) -> Welcome:
        return Welcome(0, version)

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
        return self.batches[version - 1]

    def trained(self, version: int) -> None:
        return

    def published(self, version: int, digest: str) -> str:
        self.digests[version] = digest
        return ""

    def sync(self) -> None:
        return

    def status(self) -> StatusReply:
        return StatusReply(0, 0, {}, {}, [], "")


def run_in(folder: Path, name: str) -> Run:
    tiny = "model={kind: tiny, num_layers: 2, hidden_size: 32, num_heads: 2, num_kv_heads: 1}"
    sizes = ("learner.batch_groups=3", "learner.group_size=4", "learner.versions=8", "learner.tokens_per_micro_batch=160")
    rest = ("warmup=null", "learner.alarms.ess_stop=null", "learner.optimizer={learning_rate: 3e-3, weight_decay: 0.01, warmup_versions: 2}", "seed=5")
    return Run(folder, load_config("quickstart", [tiny, *sizes, *rest, *SETTINGS[name]]), f"curve-{folder}")


def trained(folder: Path, name: str) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The rows of a run over the whole stream, and the digest of each version's weights."""
    run, source = run_in(folder, name), Stream()
    learn_from(run, source, threading.Event())
    return [json.loads(line) for line in run.metrics_path.read_text().splitlines()], source.digests


def curve(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What follows from the data and the weights."""
    return [{name: value for name, value in row.items() if name.startswith(("loss/", "train/", "optim/"))} for row in rows]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_recorded_stream_gives_the_recorded_curve(name: str, tmp_path: Path) -> None:
    rows, _ = trained(tmp_path, name)
    expected = json.loads((FOLDER / "curves.json").read_text(encoding="utf-8"))[name]
    found = curve(rows)
    assert len(found) == len(expected) == 8
    for version, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
        assert one.keys() == other.keys(), f"version {version}"
        wrong = {key: (one[key], other[key]) for key in one if one[key] != pytest.approx(other[key], rel=TOLERANCE, abs=TOLERANCE)}
        assert wrong == {}, f"version {version}"
    assert len({row["loss/total"] for row in found}) == 8, "it learns something"


@pytest.mark.parametrize("name", ["async", "grpo"])
def test_training_twice_from_the_stream_is_bit_identical(name: str, tmp_path: Path) -> None:
    (first, digests), (second, again) = (trained(tmp_path / part, name) for part in ("first", "second"))
    assert curve(first) == curve(second)
    assert digests == again
    assert len(set(digests.values())) == 9


def test_the_recording_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 400_000
