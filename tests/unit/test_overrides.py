"""Overrides of the command line: a mapping is merged into what the file says, another kind takes its place, a list replaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.configs.loader import create_run, load_config, load_resumed, overridden
from rollstream.configs.schema import Config
from rollstream.errors import ConfigError, RunFolderError

FILE = """
name: merged
env: {id: rollstream/KeyValue-v0, kwargs: {keys: abc, num_pairs: 3}}
learner:
  versions: 4
  batch_groups: 2
  group_size: 4
  preset: dapo
  optimizer: {learning_rate: 1.0e-3, betas: [0.8, 0.9]}
  policy: {kind: fsdp, ranks: 2}
  loss: {entropy_coef: 0.01}
evaluation: {every: 5, k: [1, 2], samples: 4, sampling: {temperature: 0.5}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "merged.yaml"
    path.write_text(FILE)
    return path


def test_a_mapping_leaves_the_other_keys_of_the_file_alone(file: Path) -> None:
    learner = load_config(file, ["learner.optimizer={weight_decay: 0.1}"]).learner
    assert (learner.optimizer.learning_rate, learner.optimizer.weight_decay) == (1e-3, 0.1)
    policy = load_config(file, ["learner.policy={lora: {}}"]).learner.policy
    assert (policy.kind, policy.lora is not None) == ("fsdp", True)


def test_a_mapping_is_merged_at_every_depth_and_lists_replace(file: Path) -> None:
    config = load_config(file, ["learner={optimizer: {betas: [0.5, 0.6]}, versions: 9}", "evaluation={sampling: {top_p: 0.9}, k: [4]}"])
    assert (config.learner.optimizer.learning_rate, config.learner.optimizer.betas) == (1e-3, (0.5, 0.6))
    assert (config.learner.versions, config.learner.batch_groups, config.learner.policy.kind) == (9, 2, "fsdp")
    assert config.evaluation is not None
    assert (config.evaluation.every, config.evaluation.k) == (5, (4,))
    assert (config.evaluation.sampling.temperature, config.evaluation.sampling.top_p) == (0.5, 0.9)


def test_arguments_of_an_environment_are_merged_and_begin_anew_after_null(file: Path) -> None:
    def kwargs(*overrides: str) -> object:
        return load_config(file, overrides).envs[0].kwargs

    assert kwargs("env.kwargs={num_pairs: 5}") == {"keys": "abc", "num_pairs": 5}
    assert kwargs("env={kwargs: {num_pairs: 5}}") == {"keys": "abc", "num_pairs": 5}
    assert kwargs("env.kwargs=null", "env.kwargs={num_pairs: 5}") == {"num_pairs": 5}
    several = load_config(file, ["env=[{id: a/B-v0, kwargs: {x: 1}}, {id: a/C-v0}]", "env.0={weight: 2, kwargs: {y: 2}}"])
    assert [(env.id, env.weight, env.kwargs) for env in several.envs] == [("a/B-v0", 2, {"x": 1, "y": 2}), ("a/C-v0", 1, {})]


def test_another_kind_takes_the_place_of_the_section(file: Path) -> None:
    assert load_config(file, ["learner.policy={kind: single}"]).learner.policy.kind == "single"  # ranks belong to fsdp and are gone
    assert load_config("quickstart", ["model={kind: folder, path: /m}"]).model.model_dump() == {"kind": "folder", "path": "/m"}
    with pytest.raises(ConfigError, match=r"learner\.policy\.ranks: is required"):
        load_config(file, ["learner.policy={kind: single}", "learner.policy={kind: fsdp}"])


def test_another_kind_of_loss_keeps_the_keys_all_losses_share(file: Path) -> None:
    loss = load_config(file, ["learner.loss={kind: gspo}"]).learner.loss
    assert loss == load_config(file, ["learner.loss.kind=gspo"]).learner.loss
    assert (loss.kind, loss.entropy_coef) == ("gspo", 0.01)


def test_null_and_a_mapping_over_null_replace(file: Path) -> None:
    assert load_config(file, ["evaluation=null"]).evaluation is None
    config: Config = load_config(file, ["evaluation=null", "evaluation={every: 7}"])
    assert config.evaluation is not None
    assert (config.evaluation.every, config.evaluation.samples) == (7, load_config("quickstart", ["evaluation={every: 7}"]).evaluation.samples)  # type: ignore[union-attr]


def test_a_recorded_configuration_is_overridden_the_same_way(file: Path) -> None:
    config = load_config(file)
    changed = overridden(config, ["learner.loss={kl: k2, kl_coef: 0.1}"])
    assert changed.learner.loss == config.learner.loss.model_copy(update={"kl": "k2", "kl_coef": 0.1})


def test_a_resume_is_asked_about_the_keys_of_a_mapping_and_no_others(file: Path, tmp_path: Path) -> None:
    folder = f"folder={tmp_path / 'runs'}"
    create_run(load_config(file, [folder, "learner.optimizer={learning_rate: 0.01, weight_decay: 0.1}"]), resume=False)
    again = load_resumed(file, [folder, "learner.optimizer={weight_decay: 0.1}"])
    assert (again.learner.optimizer.learning_rate, again.learner.optimizer.weight_decay) == (0.01, 0.1)
    with pytest.raises(RunFolderError, match=r"learner\.optimizer\.weight_decay is 0\.1 in the run's record and 0\.2 now"):
        load_resumed(file, [folder, "learner.optimizer={weight_decay: 0.2}"])
    with pytest.raises(RunFolderError, match=r"learner\.policy\.lora is None in the run's record"):
        load_resumed(file, [folder, "learner={policy: {lora: {}}}"])
