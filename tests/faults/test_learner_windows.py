"""The windows of the real learner: it is killed at that very instant, resumes from its checkpoint, and ends with the very weights of a run nobody interrupted.

Learner, ledger, log and checkpoints are real; they share one process, which is a fork of the test's.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import failpoints
import recorded_run
from rollstream.buffer.audit import audit
from rollstream.configs.run_folder import Run
from rollstream.learner import checkpoint
from rollstream.learner.loop import learn_from

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


OPTIONS = ("learner.versions=5", "learner.checkpoint={every: 2, keep_last: 2}")


def train(run: Run, arm: Callable[[Any], None] = lambda stream: None) -> list[str]:
    stream = recorded_run.Stream(run)
    arm(stream)
    learn_from(run, stream, threading.Event())
    stream.close()
    return [note for note in stream.notes if note]


def killed(run: Run, arm: Callable[[Any], None]) -> None:
    """Trains in a process of its own, which dies where ``arm`` says."""
    pid = os.fork()
    if pid == 0:
        try:
            train(run, arm)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "it did not die in the window"


def at_version(version: int, name: str) -> Callable[[Any], None]:
    """Dies in the place of the stream's method ``name`` once it is called for ``version``."""

    def arm(stream: Any) -> None:
        method = getattr(stream, name)

        def dies(found: int, *rest: Any) -> Any:
            return failpoints.die() if found == version else method(found, *rest)

        setattr(stream, name, dies)

    return arm


def always(*_: Any) -> bool:
    return True


def while_saving(version: int, owner: Any, name: str, wanted: Callable[..., bool] = always) -> Callable[[Any], None]:
    """Dies in the place of a function that writes a checkpoint, once ``version`` was trained."""

    def arm(stream: Any) -> None:
        function = getattr(owner, name)

        def dies(*given: Any, **more: Any) -> Any:
            return failpoints.die() if stream.books.version == version and wanted(*given) else function(*given, **more)

        setattr(owner, name, dies)

    return arm


def names_it(_: Path, target: Path) -> bool:
    return target.name == "v000004"


WINDOWS = {
    "the optimiser has stepped, the buffer was not told": at_version(4, "trained"),
    "the batch is recorded, the learner has not got it": at_version(4, "pull"),
    "the digest was not recorded": at_version(3, "published"),
    "the checkpoint's weights are written, its optimiser is not": while_saving(4, torch, "save"),
    "the checkpoint is written, log and ledger are not flushed": while_saving(4, recorded_run.Stream, "sync"),
    "the checkpoint is written and flushed, it has not got its name": while_saving(4, Path, "rename", names_it),
    "the checkpoint is complete, older ones were not removed": while_saving(4, checkpoint, "_remove"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run: Run = recorded_run.make_run(tmp_path_factory.mktemp("whole"), *OPTIONS)
    assert train(run) == []
    return run


@pytest.mark.parametrize("window", WINDOWS)
def test_a_learner_killed_in_any_window_ends_with_the_same_weights_to_the_last_bit(whole: Run, tmp_path: Path, window: str) -> None:
    run = recorded_run.make_run(tmp_path, *OPTIONS)
    killed(run, WINDOWS[window])
    report = audit(run.folder)
    assert (report.closes, report.problems) == (True, [])
    assert train(run) == [], "a redone version has another digest"
    report = audit(run.folder)
    assert (report.closes, report.problems, report.duplicates, report.version, report.lineage) == (True, [], 0, 5, 0)
    assert not list(run.checkpoints_folder.glob(".*")), "what the kill left half-written is gone"
    found, expected = (load_file(made.checkpoints_folder / "v000005" / "model" / "model.safetensors") for made in (run, whole))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
