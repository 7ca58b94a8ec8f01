"""Bad configurations get one line with the value, the bound and the remedy; good ones resolve the way the loader promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.configs.loader import create_run, dump_config, load_config, load_run
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
        ("model.kind=huge", ("model", "'huge'", "'tiny', 'folder'")),
        ("learner.preset=ppo2", ("learner.preset", "ppo2", "async, grpo")),
        ("name=../escape", ("name", "../escape")),
        ("buffer.endpoint=tcp://0.0.0.0:5555", ("buffer.endpoint", "0.0.0.0")),
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


def test_a_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_config("quickstart")
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_a_run_folder_is_created_once_and_reopened_only_as_the_same_run(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), [f"folder={tmp_path / 'runs'}"])
    run = create_run(config, resume=False)
    assert load_run(run.folder) == run
    with pytest.raises(RunFolderError, match="--resume"):
        create_run(config, resume=False)
    assert create_run(config, resume=True).run_id == run.run_id
    longer = load_config(tmp_path / "config.yaml", [f"folder={tmp_path / 'runs'}", "learner.versions=9"])
    assert create_run(longer, resume=True).config.learner.versions == 9
    other = load_config(tmp_path / "config.yaml", [f"folder={tmp_path / 'runs'}", "seed=7"])
    with pytest.raises(RunFolderError, match="seed"):
        create_run(other, resume=True)
    with pytest.raises(RunFolderError, match=r"no config\.yaml"):
        load_run(tmp_path / "elsewhere")
