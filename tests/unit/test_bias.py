"""The drop-bias report: every finished trajectory has one fate, and what is left out is told by length and reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollstream.buffer.audit_report import AuditReport
from rollstream.buffer.bias import Bias, Fate, left_out
from rollstream.buffer.books import Books
from rollstream.buffer.facts import Fact
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.window import Rules
from rollstream.buffer.wire import Lease
from rollstream.summary import audit_lines

RULES = Rules(
    batch_groups=2, group_size=3, depth=0, max_lag=0, max_refill=0, max_infra_attempts=1, max_env_attempts=1, overlong=None, exclude_truncated=False,
    envs=(("demo/A-v0", 1.0), ("demo/B-v0", 1.0)), seed=7, versions=99, min_group=2, group_deadline_s=10.0,
)  # fmt: skip


def played(lease: Lease, member: int, num_tokens: int, reward: float | None, version: int = 0) -> Fact:
    ending: Any = ("failed", "env") if reward is None else ("terminated", "terminated")
    return Fact(0, lease.group_id, member, lease.attempt, reward, *ending, num_tokens, num_tokens, version, version, 0, 1)


@pytest.fixture
def books(tmp_path: Path) -> Any:
    """One batch of each environment: A whole, with a failure; B closed early. Then a group of A that is dropped. Late ones come for both."""
    ledger = Ledger(tmp_path / "ledger.sqlite", "run-a")
    books = Books(ledger, RULES)
    of_a, of_b = books.grant("actor-0", 0.0), books.grant("actor-0", 0.0)
    assert of_a is not None
    assert of_b is not None
    for member, reward in enumerate((1.0, 0.0, None)):
        books.receive(played(of_a, member, 10, reward), 1)
    for member in (0, 1):
        books.receive(played(of_b, member, 20, 1.0), 1)
    books.close_late(10.0)
    assert books.batch(1) is not None
    books.trained(1)
    again = books.grant("actor-0", 10.0)
    assert again is not None
    books.receive(played(again, 0, 30, 0.5, 1), 1)
    books.close_late(20.0)
    for _ in range(2):  # the second is a copy
        assert books.receive(played(of_b, 2, 100, 0.25), 1) == "superseded"
        assert books.receive(played(again, 2, 200, 0.75, 1), 1) == "superseded"
    yield books
    ledger.close()


def counts(bias: Bias, env_id: str | None = None) -> dict[Fate, tuple[int, int, float]]:
    return {fate: (tally.num, tally.num_tokens, tally.reward) for fate, tally in bias.fates(env_id).items() if tally.num}


def test_every_finished_trajectory_has_one_fate(books: Books) -> None:
    assert counts(books.bias, "demo/A-v0") == {"trained": (2, 20, 1.0), "invalid": (1, 10, 0.0), "dropped": (1, 30, 0.5), "late": (1, 200, 0.75)}
    assert counts(books.bias, "demo/B-v0") == {"trained": (2, 40, 2.0), "late": (1, 100, 0.25)}
    assert left_out(books.bias.fates()).num == 4


def test_a_restart_reckons_the_same_from_the_ledger(books: Books) -> None:
    before = books.bias.figures()
    books.save_counters()
    books.ledger.commit()
    assert Books(books.ledger, RULES).bias.figures() == before


def test_what_is_withheld_for_its_age_is_told_apart_also_after_a_restart(books: Books) -> None:
    for _ in range(2):
        lease = books.grant("actor-0", 20.0)
        assert lease is not None
        for member in range(3):
            books.receive(played(lease, member, 40, 1.0, version=0 if member == 0 else 1), 1)
    batch = books.batch(2)
    assert batch is not None
    assert len(batch.withheld) == 2
    fates = counts(books.bias)
    assert fates["withheld"] == (2, 80, 2.0)
    books.ledger.commit()
    assert counts(Bias(books.ledger, 0)) == fates


def test_the_figures_are_means_over_what_is_known_for_all_and_for_each_environment(books: Books) -> None:
    row = books.bias.figures()
    assert row["bias/trained_episodes"] == 4.0
    assert (row["bias/late_episodes"], row["bias/dropped_episodes"], row["bias/invalid_episodes"], row["bias/withheld_episodes"]) == (2.0, 1.0, 1.0, 0.0)
    assert (row["bias/trained_tokens_mean"], row["bias/left_out_tokens_mean"]) == (15.0, 85.0)
    assert (row["bias/trained_reward_mean"], row["bias/left_out_reward_mean"]) == (0.75, 0.5)
    assert (row["bias/demo/B-v0/trained_tokens_mean"], row["bias/demo/B-v0/left_out_tokens_mean"]) == (20.0, 100.0)


def test_the_audit_says_it_in_a_line_per_environment(books: Books, tmp_path: Path) -> None:
    report = AuditReport(tmp_path, fates={env_id: books.bias.fates(env_id) for env_id in books.bias.envs()})
    lines = [line for line in audit_lines(report) if line.startswith("left out")]
    assert lines == [
        "left out     demo/A-v0: 3 of 5 (60.0 %): 1 invalid, 1 dropped, 1 late; means of tokens 80.000, trained 10.000; reward 0.625, trained 0.500",
        "left out     demo/B-v0: 1 of 3 (33.3 %): 1 late; means of tokens 100.000, trained 20.000; reward 0.250, trained 1.000",
    ]
    assert "left out     nothing: every finished trajectory that was decided on is trained" in list(audit_lines(AuditReport(tmp_path)))
