"""``rollstream replay``: a step computed again from log, ledger and checkpoint, of a run whose learner and stream are real."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

import recorded_run
from rollstream import cli
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.sealed import seal, sealed_path
from rollstream.configs.run_folder import Run
from rollstream.learner.loop import learn_from


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six versions with two updates each; checkpoints 0, 3 and 6; the first of several segments is sealed."""
    made: Run = recorded_run.make_run(
        tmp_path_factory.mktemp("runs"), "learner.versions=6", "learner.checkpoint={every: 3, keep_last: 9}", "learner.updates.mini_batches=2"
    )
    stream = recorded_run.Stream(made, segment_bytes=4000)
    learn_from(made, stream, threading.Event())
    sealed = seal(stream.log.path(1), sealed_path(made.stream_folder, 1), stream.ledger.next_segment(0), threading.Event())
    assert sealed is not None
    stream.ledger.put_segment(sealed)
    stream.close()
    (made.stream_folder / "000001.arrows").unlink()
    return made


@pytest.fixture
def copy(run: Run, tmp_path: Path) -> Run:
    """The run, to be damaged."""
    shutil.copytree(run.folder, tmp_path / "copy")
    return Run(tmp_path / "copy", run.config, run.run_id)


def replayed(capsys: pytest.CaptureFixture[str], run: Run, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main(["replay", str(run.folder), *arguments])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


@pytest.mark.parametrize(("version", "start"), [(1, "v000000"), (3, "v000000 and 2 redone batches"), (5, "v000003 and 1 redone batch")])
def test_every_figure_of_a_step_is_found_again_to_the_last_digit(capsys: pytest.CaptureFixture[str], run: Run, version: int, start: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    code, out, err = replayed(capsys, run, "--version", str(version))
    assert (code, err) == (0, ""), out
    assert f"version {version} of lineage 0, from checkpoint {start}" in out
    assert "figures agree, the digest of the weights among them (compared to the last digit recorded)" in out
    assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if not path.name.startswith("ledger.sqlite-")} == {
        path: time for path, time in before.items() if not path.name.startswith("ledger.sqlite-")
    }, "replay writes nothing"


def test_the_figures_are_those_that_follow_from_batch_and_weights(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    code, out, _ = replayed(capsys, run, "--version", "4", "--json")
    found = json.loads(out)
    assert (code, found["version"], found["checkpoint"], found["agree"], found["differing"], found["tolerance"]) == (0, 4, 3, True, [], 0.0)
    assert {"loss/total", "train/reward_mean", "optim/grad_norm", "learner/padding_share", "weights/digest"} <= found["figures"].keys()
    assert not [name for name in found["figures"] if name.startswith(("time/", "buffer/", "actors/"))]
    assert all(figure["recorded"] == figure["replayed"] for figure in found["figures"].values())


def test_a_figure_that_differs_is_named_with_both_values(capsys: pytest.CaptureFixture[str], copy: Run) -> None:
    rows = [json.loads(line) for line in copy.metrics_path.read_text().splitlines()]
    rows[3]["loss/total"] = 0.125
    copy.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = replayed(capsys, copy, "--version", "4")
    assert (code, err) == (1, "")
    (line,) = [line for line in out.splitlines() if line.startswith("loss/total")]
    assert "0.125" in line.split()
    assert out.splitlines()[-1].startswith("1 of ")
    assert json.loads(replayed(capsys, copy, "--version", "4", "--json")[1])["differing"] == ["loss/total"]


def test_other_weights_than_the_recorded_ones_show_in_the_digest(capsys: pytest.CaptureFixture[str], copy: Run) -> None:
    ledger = Ledger(copy.ledger_path, copy.run_id)
    ledger.write("UPDATE versions SET digest = 'aa' WHERE version = 4")
    ledger.close()
    code, out, _ = replayed(capsys, copy, "--version", "4")
    assert code == 1
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("weights/")] == [["weights/digest", "aa"]]


def test_what_if_scores_the_same_batch_under_another_loss_and_keeps_nothing(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    asked = ("--what-if", "learner.loss.kind=gspo", "--what-if", "learner.loss.agg=seq_mean_token_mean", "--what-if", "learner.loss.eps_high=0.0004")
    code, out, err = replayed(capsys, run, "--version", "5", *asked)
    assert (code, err) == (0, "")
    assert "what if learner.loss.kind=gspo, learner.loss.agg=seq_mean_token_mean" in out
    assert "loss/total" in out
    assert "train/reward_mean" not in out, "only what differs is listed"
    assert out.splitlines()[-1].endswith(" other figures are the same")
    found = json.loads(replayed(capsys, run, "--version", "5", *asked, "--json")[1])
    figures = found["figures"]
    assert figures["loss/total"]["recorded"] != figures["loss/total"]["what_if"]
    assert figures["train/reward_mean"]["recorded"] == figures["train/reward_mean"]["what_if"], "it is the same batch"
    assert "weights/digest" not in figures
    assert replayed(capsys, run, "--version", "6")[0] == 0, "nothing was changed"


def test_what_if_nothing_changes_gives_the_recorded_figures(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    found = json.loads(replayed(capsys, run, "--version", "5", "--what-if", f"learner.loss.kind={run.config.learner.loss.kind}", "--json")[1])
    assert all(figure["recorded"] == figure["what_if"] for figure in found["figures"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--version", "7"), "version 7 of lineage 0 has no recorded batch: there are 6, counted from 1"),
        (("--version", "5", "--what-if", "learner.optimizer.learning_rate=1"), "not about how a batch is scored; keys of learner.loss and learner.advantage"),
        (("--version", "5", "--what-if", "learner.loss.kind=nothing"), "nothing"),
        (("--version", "5", "--what-if", "learner.loss.eps_low=-1"), "greater than or equal to 0"),
        (("--version", "5", "--what-if", "learner.loss"), "not of the form a.b=value"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = replayed(capsys, run, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_version_without_a_checkpoint_before_it_is_refused(capsys: pytest.CaptureFixture[str], copy: Run) -> None:
    shutil.rmtree(copy.checkpoints_folder / "v000000")
    code, _, err = replayed(capsys, copy, "--version", "3")
    assert code == 2
    assert "version 3 has no checkpoint before it (kept are v000003, v000006)" in err
    assert replayed(capsys, copy, "--version", "4")[0] == 0


def test_rows_that_retention_removed_are_named(capsys: pytest.CaptureFixture[str], copy: Run) -> None:
    ledger = Ledger(copy.ledger_path, copy.run_id)
    ledger.remove_segment(1)
    ledger.close()
    sealed_path(copy.stream_folder, 1).unlink()
    code, _, err = replayed(capsys, copy, "--version", "1")
    assert code == 2
    assert "the rows of version 1's batch were removed by retention (buffer.keep_gb)" in err


def test_a_damaged_checkpoint_is_named(capsys: pytest.CaptureFixture[str], copy: Run) -> None:
    (copy.checkpoints_folder / "v000003" / "training.pt").write_bytes(b"")
    code, _, err = replayed(capsys, copy, "--version", "5")
    assert code == 1
    assert "v000003 is damaged (training.pt has 0 bytes" in err


def test_a_version_that_was_recorded_and_never_trained_has_nothing_to_compare(capsys: pytest.CaptureFixture[str], copy: Run) -> None:
    lines = copy.metrics_path.read_text().splitlines(keepends=True)
    copy.metrics_path.write_text("".join(lines[:5]))
    code, _, err = replayed(capsys, copy, "--version", "6")
    assert code == 2
    assert "version 6 has no row in metrics.jsonl" in err
