"""Evaluations in words: a line for the live view, facts for the summary, a table for ``rollstream evaluate``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .buffer.wire import Evaluation
from .configs.run_folder import Run
from .tail import read_rows

_COUNTS = ("eval/trajectories", "eval/invalid_episodes")
_PASS = re.compile(r"eval/pass_at_(\d+)")


def line_of(evaluations: Sequence[Evaluation]) -> str:
    """Those that go on, and what the one that closed last came to; empty where there is none."""
    parts = [f"v{item.version}: {item.num_done} of {item.num_members} played" for item in evaluations if item.state == "open"]
    for item in evaluations:
        if item.state == "done":
            parts.append(f"v{item.version}: {figures(item.values)}")
        elif item.state != "open":
            parts.append(f"v{item.version} {item.state}: {item.reason}")
    return "   ".join(parts)


def figures(values: Mapping[str, Any]) -> str:
    """``reward 1.02 ± 0.03, success 0.81, pass@4 0.97``: what is known of it."""
    found: list[str] = []
    if (reward := values.get("eval/reward_mean")) is not None:
        error = values.get("eval/reward_stderr")
        found.append(f"reward {reward:.3f}" + (f" ± {error:.3f}" if error is not None else ""))
    if (success := values.get("eval/success")) is not None:
        found.append(f"success {success:.3f}")
    found += [f"pass@{k} {values[f'eval/pass_at_{k}']:.3f}" for k in _ks(values) if k > 1]
    return ", ".join(found) or "nothing was scored"


def facts(run: Run, num_open: int) -> Iterator[tuple[str, str]]:
    """What the summary of a run says of its evaluations, of which ``num_open`` are not finished; nothing where it had none."""
    if run.config.evaluation is None:
        return
    rows = read_rows(run.evaluations_path)
    done = sorted((row for row in rows if row["state"] == "done"), key=lambda row: row["version"])
    for row in [done[0], done[-1]] if len(done) > 1 else done:
        yield f"evaluated v{row['version']}", figures(row)
    others = [f"version {row['version']} {row['state']} ({row['reason']})" for row in rows if row["state"] != "done"]
    unfinished = f", {num_open} not finished (--resume completes them)" if num_open else ""
    counts = f"{len(done)} done{unfinished}" + (f"; not evaluated: {'; '.join(others[:3])}" if others else "")
    yield "evaluations", counts + (f" and {len(others) - 3} more" if len(others) > 3 else "")


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Evaluations as a table with a header: one line each, one column per number that any of them has."""
    ks = sorted({k for row in rows for k in _ks(row)})
    names = {"reward": "eval/reward_mean", "± stderr": "eval/reward_stderr", "success": "eval/success"}
    names |= {f"pass@{k}": f"eval/pass_at_{k}" for k in ks}
    names |= {"tokens": "eval/sequence_tokens_mean", "trajectories": "eval/trajectories", "failed": "eval/invalid_episodes"}
    cells = [[str(row["version"]), *(_number(row.get(name), counts=name in _COUNTS) for name in names.values())] for row in rows]
    return [["version", *names], *cells]


def _ks(values: Mapping[str, Any]) -> list[int]:
    return sorted(int(match[1]) for name in values if (match := _PASS.fullmatch(name)))


def _number(value: float | None, *, counts: bool) -> str:
    return "–" if value is None else f"{value:.0f}" if counts else f"{value:.3f}"
