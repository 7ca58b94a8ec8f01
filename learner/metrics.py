"""The row of numbers each version leaves behind: what was trained, how far it drifted, what it cost, what the other roles did."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ..buffer.header import header_of
from ..buffer.types import Batch
from ..buffer.wire import StatusReply
from ..configs.schema import Env
from .ranks import Ranks
from .step import Work
from .updates import Trained

_ASK_S = 1.0
"""At most this often the buffer is asked about the other roles."""
_OF_BUFFER = (
    *("retries_infra", "retries_env", "groups_closed_early", "groups_dropped_late", "unplayed_members", "superseded"),
    *("refused", "bytes_received", "bytes_stored", "blob_bytes_stored"),
)
"""Counters of the buffer that a row repeats."""


def row_of(data: Mapping[str, float], done: Trained, *, skipped: int, seconds: Mapping[str, float], peak_flops: float | None = None) -> dict[str, float]:
    """The learner's own numbers for the updates of one version, beside those of its ``data`` (:func:`data_figures`).

    ``skipped`` counts skipped versions so far. ``seconds`` are what the loop itself spent, by phase; ``checkpoint`` is that of the version before, whose
    row was written already. ``peak_flops`` is what the device could do in a second, where that is known.
    """
    gradients, update = done.gradients, done.update
    computed_s = gradients.seconds + update.seconds
    return {
        **data,
        **done.metrics,
        **_of_values(done),
        **{f"loss/{name}": value for name, value in gradients.metrics.items() if name not in ("active_tokens", "skip_step")},
        "optim/grad_norm": update.grad_norm,
        "optim/learning_rate": update.learning_rate,
        "optim/skipped_steps": skipped,
        "optim/updates": done.num_updates,
        **{f"time/{phase}_s": value for phase, value in seconds.items()},
        "time/proximal_s": done.proximal_s,
        "time/forward_backward_s": gradients.seconds,
        "time/fence_s": done.fence_s,
        "time/optimizer_s": update.seconds,
        "learner/tokens_per_s": gradients.num_tokens / computed_s if computed_s > 0 else 0.0,
        **_of_flops(done, computed_s, peak_flops),
        "learner/padding_share": 1.0 - gradients.num_tokens / done.num_cells if done.num_cells else 0.0,
    }


def _of_flops(done: Trained, seconds: float, peak: float | None) -> dict[str, float]:
    """What was computed per second, and as a share of what the device could do; see :mod:`.flops`."""
    if not done.flops or seconds <= 0:
        return {}
    rate = done.flops / seconds
    return {"learner/tflops_per_s": rate / 1e12} | ({} if peak is None else {"learner/mfu": rate / peak})


def _of_values(done: Trained) -> dict[str, float]:
    """How the value head learnt; nothing without one."""
    value = done.gradients.value
    if value is None or not value.tokens:
        return {}
    return {"value/loss": float(value.loss), "value/clip_share": float(value.clipped) / value.tokens, "value/grad_norm": done.update.value_grad_norm}


def costs_of(ranks: Ranks) -> dict[str, float]:
    """What the learner's processes cost so far: CPU seconds of all ranks, and MiB of the one with most: resident, and on a GPU what tensors took there."""
    mine = [time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        mine.append(torch.cuda.max_memory_allocated() / 2**20)
    found = [values.tolist() for values in ranks.gather(torch.tensor(mine, dtype=torch.float64))]
    names = ("learner/peak_memory_mb", "learner/peak_device_memory_mb")
    peaks = {name: max(values[place] for values in found) for place, name in enumerate(names[: len(mine) - 1], 1)}
    return {"learner/cpu_s": sum(values[0] for values in found), **peaks}


def data_figures(batch: Batch, work: Work, envs: Sequence[Env]) -> dict[str, float]:
    """What the whole batch was, and where there are several environments what it was of each.

    Means are over the trajectories they are known for; a metric no environment reported is left out.
    """
    header = header_of(batch)
    num = len(header.group_ids)
    rewards = work.flat.rows.rewards[np.isfinite(work.flat.rows.rewards)]
    successes = [metrics["success"] for metrics in header.env_metrics if "success" in metrics]
    degenerate = work.flat.rows.groups[work.plan.degenerate]
    row: dict[str, float] = {
        "train/advantage_std": float(work.plan.advantages.std()),
        "train/tokens": work.plan.active_tokens,
        "train/episodes": num,
        "train/degenerate_groups": len(np.unique(degenerate)),
        "train/sequence_tokens_mean": sum(header.segment_tokens) / num,
        "train/invalid_episodes": (failed := header.statuses.count("failed")),
        "train/invalid_share": failed / num,
        "train/age_drops": len(batch.withheld),
    }
    played = [reason for reason, status in zip(header.stop_reasons, header.statuses, strict=True) if status != "failed"]
    if played:
        cut = {reason: played.count(reason) / len(played) for reason in ("turns", "length", "time")}
        row |= {"train/truncated_share": sum(cut.values()), **{f"train/truncated_{reason}": share for reason, share in cut.items()}}
    if len(rewards):
        row["train/reward_mean"] = float(rewards.mean())
    if successes:
        row["train/success"] = float(np.mean(successes))
    if work.plan.staleness is not None:
        staleness, total = work.plan.staleness, max(int(work.plan.staleness.tokens_by_lag.sum()), 1)
        row |= {"train/lag_max": staleness.max, "train/lag_mean": staleness.mean, "train/dropped_stale_tokens": staleness.dropped_tokens}
        row |= {f"train/lag_{lag}_share": int(num) / total for lag, num in enumerate(staleness.tokens_by_lag) if num}
    return row | (_of_envs(batch, [env.id for env in envs]) if len(envs) > 1 else {})


def _of_envs(batch: Batch, envs: Sequence[str]) -> dict[str, float]:
    """The whole batch by environment, each under its own id; one that is not in it has only its share, 0."""
    header = header_of(batch)
    lengths = np.add.reduceat(header.segment_tokens, np.cumsum([0, *header.segment_counts[:-1]]))
    row: dict[str, float] = {}
    for env_id in envs:
        here = [place for place, found in enumerate(header.env_ids) if found == env_id]
        statuses = [header.statuses[place] for place in here]
        means: dict[str, list[float]] = {
            "reward_mean": [reward for place in here if (reward := header.rewards[place]) is not None],
            "success": [header.env_metrics[place]["success"] for place in here if "success" in header.env_metrics[place]],
            "sequence_tokens_mean": [float(lengths[place]) for place in here],
            "truncated_share": [float(status == "truncated") for status in statuses if status != "failed"],
            "invalid_share": [float(status == "failed") for status in statuses],
        }
        row[f"env/{env_id}/share"] = len(here) / len(header.env_ids)
        row |= {f"env/{env_id}/{name}": float(np.mean(values)) for name, values in means.items() if values}
    return row


class Counters:
    """What the buffer says about the other roles, asked for once a second; between two answers the last one stands."""

    def __init__(self, status: Callable[[], StatusReply]) -> None:
        self._status = status
        self._asked = float("-inf")
        self._tokens: tuple[float, float] | None = None
        self._row: dict[str, float] = {}
        self.num_actors = 0
        """Actors the buffer knew of at the last answer, those that joined included."""

    def read(self) -> dict[str, float]:
        """Rates and levels of actors and buffer; a number nobody reported is left out."""
        now = time.monotonic()
        if now - self._asked >= _ASK_S:
            self._asked = now
            self._row = self._of(self._status(), now)
        return self._row

    def _of(self, status: StatusReply, now: float) -> dict[str, float]:
        row = {f"buffer/groups_{state}": float(status.groups.get(state, 0)) for state in ("open", "ready", "trained", "dropped")}
        row |= {f"buffer/{name}": status.counters[name] for name in _OF_BUFFER if name in status.counters}
        row |= {name: value for name, value in status.counters.items() if name.startswith("bias/")}
        if "cpu_s" in status.counters:
            row["buffer/cpu_s"] = status.counters["cpu_s"]
        actors = [peer for peer in status.peers if peer.role == "actor"]
        self.num_actors = len(actors)
        costs = [numbers["cpu_s"] for peer in actors for numbers in (peer.counters, peer.gauges) if "cpu_s" in numbers]
        if costs:
            row["actors/cpu_s"] = sum(costs)
        row["actors/cancelled_episodes"] = sum(peer.counters.get("cancelled_episodes", 0.0) for peer in actors)
        tokens = sum(peer.counters.get("tokens", 0.0) for peer in actors)
        if self._tokens is not None and now > self._tokens[0] and tokens >= self._tokens[1]:
            row["actors/tokens_per_s"] = (tokens - self._tokens[1]) / (now - self._tokens[0])
        self._tokens = (now, tokens)
        return row
