"""What ``rollstream evaluate`` scores and says, before any process is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollstream import evaluation_lines
from rollstream.buffer.evaluation_tables import EvaluatedMember
from rollstream.buffer.scores import scores
from rollstream.buffer.wire import Evaluation
from rollstream.configs.checks import check_config
from rollstream.configs.loader import create_run, load_config, load_run
from rollstream.configs.run_folder import Run
from rollstream.errors import ConfigError
from rollstream.evaluate_command import checkpoint_of, scoring_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = create_run(load_config("quickstart", [f"folder={tmp_path}", "name=done"]), resume=False)
    for version in (0, 20, 40):
        (made.checkpoints_folder / f"v{version:06d}" / "model").mkdir(parents=True)
    (made.checkpoints_folder / ".v000060.tmp").mkdir()
    return load_run(made.folder)


def test_a_run_without_a_checkpoint_says_when_there_will_be_one(tmp_path: Path) -> None:
    fresh = create_run(load_config("quickstart", [f"folder={tmp_path}", "name=fresh"]), resume=False)
    with pytest.raises(ConfigError, match=r"has no checkpoint yet; .*before version 1.*wait for it, or go on with train --resume"):
        checkpoint_of(fresh, "last")


def test_a_version_is_a_kept_checkpoint_and_another_one_is_refused_with_those_there_are(run: Run) -> None:
    assert checkpoint_of(run, "last").name == "v000040"
    assert checkpoint_of(run, "20").name == "v000020"
    for wrong in ("30", "-1", "newest"):
        with pytest.raises(ConfigError, match=rf"--version {wrong}: kept are the checkpoints of versions 0, 20, 40; give one of them"):
            checkpoint_of(run, wrong)


def test_the_scoring_run_is_the_trained_one_with_another_name_and_model(run: Run) -> None:
    config = scoring_config(run, checkpoint_of(run, "20"), ["evaluation.samples=8", "evaluation.k=[1, 8]"])
    check_config(config)
    assert (config.name, Path(config.folder)) == ("v000020-1", run.folder / "evaluations")
    assert config.model.kind == "folder"
    assert config.evaluation is not None
    assert (config.evaluation.samples, config.evaluation.k, config.evaluation.tasks) == (8, (1, 8), 64)
    assert (config.seed, config.env, config.actors) == (run.config.seed, run.config.env, run.config.actors)
    (run.folder / "evaluations" / "v000020-1").mkdir(parents=True)
    assert scoring_config(run, checkpoint_of(run, "20"), []).name == "v000020-2"
    with pytest.raises(ConfigError, match=r"learner.versions=3: only evaluation.\* can be changed here"):
        scoring_config(run, checkpoint_of(run, "20"), ["learner.versions=3"])


def test_evaluations_are_told_in_a_line_and_in_a_table() -> None:
    values = {
        "eval/reward_mean": 1.0125,
        "eval/reward_stderr": 0.03,
        "eval/success": 0.75,
        "eval/pass_at_1": 0.75,
        "eval/pass_at_4": 0.9,
        "eval/trajectories": 32.0,
    }
    told = evaluation_lines.line_of([Evaluation(0, 40, "open", num_members=32, num_done=7), Evaluation(0, 20, "done", values=values)])
    assert told == "v40: 7 of 32 played   v20: reward 1.012 ± 0.030, success 0.750, pass@4 0.900"
    assert evaluation_lines.line_of([Evaluation(0, 60, "skipped", "no room")]) == "v60 skipped: no room"
    header, row, empty = evaluation_lines.table([{"version": 20, **values}, {"version": 40}])
    assert header == ["version", "reward", "± stderr", "success", "pass@1", "pass@4", "tokens", "trajectories", "failed"]
    assert row == ["20", "1.012", "0.030", "0.750", "0.750", "0.900", "–", "32", "–"]
    assert set(empty[1:]) == {"–"}


def test_the_page_names_every_number_of_an_evaluation_and_no_other() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(eval/\w+)` \|", page, re.MULTILINE))
    members = [EvaluatedMember(group, place, 0, 1, 0.5, "terminated", "terminated", 4, 2, 3, 3, 1.0) for group in range(2) for place in range(2)]
    found = {re.sub(r"pass_at_\d+", "pass_at_K", name) for name in scores(members, [1, 2], None)}
    assert named == found | {"eval/lag", "eval/seconds"}, "the last two are of the run, not of the trajectories"


def test_the_configuration_of_the_page_is_accepted(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- test: evaluation.yaml -->\n```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "evaluation.yaml").write_text(block, encoding="utf-8")
    config = load_config(tmp_path / "evaluation.yaml")
    check_config(config)
    assert config.evaluation is not None
    assert [version for version in range(201) if config.evaluation.is_due(version, 200)] == list(range(0, 201, 20))
    (override,) = re.findall(r"`rollstream train quickstart '(evaluation=.*?)'`", page)
    assert load_config("quickstart", [override]).evaluation is not None
