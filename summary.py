"""What a run came to: a table, a small plot in the terminal, a picture in the run folder, and what to try next.

Everything is read from ``metrics.jsonl`` and the ledger, so it can be told of any run, also one that was stopped.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from . import evaluation_lines
from .buffer.audit import audit
from .buffer.audit_report import AuditReport
from .buffer.bias import LEFT_OUT, Tally, left_out
from .configs.run_folder import Run
from .errors import RollstreamError, describe
from .tail import SMOOTH, Row, clock, read_rows, smoothed, warnings_in

THRESHOLD = 0.9
"""Success whose first crossing is reported."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_COLOURS = ("green", "cyan")
_STOPPED = 130
"""What a run that was stopped exits with."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What the supervisor knows of the end and no file does."""

    exit_code: int
    wall_s: float
    cpu_s: Mapping[str, float]
    num_restarts: int
    arguments: Sequence[str]
    """What was typed after ``rollstream``, without ``--resume``."""
    resumed: bool = False
    """Whether the run had begun before: times are of this start then, all else is of the run."""


def print_summary(run: Run, ending: Ending, console: Console) -> None:
    """Prints the summary of ``run`` and writes ``rewards.png`` into its folder. A run without a version gets a line, if it was stopped and can go on."""
    rows = read_rows(run.metrics_path)
    if not rows:
        if ending.exit_code == _STOPPED and (run.folder / "config.yaml").is_file():
            console.print(f"stopped in {clock(ending.wall_s)}, before version 1; go on with  {_go_on(ending)}", soft_wrap=True)
        return
    console.print()
    report = _audit(run)
    for name, value in _facts(run, ending, rows, report):
        console.print(Text(f"{name:<18}", style="dim").append(value, style="not dim"), soft_wrap=True)
    console.print()
    for line in terminal_plot(rows, width=min(console.width - 2, 90), height=10):
        console.print(line, soft_wrap=True)
    try:
        picture = draw_png(run, rows)
    except OSError as error:
        console.print(f"no picture: {describe(error)}")
        return
    console.print()
    for what, command in _next_commands(run, ending, picture, complete=_is_complete(run, rows, report)):
        console.print(Text(f"{what:<18}", style="dim").append(command, style="bold"), soft_wrap=True)


def passed_at(rows: Sequence[Row], name: str = "train/success", threshold: float = THRESHOLD) -> Row | None:
    """Row of the first version at which the mean of the last five versions of ``name`` reaches ``threshold``."""
    held = [row for row in rows if row.get(name) is not None]
    for row, value in zip(held, smoothed(held, name), strict=True):
        if value >= threshold and held.index(row) >= SMOOTH - 1:
            return row
    return None


def _audit(run: Run) -> AuditReport | None:
    try:
        return audit(run.folder)
    except (RollstreamError, OSError):
        return None


def _facts(run: Run, ending: Ending, rows: Sequence[Row], report: AuditReport | None) -> Iterator[tuple[str, str]]:
    word, start = {0: "finished", _STOPPED: "stopped"}.get(ending.exit_code, "ended early"), " of this start" if ending.resumed else ""
    word = "finished" if word == "stopped" and _is_complete(run, rows, report) else word
    yield word, f"version {rows[-1]['version']} of {run.config.learner.versions} in {clock(ending.wall_s)}{start}, {_plural(ending.num_restarts, 'restart')}"
    if lacking := int(rows[-1]["version"]) - len({row["version"] for row in rows}):
        yield "metrics", f"metrics.jsonl lacks the rows of {_plural(lacking, 'version')}: lines of it were lost"
    roles = ", ".join(f"{name} {seconds:.0f}" for name, seconds in ending.cpu_s.items())
    yield "CPU seconds", f"{sum(ending.cpu_s.values()):.0f}{start}: {roles}"
    for name, metric in (("success", "train/success"), ("reward", "train/reward_mean")):
        values = [float(row[metric]) for row in rows if row.get(metric) is not None]
        if values:
            num = min(SMOOTH, max(1, len(values) // 2))
            yield name, f"{_mean(values[:num]):.3f} (first {_plural(num, 'version')}) → {_mean(values[-num:]):.3f} (last {num})"
    if told := _skips(rows):
        yield "steps", told
    row = passed_at(rows)
    if row is not None:
        at = f" after {clock(float(row['time/wall_s']))} of training" if row.get("time/wall_s") is not None else ""
        yield f"success ≥ {THRESHOLD}", f"from version {row['version']} on (mean of {SMOOTH}){at}"
    yield from evaluation_lines.facts(run, 0 if report is None else report.evaluations.get("open", 0))
    lags = [float(row["train/lag_max"]) for row in rows if row.get("train/lag_max") is not None]
    drops = report.num_age_drops if report is not None else sum(float(row.get("train/age_drops") or 0) for row in rows)
    yield (
        "lag trained",
        f"at most {max(lags, default=0):.0f} behind, of any token that trained; {run.config.buffer.max_lag} allowed; {drops:.0f} dropped for age",
    )
    if report is not None:
        in_flight = sum(report.counts[state] for state in ("open", "ready", "assigned"))
        rest = f"; the rest belongs to {_plural(in_flight, 'group')} in flight at the end" if in_flight else ""
        failed = f", {told}" if (told := _failed(report)) else ""
        yield "episodes", f"{report.num_trajectories:,} generated, {report.num_trained:,} trained{failed}{rest}"
        if report.endings:
            yield "episodes ended", _ended(report)
        if report.forks:
            fork, left = report.forks[-1], sum(report.abandoned.values())
            yield "lineage", f"{fork.lineage}, begun after version {fork.version}: {fork.reason}; {_plural(left, 'batch', 'batches')} left behind by forks"
        yield "books", _books(report) + "".join(f"; {problem}" for problem in report.problems)
    num_warnings, last_warning = warnings_in(run.logs_folder)
    if num_warnings:
        yield "warnings", f"{num_warnings:,}, the last in {textwrap.shorten(last_warning, 160, placeholder=' …')}"


def audit_lines(report: AuditReport) -> Iterator[str]:
    """The audit of a run in words: the equation of the books, what was trained, whether what was trained is like what was played, every problem."""
    yield f"books        {_books(report)}"
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(report.drop_reasons.items()))
    if reasons:
        yield f"dropped      {reasons}"
    yield f"version      {report.version:,} of lineage {report.lineage}, {_plural(report.num_batches, 'batch', 'batches')} recorded"
    for fork in report.forks:
        yield f"fork         lineage {fork.lineage} began after version {fork.version} of lineage {fork.parent}: {fork.reason}"
    for lineage, number in report.abandoned.items():
        yield f"abandoned    {_plural(number, 'batch', 'batches')} of lineage {lineage}; rollstream replay --lineage {lineage} still finds them"
    evaluated = " with those of evaluations" if report.num_evaluated else ""
    appends = f"{_plural(report.num_rows, 'row')}{evaluated}, {_plural(report.num_appends, 'append')}, {report.size_bytes / 2**20:,.1f} MiB"
    yield f"trajectories {report.num_trajectories:,} in the log ({appends}), {report.num_trained:,} trained, {report.duplicates:,} trained twice"
    if told := _failed(report):
        yield f"             {told}"
    if report.endings:
        yield f"ended        {_ended(report)}"
    if report.num_sealed or report.num_removed:
        removed = f", {report.num_removed:,} trajectories removed by retention (buffer.keep_gb)" if report.num_removed else ""
        yield f"sealed       {_plural(report.num_sealed, 'segment')}{removed}"
    too_old = f"{report.num_age_drops:,} trajectories withheld or dropped for age"
    yield f"lag          at most {report.max_lag_trained} in trained batches, whether its tokens trained or not; {report.lag_bound} allowed; {too_old}"
    for env_id, cursor in report.cursors.items():
        share = (
            f" ({cursor.num_groups / report.num_leased:.1%} of all, its weight says {cursor.share:.1%})"
            if len(report.cursors) > 1 and report.num_leased
            else ""
        )
        epoch = (
            ""
            if cursor.num_tasks is None
            else f", task {cursor.num_groups % cursor.num_tasks:,} of {cursor.num_tasks:,} in epoch {cursor.num_groups // cursor.num_tasks}"
        )
        yield f"tasks        {env_id}: {_plural(cursor.num_groups, 'group')}{share.replace('%', ' %')}{epoch}"
    for env_id, bias in report.bias.items():
        yield f"{env_id}: trained {bias.num_trained:,} of {bias.num_leased:,} trajectories; means of the trained and of all:"
        pairs = (
            ("tokens", bias.trained_tokens_mean, bias.leased_tokens_mean),
            ("reward", bias.trained_reward_mean, bias.leased_reward_mean),
            ("success", bias.trained_success_mean, bias.leased_success_mean),
        )
        yield "             " + "   ".join(f"{name} {trained:.3f} {played:.3f}" for name, trained, played in pairs if not math.isnan(played))
    if report.num_blobs:
        yield f"images       {_plural(report.num_blobs, 'blob')}, {report.blob_bytes / 2**20:,.1f} MiB"
    if report.refused:
        yield f"refused      {', '.join(f'{code} {count:,}' for code, count in report.refused.items())}"
    if report.evaluations:
        yield f"evaluations  {_evaluations(report)}"
        yield from (f"             {reason}" for reason in report.evaluation_reasons)
    if report.num_amendments:
        yield f"amended      {_plural(report.num_amendments, 'score or other number', 'scores and other numbers')} came after the rows they are about"
    yield from _left_out(report)
    if report.unrecorded_bytes:
        yield f"unrecorded   {report.unrecorded_bytes:,} bytes behind the last acknowledged append, as a live or a killed buffer leaves them"
    for problem in report.problems:
        yield f"problem      {problem}"
    yield "clean" if report.closes and not report.problems else "NOT CLEAN"


def _left_out(report: AuditReport) -> Iterator[str]:
    """What was finished and did not train, against what did, by environment: why, how many, how long, how good."""
    for env_id, fates in report.fates.items():
        trained, others = fates.get("trained", Tally()), left_out(fates)
        if not others.num:
            continue
        why = ", ".join(f"{fates[fate].num:,} {fate}" for fate in LEFT_OUT if fate in fates and fates[fate].num)
        against = trained.means()
        pairs = "; ".join(f"{name.removesuffix('_mean')} {value:.3f}, trained {against.get(name, math.nan):.3f}" for name, value in others.means().items())
        share = f"{others.num / (others.num + trained.num):.1%}".replace("%", " %")
        yield f"left out     {env_id}: {others.num:,} of {others.num + trained.num:,} ({share}): {why}; means of {pairs}"
    if not any(left_out(fates).num for fates in report.fates.values()):
        yield "left out     nothing: every finished trajectory that was decided on is trained"


def _evaluations(report: AuditReport) -> str:
    """``4 = 3 done + 1 skipped; 24 groups = 24 done; 96 trajectories``."""
    states = " + ".join(f"{count:,} {state}" for state, count in report.evaluations.items())
    groups = " + ".join(f"{count:,} {state}" for state, count in report.evaluation_groups.items()) or "0"
    counts = f"{sum(report.evaluations.values()):,} = {states}; {_plural(sum(report.evaluation_groups.values()), 'group')} = {groups}"
    return f"{counts}; {_plural(report.num_evaluated, 'trajectory', 'trajectories')}"


def _failed(report: AuditReport) -> str:
    """``failed 12 (env 10, infra 2)``, what was played again and what was not played at all; empty where there is nothing of it."""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in report.failures.items())
    parts = [f"failed {sum(report.failures.values()):,} ({reasons})"] if reasons else []
    if report.repeated:
        again = ", ".join(f"{reason} {count:,}" for reason, count in report.repeated.items())
        parts.append(f"{_plural(sum(report.repeated.values()), 'failed attempt')} played again ({again})")
    if report.num_unplayed:
        parts.append(f"{_plural(report.num_unplayed, 'member')} not played before the deadline of their group")
    return ", ".join(parts)


def _skips(rows: Sequence[Row]) -> str:
    """``3 steps skipped (nothing to train on)``; empty where there was none."""
    causes = {"nothing to train on": 0, "gradient not finite": 0}
    before = 0
    for row in rows:
        skipped = int(row.get("optim/skipped_steps") or 0)
        causes["gradient not finite" if row.get("train/tokens") else "nothing to train on"] += max(0, skipped - before)
        before = skipped
    found = {cause: num for cause, num in causes.items() if num}
    why = ", ".join(found) if len(found) == 1 else ", ".join(f"{num:,} {cause}" for cause, num in found.items())
    return f"{_plural(sum(found.values()), 'step')} skipped ({why})" if found else ""


def _ended(report: AuditReport) -> str:
    """How the episodes that did not fail ended, in per cent."""
    played = sum(report.endings.values())
    shares = ((reason, report.endings.get(reason, 0) / played) for reason in ("terminated", "turns", "length", "time"))
    return ", ".join(f"{reason} {share:.1%}".replace("%", " %") for reason, share in shares)


def _books(report: AuditReport) -> str:
    states = " + ".join(f"{count:,} {state}" for state, count in report.counts.items())
    return f"{'close' if report.closes else 'DO NOT CLOSE'}: {report.num_leased:,} groups leased = {states}"


def _is_complete(run: Run, rows: Sequence[Row], report: AuditReport | None) -> bool:
    """Whether nothing is left to do: a stop that came then came too late to stop anything."""
    last = run.config.learner.versions
    kept = (run.checkpoints_folder / f"v{last:06d}").is_dir()
    return kept and int(rows[-1]["version"]) == last and report is not None and not report.evaluations.get("open", 0)


def _next_commands(run: Run, ending: Ending, picture: Path, *, complete: bool) -> Iterator[tuple[str, str]]:
    folder = os.path.relpath(run.folder)
    yield "picture", os.path.relpath(picture)
    yield "close the books", f"{_runnable('rollstream')} audit {folder}"
    yield "all the numbers", f"{_runnable('tensorboard')} --logdir {folder}/tensorboard"
    if ending.exit_code != 0 and not complete:
        yield "go on", _go_on(ending)
    else:
        yield "your own task", 'README.md, "Your own environment, tonight"'


def _go_on(ending: Ending) -> str:
    return shlex.join([_runnable("rollstream"), *ending.arguments, "--resume"])


def _runnable(name: str) -> str:
    """How this shell can start a command of the environment we run in: by name where that finds it, else by path."""
    here = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    return name if found is not None and Path(found).resolve() == here.resolve() else os.path.relpath(here)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _plural(count: int, word: str, words: str = "") -> str:
    return f"{count:,} {word if count == 1 else words or word + 's'}"


# --- plots --------------------------------------------------------------------------------------------------------------------------


def terminal_plot(rows: Sequence[Row], *, width: int, height: int) -> list[Text]:
    """Success and reward over versions (means of five) in braille characters, two by four dots each, with axes and a legend."""
    curves = {name: values for name, metric in (("success", "train/success"), ("reward", "train/reward_mean")) if (values := smoothed(rows, metric))}
    if not curves:
        return []
    low = min(0.0, *(min(values) for values in curves.values()))
    high = max(1.0, *(max(values) for values in curves.values()))
    columns = width - 8
    grids = [_braille(values, low, high, columns, height) for values in curves.values()]
    lines: list[Text] = []
    for index in range(height):
        level = high - (high - low) * index / (height - 1)
        line = Text(f"{level:6.2f} ┤" if index % 3 == 0 or index == height - 1 else "       │", style="dim")
        for column in range(columns):
            cells = [grid[index][column] for grid in grids]
            owner = next((number for number, cell in enumerate(cells) if cell), 0)
            line.append(chr(0x2800 + _union(cells)) if any(cells) else " ", style=_COLOURS[owner])
        lines.append(line)
    first, last = str(rows[0]["version"]), str(rows[-1]["version"])
    lines.append(Text("       └" + "─" * columns, style="dim"))
    legend = Text(f"        {first}")
    for number, name in enumerate(curves):
        legend.append(f"   ━ {name}", style=_COLOURS[number])
    label = f"   by version, mean of {SMOOTH}"
    legend.append(label, style="dim")
    legend.append(last.rjust(max(1, width - len(legend.plain))))
    return [*lines, legend]


def _braille(values: Sequence[float], low: float, high: float, columns: int, height: int) -> list[list[int]]:
    """One curve as bit patterns of braille cells, ``[height][columns]``; neighbouring points are joined by vertical strokes."""
    grid = [[0] * columns for _ in range(height)]
    num_dots, previous = columns * 2, None
    for x in range(num_dots):
        value = values[min(len(values) - 1, x * len(values) // num_dots)]
        y = round((high - value) / ((high - low) or 1.0) * (height * 4 - 1))
        start = y if previous is None else previous
        for dot in range(min(start, y), max(start, y) + 1):
            grid[dot // 4][x // 2] |= _DOTS[dot % 4][x % 2]
        previous = y
    return grid


def _union(cells: Sequence[int]) -> int:
    bits = 0
    for cell in cells:
        bits |= cell
    return bits


def draw_png(run: Run, rows: Sequence[Row]) -> Path:
    """Writes ``rewards.png``: success and reward, and below them the lag that was trained. Returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    evaluated = sorted((row for row in read_rows(run.evaluations_path) if row["state"] == "done"), key=lambda row: row["version"])
    for name, metric, colour in (("success", "train/success", "tab:green"), ("reward", "train/reward_mean", "tab:blue")):
        scored = [row for row in evaluated if row.get(metric.replace("train/", "eval/")) is not None]
        values = [float(row[metric.replace("train/", "eval/")]) for row in scored]
        if scored:
            upper.plot([int(row["version"]) for row in scored], values, "o--", color=colour, markersize=5, linewidth=0.8, label=f"{name}, evaluated")
        held = [row for row in rows if row.get(metric) is not None]
        versions = [int(row["version"]) for row in held]
        upper.plot(versions, [float(row[metric]) for row in held], color=colour, alpha=0.25, linewidth=0.8)
        upper.plot(versions, smoothed(held, metric), color=colour, linewidth=2, label=f"{name} (mean of {SMOOTH} versions)")
    row = passed_at(rows)
    if row is not None:
        upper.axhline(THRESHOLD, color="grey", linestyle=":", linewidth=1)
        upper.axvline(int(row["version"]), color="grey", linestyle=":", linewidth=1)
        upper.annotate(f"success ≥ {THRESHOLD} at {row['version']}", (int(row["version"]), THRESHOLD), (6, -14), textcoords="offset points", color="grey")
    upper.set_ylabel("success, reward")
    upper.legend(loc="lower right", frameon=False)
    upper.set_title(f"{run.config.name}: {', '.join(env.id for env in run.config.envs)}, seed {run.config.seed}")
    for name, metric, colour in (("max", "train/lag_max", "tab:red"), ("mean", "train/lag_mean", "tab:orange")):
        held = [row for row in rows if row.get(metric) is not None]
        lower.plot([int(row["version"]) for row in held], [float(row[metric]) for row in held], color=colour, linewidth=1, label=f"lag, {name}")
    lower.axhline(run.config.buffer.max_lag, color="black", linestyle="--", linewidth=1, label=f"max_lag {run.config.buffer.max_lag}")
    lower.set_ylabel("lag (versions)")
    lower.set_xlabel("policy version")
    lower.set_ylim(0, run.config.buffer.max_lag + 1)
    lower.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=3, frameon=False, fontsize="small")
    for axes in (upper, lower):
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    path = run.folder / "rewards.png"
    figure.savefig(path)
    return path
