"""A run that forks: real learner, real stream and checkpoints; only the processes are missing."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import recorded_run
from rollstream import cli
from rollstream.buffer.audit import audit
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.log import segment_path
from rollstream.configs.loader import create_run, load_config, load_resumed, load_run
from rollstream.configs.run_folder import Run
from rollstream.errors import ConfigError, Corrupt, RunFolderError
from rollstream.forks import check_length, make_way, plan_fork
from rollstream.learner.loop import learn_from
from rollstream.summary import audit_lines
from rollstream.tail import MetricsTail, last_version


def train(run: Run) -> list[str]:
    """Trains to the last version; what the buffer said of the digests."""
    stream = recorded_run.Stream(run)
    try:
        learn_from(run, stream, threading.Event())
    finally:
        stream.close()
    return [note for note in stream.notes if note]


def fork(folder: Path, *overrides: str, version: int | None = None) -> Run:
    """What ``rollstream train quickstart --resume --fork`` does before it starts the roles."""
    config = load_resumed("quickstart", [f"name={folder.name}", f"folder={folder.parent}", *recorded_run.SETTINGS, *OPTIONS, *overrides], fork=True)
    run = create_run(config, resume=True, fork=plan_fork(folder, config, version))
    make_way(run)
    return run


OPTIONS = ("learner.versions=6", "learner.checkpoint={every: 2, keep_last: 9}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six versions, checkpoints 0, 2, 4 and 6."""
    run = recorded_run.make_run(tmp_path_factory.mktemp("runs"), *OPTIONS)
    train(run)
    return Path(run.folder)


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "quickstart")
    return tmp_path / "quickstart"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def replay(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main(["replay", str(folder), *arguments])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out + err


def test_a_fork_goes_on_from_an_older_version_under_another_loss_and_keeps_what_it_leaves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = rows(folder / "metrics.jsonl")
    run = fork(folder, "learner.loss.kind=gspo", "learner.optimizer.betas=[0.8, 0.9]", version=2)
    assert train(run) == [], "no digest differs: the versions of each lineage are its own"
    assert [(row["lineage"], row["version"]) for row in rows(run.metrics_path)] == [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (1, 6)]
    assert rows(run.abandoned_metrics_path) == before[2:]
    assert [row["version"] for row in MetricsTail(run.metrics_path).read()] == [1, 2, 3, 4, 5, 6]
    assert last_version(run.metrics_path) == 6
    names = {str(path.relative_to(run.checkpoints_folder)) for path in run.checkpoints_folder.glob("**/v*")}
    assert names == {"v000000", "v000002", "v000004", "v000006", "abandoned/lineage-000/v000004", "abandoned/lineage-000/v000006"}
    assert load_run(folder).config.learner.loss.kind == "gspo"
    report = audit(folder)
    assert (report.closes, report.problems, report.duplicates, report.lineage, report.abandoned) == (True, [], 0, 1, {0: 4})
    assert report.max_lag_trained <= report.lag_bound
    said = "\n".join(audit_lines(report))
    assert "lineage 1 began after version 2 of lineage 0: changed learner.loss.kind, learner.optimizer.betas" in said
    assert "4 batches of lineage 0" in said
    for arguments in (("--version", "2"), ("--version", "4"), ("--version", "5", "--lineage", "0"), ("--version", "3", "--lineage", "1")):
        code, told = replay(capsys, folder, *arguments)
        assert (code, "figures agree, the digest of the weights among them" in told) == (0, True), told
    assert "lineage 7 was never begun: the newest is 1" in replay(capsys, folder, "--version", "3", "--lineage", "7")[1]


def test_tensorboard_shows_the_history_that_survives(folder: Path) -> None:
    run = fork(folder, "learner.loss.kind=gspo", version=2)
    train(run)
    events = EventAccumulator(str(run.tensorboard_folder))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss/total")]
    assert shown == [(row["version"], pytest.approx(row["loss/total"], rel=1e-6)) for row in rows(run.metrics_path)]


def test_a_fork_of_a_fork_and_two_at_one_version_end_with_one_history_whose_books_close(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lineage, (version, rate) in enumerate(((4, 0.002), (4, 0.001), (2, 0.004)), 1):
        run = fork(folder, f"learner.optimizer.learning_rate={rate}", version=version)
        train(run)
        assert [row["lineage"] for row in rows(run.metrics_path)][version:] == [lineage] * (6 - version)
    report = audit(folder)
    assert (report.closes, report.problems, report.duplicates, report.abandoned) == (True, [], 0, {0: 4, 1: 2, 2: 2})
    assert [row["version"] for row in rows(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    for lineage in range(4):
        code, told = replay(capsys, folder, "--version", "6", "--lineage", str(lineage))
        assert code == 0, told


def test_a_fork_killed_between_the_wish_and_the_deed_happens_with_the_next_resume_and_once(folder: Path) -> None:
    config = load_resumed("quickstart", [f"folder={folder.parent}", *recorded_run.SETTINGS, *OPTIONS, "learner.loss.kind=gspo"], fork=True)
    asked = plan_fork(folder, config, 2)
    create_run(config, resume=True, fork=asked)  # killed here
    again = create_run(load_run(folder).config, resume=True)
    assert again.fork == asked
    make_way(again)
    (again.checkpoints_folder / "abandoned" / "lineage-000" / "v000004").rename(again.checkpoints_folder / "v000004")  # killed half way
    for _ in range(2):
        make_way(create_run(load_run(folder).config, resume=True))
    assert sorted(path.name for path in again.checkpoints_folder.glob("v*")) == ["v000000", "v000002"]
    train(again)
    make_way(again)
    train(create_run(load_run(folder).config, resume=True))
    report = audit(folder)
    assert (report.lineage, report.closes, report.problems) == (1, True, [])
    assert len(rows(again.abandoned_metrics_path)) == 4


def test_a_fork_without_a_change_takes_the_newest_checkpoint_and_trains_its_groups_anew(folder: Path) -> None:
    for path in ("v000006", "v000004"):
        shutil.rmtree(folder / "checkpoints" / path)
    run = fork(folder)
    assert run.fork is not None
    assert (run.fork.version, run.fork.reason) == (2, "asked for")
    train(run)
    report = audit(folder)
    assert (report.closes, report.problems, report.lineage) == (True, [], 1)
    assert report.counts["trained"] == 12


def test_a_fork_goes_on_where_recorded_rows_are_damaged_and_plays_only_those_again(folder: Path) -> None:
    ledger = Ledger(folder / "ledger.sqlite", None, read_only=True)
    batch = ledger.batch(0, 6)
    assert batch is not None
    location = ledger.append(ledger.members(batch.groups[0])[0].append_id)[0]
    ledger.close()
    segment = segment_path(folder / "stream", location.segment)
    data = bytearray(segment.read_bytes())
    data[location.offset + location.size_bytes // 2] ^= 1
    segment.write_bytes(data)
    shutil.rmtree(folder / "checkpoints" / "v000006")
    with pytest.raises(Corrupt):
        train(load_run(folder))
    train(fork(folder))
    report = audit(folder)
    assert (report.closes, report.version, report.lineage, report.duplicates) == (True, 6, 1, 0)
    (problem,) = report.problems
    assert f"{segment.name} at {location.offset}" in problem, "the damage itself stays visible, and nothing else is wrong"


def test_what_a_fork_cannot_do_is_refused_and_nothing_is_changed(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.startswith("ledger.sqlite-")}
    with pytest.raises(ConfigError, match="--from-version 3: no checkpoint of it is kept; there are 0, 2, 4, 6"):
        fork(folder, version=3)
    with pytest.raises(ConfigError, match=r"learner.versions 4: a fork after version 4 would have nothing to train; .*kept are 0, 2, 4, 6"):
        fork(folder, "learner.versions=4", version=4)
    with pytest.raises(RunFolderError, match=r"seed is .* in the run's record and 77 now: .* leave it out"):
        fork(folder, "seed=77")
    with pytest.raises(RunFolderError, match=r"learner.loss.kind .* add --fork to go on under the new value as another lineage"):
        load_resumed("quickstart", [f"folder={folder.parent}", *recorded_run.SETTINGS, *OPTIONS, "learner.loss.kind=gspo"])
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.startswith("ledger.sqlite-")}


def test_a_resume_shorter_than_what_is_trained_is_refused_unless_a_fork_is_on_its_way(folder: Path) -> None:
    check_length(folder, load_config("quickstart", ["learner.versions=6"]))
    shorter = load_config("quickstart", ["learner.versions=5"])
    with pytest.raises(ConfigError, match=r"learner.versions 5: version 6 is recorded already; give at least that"):
        check_length(folder, shorter)
    fork(folder, "learner.versions=5", version=2)
    check_length(folder, shorter)


@pytest.mark.parametrize("arguments", [("--fork",), ("--resume", "--from-version", "2")])
def test_options_that_need_one_another_say_so(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "quickstart", *arguments])
    assert caught.value.code == 2
    assert "--fork needs --resume and --from-version needs --fork" in capsys.readouterr().err
