"""Bad configurations get one line with the value, the bound and the remedy; good ones resolve the way the loader promises."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from rollstream.configs.checks import check_config
from rollstream.configs.learner_schema import Learner, Overlong
from rollstream.configs.loader import create_run, dump_config, load_config, load_resumed, load_run
from rollstream.configs.resume import kept_as_recorded
from rollstream.errors import ConfigError, RunFolderError

MINIMAL = "name: a\nenv: {id: rollstream/KeyValue-v0}\nlearner: {versions: 2, batch_groups: 1, group_size: 2}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("learner.los.delta=1", ("learner.los", "unknown key")),
        ("buffer.depth=-1", ("buffer.depth", "-1", "greater than or equal to 0")),
        ("learner.optimizer.learning_rate=fast", ("learner.optimizer.learning_rate", "number", "'fast'")),
        ("learner.optimizer.learning_rate=.inf", ("learner.optimizer.learning_rate", "finite")),
        ("learner.optimizer.betas=[1, 0.9]", ("learner.optimizer.betas.0", "less than 1")),
        ("model.kind=huge", ("model", "'huge'", "'tiny', 'folder'")),
        ("learner.preset=ppo2", ("learner.preset", "ppo2", "async, grpo")),
        ("name=../escape", ("name", "../escape")),
        ("buffer.endpoint=tcp://gateway.example:5555", ("buffer.endpoint", "gateway.example")),
        ("depth", ("a.b=value",)),
        ("seed.deeper=1", ("seed", "not a section")),
    ],
)
def test_a_bad_override_is_named_with_its_value_and_bound(override: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [override])
    assert "\n" not in str(caught.value)
    for name in names:
        assert name in str(caught.value)


def test_several_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"(?s)depth.*max_lag"):
        load_config("quickstart", ["buffer.depth=-1", "buffer.max_lag=-2"])


def test_a_duplicate_key_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml:5: .*seed"):
        load_config(write(tmp_path, MINIMAL + "seed: 2\nseed: 3\n"))


def test_broken_yaml_and_a_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(write(tmp_path, "name: [a"))
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_config(write(tmp_path, "- a\n- b\n"))


def test_a_missing_file_names_the_recipes_there_are() -> None:
    with pytest.raises(ConfigError, match="quickstart"):
        load_config("no-such-recipe")


def test_scientific_notation_is_a_number_and_no_is_a_word(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), ["learner.optimizer.learning_rate=1e-5", "name=no"])
    assert config.learner.optimizer.learning_rate == 1e-5
    assert config.name == "no"


def test_the_preset_lies_under_the_file_and_the_file_under_the_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("group_size: 2", "group_size: 2, preset: grpo, loss: {eps_high: 0.5}"))
    assert load_config(path).learner.loss.kind == "ppo"
    assert load_config(path).learner.loss.dual_clip == 3.0
    assert load_config(path).learner.loss.eps_high == 0.5
    assert load_config(path, ["learner.loss.eps_high=0.6"]).learner.loss.eps_high == 0.6
    assert load_config(path, ["learner.preset=async"]).learner.loss.kind == "dppo_tv"


def test_every_preset_resolves_to_its_own_loss_and_reads_back_as_itself(tmp_path: Path) -> None:
    presets = get_args(Learner.model_fields["preset"].annotation)
    resolved = {preset: load_config("quickstart", [f"learner.preset={preset}"]) for preset in presets}
    assert {preset: config.learner.loss.kind for preset, config in resolved.items()} == {
        "async": "dppo_tv", "grpo": "ppo", "gspo": "gspo", "cispo": "cispo", "dr_grpo": "ppo", "dapo": "ppo", "ppo": "ppo",
        "impala": "pg",
    }  # fmt: skip
    assert len({dump_config(config) for config in resolved.values()}) == len(presets)
    for config in resolved.values():
        check_config(config)
        assert load_config(write(tmp_path, dump_config(config))) == config


def test_lengths_that_a_preset_leaves_open_follow_the_longest_trajectory_and_are_shown() -> None:
    longest = "actors.sampling.max_trajectory_tokens=200"
    dapo = load_config("quickstart", ["learner.preset=dapo", longest])
    assert dapo.learner.advantage.overlong == Overlong(max_len=200, buffer=40, factor=1.0)
    assert "max_len: 200" in dump_config(dapo)
    given = load_config("quickstart", ["learner.preset=dapo", "learner.advantage.overlong.max_len=100"])
    assert given.learner.advantage.overlong == Overlong(max_len=100, buffer=20, factor=1.0)
    assert load_config("quickstart", ["learner.preset=dr_grpo", longest]).learner.loss.agg_length == 200
    assert load_config("quickstart", ["learner.preset=dr_grpo", "learner.loss.agg_length=64"]).learner.loss.agg_length == 64
    with pytest.raises(ConfigError, match=r"learner\.advantage\.overlong\.max_len"):
        load_config("quickstart", ["learner.preset=dapo", "learner.advantage.overlong.max_len=long"])


def test_a_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_config("quickstart")
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_a_run_folder_is_created_once_and_found_again(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), [f"folder={tmp_path / 'runs'}"])
    run = create_run(config, resume=False)
    assert load_run(run.folder) == run
    assert load_config(run.config_path) == config, "a run's own config.yaml is a configuration"
    with pytest.raises(RunFolderError, match="--resume"):
        create_run(config, resume=False)
    assert create_run(config, resume=True).run_id == run.run_id
    with pytest.raises(RunFolderError, match=r"no config\.yaml; .* holds a"):
        load_run(run.folder.parent / "elsewhere")


def test_a_resume_needs_no_repeated_overrides_and_takes_what_may_change(tmp_path: Path) -> None:
    path, folder = write(tmp_path, MINIMAL), f"folder={tmp_path / 'runs'}"
    first = load_config(path, [folder, "learner.optimizer.learning_rate=2e-6", "seed=3", "learner.versions=5"])
    create_run(first, resume=False)
    again = load_resumed(path, [folder, "learner.versions=9", "actors.num=2"])
    assert (again.seed, again.learner.optimizer.learning_rate) == (3, 2e-6), "recorded"
    assert (again.learner.versions, again.actors.num) == (9, 2), "given now"
    told = kept_as_recorded(load_config(path, [folder, "learner.versions=9"]), again)
    assert told == "goes on as recorded: seed 3 (given: 0), learner.optimizer.learning_rate 2e-06 (given: 1e-06)"
    assert kept_as_recorded(again, again) == ""


@pytest.mark.parametrize("override", ["seed=4", "learner.loss={kind: pg}", "learner.optimizer.learning_rate=1e-3", "buffer.max_lag=1"])
def test_a_resume_refuses_an_override_that_contradicts_the_record(tmp_path: Path, override: str) -> None:
    path, folder = write(tmp_path, MINIMAL), f"folder={tmp_path / 'runs'}"
    create_run(load_config(path, [folder, "seed=3"]), resume=False)
    with pytest.raises(RunFolderError) as caught:
        load_resumed(path, [folder, override])
    assert override.partition("=")[0] in str(caught.value)
    assert "as recorded" in str(caught.value)


def test_an_integer_of_thousands_of_digits_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds a value that cannot be read: Exceeds the limit"):
        load_config(write(tmp_path, f"{MINIMAL}\nseed: 1{'0' * 5000}\n"))


def test_a_run_that_was_moved_is_not_taken_for_the_one_its_record_names(tmp_path: Path) -> None:
    run = create_run(load_config(write(tmp_path, MINIMAL), [f"folder={tmp_path / 'runs'}"]), resume=False)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "ledger.sqlite").touch()
    (moved / "config.yaml").write_text(run.config_path.read_text())
    with pytest.raises(RunFolderError, match=rf"record of the run in {moved}, but its folder and name say {run.folder}; add folder={tmp_path} name=moved"):
        load_resumed(moved / "config.yaml", [])
    assert load_resumed(moved / "config.yaml", [f"folder={tmp_path}", "name=moved"]).name == "moved"


def test_a_file_that_is_no_text_a_folder_and_an_empty_file_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe name: a")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(binary)
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="is empty"):
        load_config(write(tmp_path, ""))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("x" * 5000)
