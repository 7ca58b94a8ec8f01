"""Why a step changed nothing, in words: a gradient that is not finite, or nothing to train on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..buffer.header import header_of
from ..buffer.types import Batch
from ..configs.learner_schema import Loss

_LOOK = "see loss/* and optim/* in metrics.jsonl"


def why_skipped(batch: Batch, data: Mapping[str, float], found: Mapping[str, float], loss: Loss) -> tuple[str, str]:
    """The cause of a skipped step and its remedy.

    ``data`` are the batch's figures (:func:`.metrics.data_figures`), ``found`` what the step measured of ``loss``.
    """
    if data["train/tokens"]:
        if found.get("skip_step"):
            return (
                "learner.loss.nonfinite drop took every token out",
                "see loss/dropped_nonfinite in metrics.jsonl, or set it to raise, which names the first one",
            )
        if not math.isfinite(found.get("total", 0.0)):
            rules = "".join(f", correction {rule.level} {rule.mode}" for rule in loss.correction)
            return f"its loss was not finite (learner.loss.kind {loss.kind}{rules})", f"if one of these is your own, keep it finite on every token; {_LOOK}"
        return "its gradient was not finite", f"lower learner.optimizer.learning_rate, or look for rewards without measure; {_LOOK}"
    rewards = [reward for reward in header_of(batch).rewards if reward is not None]
    if not rewards:
        return "nothing to train on: no episode of the batch has a reward", "rollstream log RUN --failed shows why episodes failed"
    if data["train/degenerate_groups"] >= len(batch.groups):
        if not any(rewards):
            remedy = "see that the environment gives rewards, rs.Turn(…, reward=…): rollstream log RUN shows what it gave"
            return "nothing to train on: no reward at all, every episode of the batch has 0", remedy
        remedy = "make the task harder or easier, or learner.group_size larger, so that members of a group fare differently"
        return "nothing to train on: every group's rewards were equal", remedy
    return "nothing to train on: what was left was withheld for age or masked", "see train/age_drops and train/truncated_share in metrics.jsonl"
