"""The live terminal view of a run, and one plain line now and then where the output is no terminal.

Drawn from what the roles already tell: the buffer's :class:`StatusReply` and the rows of ``metrics.jsonl``. It only reads, and draws twice a second
at most, so that watching costs next to nothing.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from .buffer.wire import PeerStatus, StatusReply
from .configs.run_folder import Run
from .evaluation_lines import line_of
from .tail import LogTail, MetricsTail, Row, clock, smoothed

SPARKS = "▁▂▃▄▅▆▇█"
PLAIN_EVERY_S = 5.0
"""Seconds between two plain lines."""
WARNING_CHARACTERS = 160
"""Of the last warning that are shown."""
RATE_WINDOW_S = 5.0
"""Seconds over which tokens per second are taken."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One role process as the supervisor knows it. ``state`` is a word: placing, starting, running, restarting, ended."""

    name: str
    state: str
    num_restarts: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one drawing needs. ``status`` is None while the buffer does not answer; ``phase`` names what the run does: running, stopping.

    ``learner_said`` is the learner's last line; ``warnings`` how many warnings the logs hold, and the last one behind the log it is in. The view fills both in.
    """

    run: Run
    elapsed_s: float
    phase: str
    status: StatusReply | None
    processes: Sequence[ProcessState]
    notices: Sequence[str] = ()
    learner_said: str = ""
    warnings: tuple[int, str] = (0, "")


def sparkline(values: Sequence[float], *, low: float, high: float, width: int) -> str:
    """``values`` as ``width`` block characters between ``low`` and ``high``: each character is the mean of its share of them."""
    if not values:
        return ""
    width = min(width, len(values))
    shares = [values[len(values) * index // width : len(values) * (index + 1) // width] for index in range(width)]
    span = (high - low) or 1.0
    levels = [min(1.0, max(0.0, (sum(share) / len(share) - low) / span)) for share in shares]
    return "".join(SPARKS[round(level * (len(SPARKS) - 1))] for level in levels)


@dataclass(slots=True)
class Rates:
    """Tokens per second of each peer, from the growth of its counter over the last seconds."""

    _seen: dict[str, deque[tuple[float, float]]] = field(default_factory=dict[str, "deque[tuple[float, float]]"])

    def update(self, now: float, peer: PeerStatus) -> float:
        """Takes in a reading; returns the rate. A counter that fell belongs to a process started anew; one not told yet (a new buffer) is no reading."""
        tokens = peer.counters.get("tokens")
        seen = self._seen.setdefault(peer.peer_id, deque())
        if tokens is None:
            return 0.0
        if seen and tokens < seen[-1][1]:
            seen.clear()
        seen.append((now, tokens))
        while len(seen) > 2 and now - seen[1][0] >= RATE_WINDOW_S:
            seen.popleft()
        passed = seen[-1][0] - seen[0][0]
        return (seen[-1][1] - seen[0][1]) / passed if passed > 0 else 0.0


class Screen(Console):
    """A console whose reader may leave (``rollstream train ... | head``): it falls silent and the run goes on."""

    def on_broken_pipe(self) -> None:
        """Keeps quiet from now on, where rich would end the process."""
        self.quiet = True
        if self.file is sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class View:
    """Shows snapshots: a live panel on a terminal, plain lines elsewhere, nothing with ``quiet``. A context manager.

    A terminal that goes away silences the view and never touches the run.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._live: Live | None = None
        self._tail: MetricsTail | None = None
        self._logs: LogTail | None = None
        self._rates = Rates()
        self._last_plain = float("-inf")
        self._last_line = ""
        self._num_notices = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            try:
                live.stop()
            except OSError:
                self._quiet = True

    def show(self, snapshot: Snapshot) -> None:
        """Draws ``snapshot``."""
        if self._quiet:
            return
        if self._tail is None or self._logs is None:
            self._tail, self._logs = MetricsTail(snapshot.run.metrics_path), LogTail(snapshot.run.logs_folder)
        rows, logs = self._tail.read(), self._logs.read()
        snapshot = replace(snapshot, learner_said=logs.learner_said, warnings=(logs.num_warnings, logs.last_warning))
        now = time.monotonic()
        actors = [peer for peer in snapshot.status.peers if peer.role == "actor"] if snapshot.status is not None else []
        rates = {peer.peer_id: self._rates.update(now, peer) for peer in actors}
        try:
            self._tell_notices(snapshot)
            if self._live is not None:
                self._live.update(panel(snapshot, rows, rates, width=self._console.width), refresh=True)
            elif now - self._last_plain >= PLAIN_EVERY_S:
                self._last_plain = now
                self._print_plain(plain_line(snapshot, rows, rates))
        except OSError:
            self._quiet = True

    def _tell_notices(self, snapshot: Snapshot) -> None:
        """On a terminal notices stay above the panel and in the scrollback; elsewhere they are lines like any other."""
        for notice in snapshot.notices[self._num_notices :]:
            self._console.print(Text(f"{clock(snapshot.elapsed_s)}  {notice}", style="yellow"), soft_wrap=True)
        self._num_notices = len(snapshot.notices)

    def _print_plain(self, line: str) -> None:
        if line.partition("  ")[2] != self._last_line.partition("  ")[2]:
            self._console.print(line, soft_wrap=True, markup=False)
            self._last_line = line


# --- drawing ------------------------------------------------------------------------------------------------------------------------


def plain_line(snapshot: Snapshot, rows: Sequence[Row], rates: Mapping[str, float]) -> str:
    """The state of the run as one line."""
    total = snapshot.run.config.learner.versions
    parts = [f"{clock(snapshot.elapsed_s)}  version {_version(snapshot, rows)}/{total}{_lineage(snapshot)}"]
    for label, name in (("reward", "train/reward_mean"), ("success", "train/success")):
        if values := smoothed(rows, name):
            parts.append(f"{label} {values[-1]:.3f}")
    if rows:
        row = rows[-1]
        parts.append(f"lag {_number(row, 'train/lag_mean', '.1f')}/{_number(row, 'train/lag_max', '.0f')}")
        parts.append(f"{_actor_rate(rates, row):,.0f} tok/s sampled, {float(row.get('learner/tokens_per_s') or 0):,.0f} trained")
    if snapshot.status is not None:
        groups = snapshot.status.groups
        parts.append(" ".join(f"{state} {groups.get(state, 0):,}" for state in ("open", "ready", "assigned", "dropped")))
    if not rows:
        parts.append(f"learner: {preparing(snapshot)}")
    if snapshot.status is not None and (told := line_of(snapshot.status.evaluations)):
        parts.append(f"evaluated {told}")
    if snapshot.warnings[0]:
        parts.append(f"warnings {_warnings(snapshot)}")
    waiting = waits(snapshot)
    return "  ".join(parts) + (f"  [{waiting}]" if waiting else "")


def waits(snapshot: Snapshot) -> str:
    """Who waits for whom, in words; empty where nobody does."""
    if snapshot.phase != "running":
        return snapshot.phase
    if snapshot.status is None:
        return "the buffer has not answered yet"
    found = [snapshot.status.holds_for] if snapshot.status.holds_for else []
    found += [f"learner waits for {snapshot.status.learner_waits_for}"] if snapshot.status.learner_waits_for else []
    found += [f"{peer.peer_id} waits for {peer.waiting_for}" for peer in snapshot.status.peers if peer.waiting_for and peer.role == "actor"]
    return "; ".join(found)


def preparing(snapshot: Snapshot) -> str:
    """What the learner does before the first version, in words."""
    warmup = re.match(r"warmup_step=(\d+)/(\d+)", snapshot.learner_said)
    if warmup is not None and warmup[1] != warmup[2]:
        return f"in warm-up, step {warmup[1]} of {warmup[2]}"
    return "starts, loading PyTorch" if snapshot.learner_said.startswith("event=started") or not snapshot.learner_said else "is ready"


def panel(snapshot: Snapshot, rows: Sequence[Row], rates: Mapping[str, float], *, width: int) -> RenderableType:
    """The live panel, at most ``width`` columns wide. One text, not nested tables: those cost five times as much to draw."""
    width = min(width, 110)
    lines = [_headline(snapshot, rows, width), *_numbers(snapshot, rows, rates, width), Text(), *_processes(snapshot, rates)]
    keys = "Ctrl-C stops cleanly, twice at once" if snapshot.phase == "running" else "Ctrl-C again ends it at once"
    title = f"[bold]rollstream[/bold]  {snapshot.run.config.name}  {clock(snapshot.elapsed_s)}"
    body = Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
    return Panel(body, title=title, title_align="left", subtitle=keys, subtitle_align="right", border_style="cyan", width=width)


def _headline(snapshot: Snapshot, rows: Sequence[Row], width: int) -> Text:
    done, total = _version(snapshot, rows), snapshot.run.config.learner.versions
    columns = max(8, min(50, width - 50))
    filled = min(columns, round(columns * done / total))
    line = Text(f"version {done}/{total}{_lineage(snapshot)}  ", style="bold")
    line.append("━" * filled, style="green").append("━" * (columns - filled), style="bright_black")
    return line.append(f"  {done / total:.0%}  {_eta(rows, done, total)}", style="not bold")


def _numbers(snapshot: Snapshot, rows: Sequence[Row], rates: Mapping[str, float], width: int) -> Iterator[Text]:
    row: Row = rows[-1] if rows else {}
    columns = max(8, min(60, width - 32))
    for name, low, high in (("train/success", 0.0, 1.0), ("train/reward_mean", None, None)):
        yield _trend(name, smoothed(rows, name), columns, low, high)
    bound = snapshot.run.config.buffer.max_lag
    lag = f"mean {_number(row, 'train/lag_mean', '.1f')}   max {_number(row, 'train/lag_max', '.0f')} of {bound} allowed"
    yield _line("lag", f"{lag}   dropped for age {_number(row, 'train/age_drops', '.0f')}")
    step = f"{_number(row, 'time/step_s', '.2f')} s a version, {_number(row, 'time/wait_batch_s', '.2f')} s of it waiting"
    yield _line("tokens/s", f"sampled {_actor_rate(rates, row):,.0f}   trained {_number(row, 'learner/tokens_per_s', ',.0f')}   {step}")
    groups = snapshot.status.groups if snapshot.status is not None else {}
    yield _line("groups", "   ".join(f"{state} {groups.get(state, 0):,}" for state in ("open", "ready", "assigned", "trained", "dropped")))
    if snapshot.status is not None and snapshot.status.evaluations:
        yield _line("evaluated", line_of(snapshot.status.evaluations))
    yield _line("waiting", waits(snapshot) or "nobody")
    if not rows:
        yield _line("learner", preparing(snapshot))
    if snapshot.warnings[0]:
        yield _line("warnings", _warnings(snapshot), style="yellow")


def _warnings(snapshot: Snapshot) -> str:
    """How many there were, and the last one: which alarm it was, and which log has it."""
    num, last = snapshot.warnings
    return f"{num}, last in {textwrap.shorten(last, WARNING_CHARACTERS, placeholder=' …')}"


def _line(label: str, value: str, *, style: str = "") -> Text:
    return Text(f"{label:<10}", style="dim").append(value, style=f"not dim {style}".strip())


def _processes(snapshot: Snapshot, rates: Mapping[str, float]) -> Iterator[Text]:
    peers = {peer.peer_id: peer for peer in snapshot.status.peers} if snapshot.status is not None else {}
    names = [process.name for process in snapshot.processes] + list(peers)
    width = max(map(len, names), default=0) + 2
    yield Text(f"{'role':<{width}}{'state':<12}{'episodes':>10}{'running':>9}{'tokens/s':>10}{'version':>9}{'restarts':>10}", style="dim")
    for process in snapshot.processes:
        style = {"running": "green", "starting": "cyan", "restarting": "yellow"}.get(process.state, "dim")
        cells = _peer_cells(peers.pop(process.name, None), rates)
        yield Text(f"{process.name:<{width}}").append(f"{process.state:<12}", style=style).append(f"{cells}{process.num_restarts or '–':>10}")
    for peer in peers.values():
        if peer.role in ("actor", "evaluator"):
            yield Text(f"{peer.peer_id:<{width}}").append(f"{'joined':<12}", style="cyan").append(f"{_peer_cells(peer, rates)}{'–':>10}")


def _peer_cells(peer: PeerStatus | None, rates: Mapping[str, float]) -> str:
    if peer is None or peer.role not in ("actor", "evaluator"):
        return " " * 38
    episodes, running, version = peer.counters.get("episodes", 0), peer.gauges.get("running", 0), peer.gauges.get("version", -1)
    return f"{episodes:>10,.0f}{running:>9,.0f}{rates.get(peer.peer_id, 0):>10,.0f}{f'{version:.0f}' if version >= 0 else '–':>9}"


def _trend(name: str, values: Sequence[float], width: int, low: float | None, high: float | None) -> Text:
    """The newest value and the curve so far, between the bounds, or between its own where there are none."""
    label = "success" if name.endswith("success") else "reward"
    line = Text(f"{label:<10}", style="dim").append(f"{values[-1]:<8.3f}" if values else f"{'–':<8}", style="bold not dim")
    low, high = min(values, default=0.0) if low is None else low, max(values, default=1.0) if high is None else high
    return line.append(sparkline(values, low=low, high=high, width=width), style="green not dim")


def _lineage(snapshot: Snapshot) -> str:
    """Which lineage, once there was a fork."""
    lineage = snapshot.status.lineage if snapshot.status is not None else 0
    return f" of lineage {lineage}" if lineage else ""


def _version(snapshot: Snapshot, rows: Sequence[Row]) -> int:
    """Version the learner holds: the newer of the metrics and of what the buffer was told."""
    known = int(rows[-1]["version"]) if rows else 0
    return max(known, snapshot.status.version if snapshot.status is not None else 0)


def _eta(rows: Sequence[Row], done: int, total: int) -> str:
    """Time to the last version at the pace of the last 20."""
    recent = [float(row["time/wall_s"]) for row in rows[-21:] if row.get("time/wall_s") is not None]
    if len(recent) < 2 or done >= total or recent[-1] <= recent[0]:
        return ""
    return f"{clock((recent[-1] - recent[0]) / (len(recent) - 1) * (total - done))} left"


def _actor_rate(rates: Mapping[str, float], row: Row) -> float:
    return sum(rates.values()) or float(row.get("actors/tokens_per_s") or 0.0)


def _number(row: Row, name: str, style: str) -> str:
    value = row.get(name)
    return "–" if value is None else format(float(value), style)
