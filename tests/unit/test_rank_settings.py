"""Settings of a learner of several ranks: what is refused, what a resume may change, which processes it means."""

from __future__ import annotations

import pytest

from rollstream.configs.checks import check_config
from rollstream.configs.loader import load_config
from rollstream.configs.resume import resumed_config
from rollstream.configs.schema import Config
from rollstream.errors import ConfigError, RunFolderError
from rollstream.processes import roles_of

TWO = ("learner.policy.kind=fsdp", "learner.policy.ranks=2")


def config(*overrides: str) -> Config:
    return load_config("quickstart", overrides)


def test_settings_without_a_kind_are_of_the_single_policy() -> None:
    assert config("learner.policy.compute_dtype=bfloat16").learner.policy.kind == "single"
    with pytest.raises(ConfigError, match=r"learner\.policy\.ranks"):
        config("learner.policy.ranks=2")


def test_more_ranks_than_trajectories_and_one_gpu_for_several_ranks_are_refused_with_the_numbers() -> None:
    small = ("learner.batch_groups=2", "learner.group_size=2", "learner.policy.kind=fsdp")
    check_config(config(*small, "learner.policy.ranks=4"))
    with pytest.raises(ConfigError, match=r"learner\.policy\.ranks 5 is larger than the 4 trajectories of a batch .* lower it to 4 or less"):
        check_config(config(*small, "learner.policy.ranks=5"))
    with pytest.raises(ConfigError, match=r"learner\.device cuda:0 with learner\.policy\.ranks 2: ranks need a GPU each; say cuda"):
        check_config(config(*TWO, "learner.device=cuda:0"))


def test_a_resume_may_change_how_the_policy_is_spread_and_not_what_it_computes() -> None:
    recorded = config(*TWO, "learner.policy.reduce=micro_batch")
    four = ("learner.policy.kind=fsdp", "learner.policy.ranks=4")
    assert resumed_config(config(*four), recorded, four).learner.policy.ranks == 4  # type: ignore[union-attr]
    assert resumed_config(config(), recorded, ()).learner.policy == recorded.learner.policy, "not repeated: as recorded"
    rounded = (*TWO, "learner.policy.compute_dtype=bfloat16")
    with pytest.raises(RunFolderError, match=r"learner\.policy\.compute_dtype is 'float32' in the run's record"):
        resumed_config(config(*rounded), recorded, rounded)


def test_each_rank_is_a_process_and_rank_0_has_the_learners_name() -> None:
    found = [(role.name, role.rank) for role in roles_of(config(*TWO)) if role.kind == "learner"]
    assert found == [("learner", 0), ("learner-1", 1)]
    assert [role.name for role in roles_of(config()) if role.kind == "learner"] == ["learner"]


def test_a_fork_may_change_the_kind_of_the_policy_and_keeps_its_adapters() -> None:
    adapted = config("learner.policy.lora={rank: 4}")
    for recorded, wanted in ((adapted, TWO), (config(*TWO, "learner.policy.lora={rank: 4}"), ("learner.policy.kind=single",))):
        found = resumed_config(config(*wanted), recorded, wanted, fork=True).learner.policy
        assert (found.kind, found.lora) == ("fsdp" if wanted == TWO else "single", recorded.learner.policy.lora)
        with pytest.raises(RunFolderError, match=r"learner\.policy\.kind is .* add --fork to go on under the new value"):
            resumed_config(config(*wanted, "learner.policy.lora={rank: 4}"), recorded, wanted)
    for recorded, wanted in ((adapted, "learner.policy.lora=null"), (config(), "learner.policy.lora={rank: 4}")):
        with pytest.raises(RunFolderError, match=r"learner\.policy\.lora is .* in the run's record and .* now: .*leave it out to go on as recorded, or"):
            resumed_config(config(wanted), recorded, (wanted,), fork=True)
