"""A refused value is told with what the key takes, an unknown key with the one that was meant; absurd numbers never get as far as a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollstream.configs.claim import locked, run_folder, try_folder
from rollstream.configs.explain import parts
from rollstream.configs.loader import create_run, load_config
from rollstream.errors import ConfigError, RunFolderError


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_key_that_counts_has_a_bound_on_both_sides() -> None:
    counts = [key for part in parts() for key in part.keys if key.type.startswith("integer")]
    assert len(counts) > 30
    assert [key.path for key in counts if not ({"≤", "<"} & set(key.bound) and {"≥", ">"} & set(key.bound))] == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("learner.versions=true", "learner.versions"),
        ("actors.slots=false", "actors.slots"),
        ("seed=true", "seed"),
        ("learner.checkpoint.keep_every=true", "learner.checkpoint.keep_every"),
        ("learner.optimizer.learning_rate=true", "learner.optimizer.learning_rate"),
        ("learner.optimizer.betas=[true, 0.9]", "learner.optimizer.betas.0"),
        ("model={kind: tiny, num_layers: true}", "model.num_layers"),
        ("actors.sampler={kind: torch, max_batch: true}", "actors.sampler.max_batch"),
        ("learner.loss.correction=[{level: token, mode: truncate, high: true}]", "learner.loss.correction.0.high"),
        ("name=true", "name"),
    ],
)
def test_true_and_false_are_no_numbers_and_no_text(override: str, key: str) -> None:
    line = refusal(override)
    assert f"{key}: true and false mean nothing here" in line
    assert "; it is" in line or "; give" in line


def test_true_stays_a_truth_value_and_an_argument_of_an_environment() -> None:
    config = load_config("quickstart", ["learner.loss.kl_is=true", "env.kwargs={loud: true}"])
    assert config.learner.loss.kl_is is True
    assert config.env.kwargs == {"loud": True}


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("actors.slots=1e9", ("actors.slots", "1000000000", "give an integer ≥ 1, ≤ 65536, such as its default 96")),
        ("learner.versions=99999999999999999999", ("learner.versions", "99999999999999999999", "≤ 1000000000")),
        ("learner.group_size=40000", ("learner.group_size", "40000", "≤ 32767")),
        ("learner.device=meta", ("learner.device", "'meta'", "cpu, cuda, cuda:N")),
        ("actors.device=cpu:3", ("actors.device", "'cpu:3'", "cpu, cuda, cuda:N")),
        ("learner.num_threads=100000", ("learner.num_threads", "≤ 1024")),
        ("learner.optimizer.learning_rate=3", ("learner.optimizer.learning_rate", "give a number > 0, ≤ 1, such as its default 1e-06")),
        ("learner.checkpoint.keep_every=0", ("keep_every", "got 0", "give an integer ≥ 1, ≤ 1000000000, or null")),
        ("actors.episode_timeout_s=1e12", ("actors.episode_timeout_s", "≤ 2592000")),
        ("actors.episode_timeout_s=1e-9", ("actors.episode_timeout_s", "≥ 0.001")),
        ("buffer.lease_timeout_s=1", ("buffer.lease_timeout_s", "give a number ≥ 1.5, ≤ 2592000")),
        ("name=a/b", ("name", "'a/b'", "name of the run and of its folder")),
        ("learner.loss.kl=k9", ("learner.loss.kl", "'k1', 'k2', 'k3' or 'abs'", "'k9'")),
    ],
)
def test_a_value_out_of_bounds_is_told_with_what_the_key_takes(override: str, names: tuple[str, ...]) -> None:
    line = refusal(override)
    assert [name for name in names if name not in line] == []


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("learner.los.delta=1", "did you mean learner.loss?"),
        ("buffer.deph=2", "did you mean buffer.depth?"),
        ("learner.learning_rate=1", "learner.optimizer.learning_rate"),
        ("optimizer.learning_rate=1", "did you mean learner.optimizer?"),
        ("actors.max_tokens=3", "did you mean actors.sampling.max_turn_tokens?"),
        ("buffer.group_size=3", "did you mean learner.group_size?"),
        ("learner.loss.correction=[{level: token, mode: mask, hihg: 2}]", "did you mean learner.loss.correction.0.high?"),
        ("model={kind: folder, path: x, num_layers: 3}", "it belongs to model.kind tiny"),
        ("zzz=1", "check the spelling"),
    ],
)
def test_an_unknown_key_is_told_with_the_one_that_was_meant(override: str, meant: str) -> None:
    line = refusal(override)
    assert "unknown key" in line
    assert meant in line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("learner.policy.lora=true", "learner.policy.lora: true is no section; give a section such as {rank: 16}, or null"),
        ("learner.policy={kind: fsdp, ranks: 2, lora: 8}", "learner.policy.lora: 8 is no section; give a section such as {rank: 16}, or null"),
        ("launcher={kind: ray, actor: 2}", "launcher.actor: 2 is no section; give a section such as {cpus: 1}"),
        ("env=hello", "env: 'hello' is no section; give a section with id"),
        ("tracking=3", "tracking: 3 is no section; give a section, a mapping of keys"),
    ],
)
def test_a_value_in_the_place_of_a_section_is_told_with_what_a_section_looks_like(override: str, line: str) -> None:
    assert refusal(override).endswith(line)


@pytest.mark.parametrize("override", ["learner.policy={kind: fsdp, ranks: x}", "learner.policy={kind: fsdp, ranks: 2, lora: {rank: x}}"])
def test_no_kind_of_a_section_stands_in_the_name_of_a_key(override: str) -> None:
    assert "learner.policy.fsdp" not in refusal(override)
    assert "give an integer" in refusal(override)


def test_a_missing_key_is_told_with_its_meaning(tmp_path: Path) -> None:
    path = tmp_path / "few.yaml"
    path.write_text("name: few\nenv: {id: x/Y-v0}\nlearner: {versions: 3, group_size: 2}\n")
    with pytest.raises(ConfigError, match=r"learner\.batch_groups: is required: groups per batch$"):
        load_config(path)


def test_a_huge_value_is_cut_in_the_message() -> None:
    assert len(refusal(f"learner.versions={'x' * 10_000}")) < 400


# --- the run folder -------------------------------------------------------------------------------------------------------------------


def test_trying_a_run_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    config = load_config("quickstart", [f"folder={tmp_path / 'runs'}"])
    assert try_folder(config, resume=False) == tmp_path / "runs" / "quickstart"
    assert list(tmp_path.iterdir()) == []
    run = create_run(config, resume=False)
    before = sorted(run.folder.rglob("*"))
    with pytest.raises(RunFolderError, match="already holds a run"):
        try_folder(config, resume=False)
    assert try_folder(config, resume=True) == run.folder
    assert sorted(run.folder.rglob("*")) == before


def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"/proc takes no file .*choose another folder"):
        try_folder(load_config("quickstart", ["folder=/proc"]), resume=False)
    with pytest.raises(RunFolderError, match="file name too long; choose another folder"):
        run_folder(load_config("quickstart", [f"folder={tmp_path / ('x' * 300)}"]), resume=False)


def test_a_live_run_is_named_by_its_process(tmp_path: Path) -> None:
    config = load_config("quickstart", [f"folder={tmp_path}"])
    run = create_run(config, resume=False)
    with locked(run.folder):
        for resume in (False, True):
            with pytest.raises(RunFolderError, match=f"in use by a live rollstream train \\(process {os.getpid()}\\)"):
                try_folder(config, resume=resume)


@pytest.mark.parametrize("value", ["[" * 1000, "{a: " * 600])
def test_what_is_nested_without_end_is_refused_in_one_line(value: str, tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text(f"name: {value}")
    with pytest.raises(ConfigError, match=r"deep.yaml: .*too deep in one another") as caught:
        load_config(tmp_path / "deep.yaml")
    assert "\n" not in str(caught.value)
    assert "too deep" in refusal(f"env.kwargs={value}")


@pytest.mark.parametrize(("source", "said"), [("", "CONFIG is empty"), ("x" * 5000, "cannot be read: file name too long")])
def test_a_name_that_is_none_is_refused_without_repeating_it(source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(source)
    assert len(str(caught.value)) < 250
