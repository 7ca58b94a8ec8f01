"""A step that changed nothing is told with its cause and what to do about it."""

from __future__ import annotations

import pytest

from rollstream.buffer.types import Batch, Header
from rollstream.configs.learner_schema import Correction, Loss
from rollstream.learner.skips import why_skipped


def batch(*rewards: float | None) -> Batch:
    num = len(rewards)
    columns: dict[str, list[int]] = {name: [] for name in ("run_counts", "run_versions", "run_sampled", "segment_counts", "segment_tokens", "top_ks")}
    header = Header(
        group_ids=[place // 2 for place in range(num)], members=[place % 2 for place in range(num)], rewards=list(rewards), statuses=["terminated"] * num,
        stop_reasons=["terminated"] * num, env_metrics=[{}] * num, temperatures=[], top_ps=[], env_ids=[], **columns,
    )  # fmt: skip
    return Batch(0, 3, tuple(range(num // 2)), (), header=header)


@pytest.mark.parametrize(
    ("rewards", "tokens", "degenerate", "cause", "remedy"),
    [
        ((1.0, 0.0), 9, 0, "its gradient was not finite", "lower learner.optimizer.learning_rate"),
        ((None, None), 0, 1, "nothing to train on: no episode of the batch has a reward", "rollstream log RUN --failed"),
        ((0.0, 0.0, 0.0, None), 0, 2, "nothing to train on: no reward at all, every episode of the batch has 0", "the environment gives rewards"),
        ((1.0, 1.0, 0.0, 0.0), 0, 2, "nothing to train on: every group's rewards were equal", "the task harder or easier"),
        ((1.0, 0.0, 1.0, 1.0), 0, 1, "nothing to train on: what was left was withheld for age or masked", "train/age_drops"),
    ],
)
def test_the_cause_of_a_skipped_step_comes_with_its_remedy(rewards: tuple[float | None, ...], tokens: int, degenerate: int, cause: str, remedy: str) -> None:
    told, what_to_do = why_skipped(batch(*rewards), {"train/tokens": tokens, "train/degenerate_groups": degenerate}, {"total": 0.5}, Loss())
    assert told == cause
    assert remedy in what_to_do


def test_a_loss_that_is_not_finite_is_told_by_the_names_of_what_made_it() -> None:
    loss = Loss(kind="pg", correction=(Correction(level="token", mode="truncate", high=2.0),))
    told, what_to_do = why_skipped(batch(1.0, 0.0), {"train/tokens": 9}, {"total": float("nan")}, loss)
    assert told == "its loss was not finite (learner.loss.kind pg, correction token truncate)"
    assert "learning_rate" not in what_to_do


def test_a_step_whose_every_token_was_dropped_says_so() -> None:
    assert why_skipped(batch(1.0, 0.0), {"train/tokens": 9}, {"skip_step": True}, Loss())[0] == "learner.loss.nonfinite drop took every token out"
