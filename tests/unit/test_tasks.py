"""Several environments and finite sets of tasks: shares kept exactly, every task before any comes again, all of it again after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.buffer.audit import audit
from rollstream.buffer.books import Books
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.tasks import Mixture, epoch_order, task_at
from rollstream.buffer.window import Rules
from rollstream.configs.checks import check_config
from rollstream.configs.loader import load_config
from rollstream.configs.resume import resumed_config
from rollstream.configs.schema import Config
from rollstream.envs import registry
from rollstream.envs.chat import ChatEnv, Turn
from rollstream.errors import ConfigError, Refused, RunFolderError, UnknownEnv
from rollstream.run import check_env
from rollstream.summary import audit_lines


def rules(*envs: tuple[str, float], seed: int = 7) -> Rules:
    return Rules(
        batch_groups=500, group_size=1, depth=0, max_lag=0, max_refill=0, max_infra_attempts=1, max_env_attempts=1, overlong=None,
        exclude_truncated=False, envs=envs, seed=seed, versions=10,
    )  # fmt: skip


def lease(books: Books, num: int) -> list[tuple[str, int]]:
    granted = [books.grant("actor-0", 0.0) for _ in range(num)]
    return [(given.env_id, given.task_index) for given in granted if given is not None]


# --- shares -------------------------------------------------------------------------------------------------------------------------


@given(weights=st.lists(st.floats(0.01, 100.0), min_size=2, max_size=7), num=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_every_environment_is_within_one_lease_of_its_share_at_any_time(weights: list[float], num: int) -> None:
    mixture = Mixture(weights)
    for dealt in range(1, num + 1):
        mixture.next()
        bound = 1 - 1 / (2 * len(weights) - 2)
        assert max(abs(share * dealt - count) for share, count in zip(mixture.shares, mixture.counts, strict=True)) <= bound + 1e-6


def test_a_mixture_goes_on_from_its_counts_as_if_it_had_never_stopped() -> None:
    whole = Mixture([5, 3, 1])
    order = [whole.next() for _ in range(90)]
    assert [order.count(place) for place in range(3)] == [50, 30, 10]
    half = Mixture([5, 3, 1], [order[:40].count(place) for place in range(3)])
    assert [half.next() for _ in range(50)] == order[40:]


# --- tasks --------------------------------------------------------------------------------------------------------------------------


def test_every_task_has_its_turn_before_any_comes_again_and_each_epoch_has_its_own_order() -> None:
    epochs = [[task_at(3, "demo/A-v0", epoch * 20 + place, 20) for place in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epoch_order(3, "demo/A-v0", 0, 20).tolist() != epoch_order(3, "demo/B-v0", 0, 20).tolist()
    assert epoch_order(3, "demo/A-v0", 0, 20).tolist() != epoch_order(4, "demo/A-v0", 0, 20).tolist()
    assert [task_at(3, "demo/A-v0", cursor, None) for cursor in (0, 7, 10**9)] == [0, 7, 10**9]


def test_cursors_go_on_after_a_restart_and_the_audit_reckons_them_again(ledger: Ledger, tmp_path: Path) -> None:
    mixed = rules(("demo/A-v0", 3.0), ("demo/B-v0", 1.0))
    books = Books(ledger, mixed)
    books.tasks.announce({"demo/A-v0": 30})
    leased = lease(books, 100)
    books.save_counters()
    ledger.commit()
    books = Books(ledger, mixed)
    books.tasks.announce({"demo/A-v0": 30})
    leased += lease(books, 101)
    ledger.commit()
    of_a, of_b = ([task for env_id, task in leased if env_id == name] for name in ("demo/A-v0", "demo/B-v0"))
    assert (len(of_a), len(of_b)) == (151, 50)
    assert [sorted(of_a[start : start + 30]) for start in range(0, 150, 30)] == [list(range(30))] * 5
    assert of_b == list(range(50))
    report = audit(tmp_path)
    assert report.problems == []
    text = "\n".join(audit_lines(report))
    assert "demo/A-v0: 151 groups (75.1 % of all, its weight says 75.0 %), task 1 of 30 in epoch 5" in text
    assert "demo/B-v0: 50 groups (24.9 % of all, its weight says 25.0 %)" in text


def test_the_audit_names_leases_that_weights_and_cursors_do_not_explain(ledger: Ledger, tmp_path: Path) -> None:
    books = Books(ledger, rules(("demo/A-v0", 1.0), ("demo/B-v0", 1.0)))
    books.tasks.announce({"demo/B-v0": 5})
    lease(books, 20)
    ledger.commit()
    ledger.write("UPDATE groups SET task_index = (task_index + 1) % 5 WHERE group_id = 9")
    ledger.write("UPDATE groups SET env_id = 'demo/A-v0' WHERE group_id = 19")
    ledger.commit()
    problems = " | ".join(audit(tmp_path).problems)
    assert "group 9 was leased for task" in problems
    assert "group 19 was leased for demo/A-v0, by its weights it is demo/B-v0's" in problems


def test_an_actor_that_counts_other_tasks_than_the_run_is_refused(ledger: Ledger) -> None:
    books = Books(ledger, rules(("demo/A-v0", 1.0)))
    books.tasks.announce({"demo/A-v0": 30, "demo/Unknown-v0": 4})
    books.tasks.announce({"demo/A-v0": 30})
    with pytest.raises(Refused, match="demo/A-v0 has 31 tasks for this actor, this run counts 30"):
        Books(ledger, books.rules).tasks.announce({"demo/A-v0": 31})


# --- configuration ------------------------------------------------------------------------------------------------------------------


class One(ChatEnv):
    def start(self, task: Any) -> str:
        return "say something"

    def respond(self, message: Any) -> str:
        return Turn("more", reward=0.0)


def several(**changes: Any) -> Config:
    first, second = {"id": "rollstream/KeyValue-v0", "weight": 3}, {"id": "test-tasks/One-v0"}
    values = {"name": "mixed", "env": [first, second], "learner": {"versions": 1, "batch_groups": 2, "group_size": 2}}
    return Config.model_validate(values | changes)


def test_env_is_one_section_or_a_list_of_them() -> None:
    mixed = several()
    assert Rules.of(mixed).envs == (("rollstream/KeyValue-v0", 3.0), ("test-tasks/One-v0", 1.0))
    alone = load_config("quickstart")
    assert Rules.of(alone).envs == (("rollstream/KeyValue-v0", 1.0),)
    check_config(mixed)
    check_config(alone)


def test_an_override_reaches_into_the_list_and_a_wrong_place_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text("name: mixed\nenv: [{id: a/B-v0}, {id: a/C-v0}]\nlearner: {versions: 1, batch_groups: 1, group_size: 2}\n")
    assert [env.weight for env in load_config(path, ["env.1.weight=4"]).envs] == [1.0, 4.0]
    for wrong in ("env.2.weight=1", "env.id=a/D-v0"):
        with pytest.raises(ConfigError, match=r"env is a list; name a place in it, env\.0 to env\.1"):
            load_config(path, [wrong])
    with pytest.raises(ConfigError, match=r"env\.1\.weight: input should be greater than 0"):
        load_config(path, ["env.1.weight=0"])
    with pytest.raises(RunFolderError, match=r"env is .* in the run's record"):
        resumed_config(load_config(path, ["env.1.weight=4"]), load_config(path), ["env.1.weight=4"])


def test_the_same_environment_twice_and_a_lone_weight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.1\.id a/B-v0 is listed twice; .* register it under a second id"):
        check_config(several(env=[{"id": "a/B-v0"}, {"id": "a/B-v0", "kwargs": {"hard": True}}]))
    with pytest.raises(ConfigError, match=r"env\.weight 2 with one environment"):
        check_config(several(env={"id": "a/B-v0", "weight": 2}))


def test_every_environment_is_tried_out_and_one_that_demonstrates_is_enough_for_a_warm_up() -> None:
    registry.register("test-tasks/One-v0", One)
    assert check_env(several(warmup={"steps": 1})) == ["test-tasks/One-v0: has no demonstrations; the warm-up goes on the others alone"]
    registry.register("test-tasks/Other-v0", One)
    with pytest.raises(ConfigError, match=r"none of test-tasks/One-v0, test-tasks/Other-v0 has demonstrations"):
        check_env(several(warmup={"steps": 1}, env=[{"id": "test-tasks/One-v0"}, {"id": "test-tasks/Other-v0"}]))
    with pytest.raises(UnknownEnv, match="test-tasks/Two-v0"):
        check_env(several(env=[{"id": "test-tasks/One-v0"}, {"id": "test-tasks/Two-v0"}]))


def test_orders_of_an_epoch_cannot_be_written_to() -> None:
    order = epoch_order(0, "demo/A-v0", 0, 3)
    with pytest.raises(ValueError, match="read-only"):
        order[0] = np.int64(1)
