"""The live view: what it reads, what it says, and that it never gets in the way."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollstream.buffer.wire import PeerStatus, StatusReply
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.tail import MAX_ROWS, LogTail, MetricsTail, smoothed
from rollstream.watch import ProcessState, Rates, Screen, Snapshot, View, panel, plain_line, sparkline, waits


def run_in(folder: Path) -> Run:
    (folder / "logs").mkdir(exist_ok=True)
    return Run(folder=folder, config=load_config("quickstart", ["learner.versions=100"]), run_id="a" * 32)


def peer(name: str, tokens: float = 0.0, *, waiting_for: str = "") -> PeerStatus:
    return PeerStatus(
        role="actor",
        peer_id=name,
        silent_s=0.1,
        counters={"tokens": tokens, "episodes": 1234},
        gauges={"running": 96, "version": 41},
        waiting_for=waiting_for,
        num_leases=12,
    )


def reply(*peers: PeerStatus, learner_waits_for: str = "") -> StatusReply:
    groups = {"open": 18, "ready": 3, "assigned": 12, "trained": 504, "dropped": 2}
    return StatusReply(lineage=0, version=42, groups=groups, counters={}, peers=list(peers), learner_waits_for=learner_waits_for)


def row(version: int, **values: float) -> dict[str, Any]:
    known = {"train/reward_mean": 0.8, "train/success": 0.5, "train/lag_max": 3, "train/lag_mean": 1.5, "train/age_drops": 0, "time/wall_s": version * 0.5}
    return {"version": version, **known, "learner/tokens_per_s": 9000.0, "time/step_s": 0.5, "time/wait_batch_s": 0.1, **values}


def snapshot(run: Run, status: StatusReply | None, **changes: Any) -> Snapshot:
    processes = [ProcessState("buffer", "running"), ProcessState("learner", "running"), ProcessState("actor-0", "restarting", 2)]
    values: dict[str, Any] = {"run": run, "elapsed_s": 83.0, "phase": "running", "status": status, "processes": processes}
    return Snapshot(**(values | changes))


def drawn(renderable: Any, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def append(path: Path, rows: Sequence[dict[str, Any]], *, tail: str = "") -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(item) + "\n" for item in rows) + tail)


def test_rows_arrive_once_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert list(tail.read()) == []
    append(path, [row(1)], tail='{"version": 2, "train/success"')
    assert [item["version"] for item in tail.read()] == [1]
    append(path, [], tail=": 0.25}\n")
    assert [item["version"] for item in tail.read()] == [1, 2]
    assert tail.read()[-1]["train/success"] == 0.25


def test_a_resumed_run_whose_metrics_were_cut_shows_each_version_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, [row(version) for version in range(1, 9)])
    tail = MetricsTail(path)
    tail.read()
    fresh = tmp_path / "fresh"
    append(fresh, [row(version) for version in range(1, 5)])
    fresh.replace(path)
    append(path, [row(5, **{"train/success": 0.75})])
    rows = tail.read()
    assert [item["version"] for item in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["train/success"] == 0.75


def test_a_version_that_is_done_again_replaces_its_first_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, [row(1), row(2), row(3), row(2, **{"train/success": 1.0})])
    rows = MetricsTail(path).read()
    assert [item["version"] for item in rows] == [1, 2]
    assert rows[-1]["train/success"] == 1.0


def test_a_long_run_is_thinned_out_and_keeps_its_first_and_newest_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, [row(version) for version in range(1, 3 * MAX_ROWS)])
    tail = MetricsTail(path)
    for _ in range(4):
        rows = tail.read()
    assert len(rows) <= 2 * MAX_ROWS
    assert rows[0]["version"] == 1
    assert [item["version"] for item in rows[-3:]] == [3 * MAX_ROWS - 3, 3 * MAX_ROWS - 2, 3 * MAX_ROWS - 1]


def test_logs_are_followed_from_now_on_with_the_learners_last_word_and_the_warnings(tmp_path: Path) -> None:
    def line(level: str, role: str, message: str) -> str:
        return f"ts=2026-01-31T12:00:00.000Z level={level} role={role} logger=rollstream.x {message}\n"

    learner, actor = tmp_path / "learner.log", tmp_path / "actor-0.log"
    learner.write_text(line("warning", "learner", "event=old"))
    tail = LogTail(tmp_path)
    assert (tail.read().num_warnings, tail.learner_said) == (0, "")
    with learner.open("a") as file:
        file.write(line("info", "learner", "warmup_step=25/150") + "Traceback of something\n" + line("info", "learner", "warm")[:-3])
    actor.write_text(line("warning", "actor-0", "reason=slow") + line("error", "actor-0", "reason=gone"))
    tail.read()
    assert tail.learner_said == "warmup_step=25/150"
    assert (tail.num_warnings, tail.last_warning) == (2, "logs/actor-0.log: reason=gone")


def test_before_the_first_version_the_panel_tells_what_the_learner_does(tmp_path: Path) -> None:
    text = drawn(panel(snapshot(run_in(tmp_path), None, learner_said="warmup_step=25/150", warnings=(2, "logs/actor-0.log: reason=gone")), [], {}, width=100))
    assert "in warm-up, step 25 of 150" in text
    assert "2, last in logs/actor-0.log: reason=gone" in text


def test_smoothing_is_the_trailing_mean_of_five_and_skips_what_is_missing() -> None:
    rows = [{"version": 1, "a": 0.0}, {"version": 2}, *({"version": 3 + index, "a": 1.0} for index in range(5))]
    assert smoothed(rows, "a") == pytest.approx([0.0, 0.5, 2 / 3, 0.75, 0.8, 1.0])


def test_a_sparkline_spans_its_bounds_and_keeps_its_width() -> None:
    assert sparkline([], low=0, high=1, width=5) == ""
    assert sparkline([0.0, 1.0], low=0, high=1, width=5) == "▁█"
    assert sparkline([index / 99 for index in range(100)], low=0, high=1, width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0], low=3.0, high=3.0, width=2) == "▁▁"


def test_rates_follow_the_counter_and_start_anew_with_a_new_process() -> None:
    rates = Rates()
    assert rates.update(0.0, peer("actor-0", 0)) == 0
    assert rates.update(1.0, peer("actor-0", 500)) == 500
    assert rates.update(2.0, peer("actor-0", 1500)) == 750
    assert rates.update(2.5, peer("actor-0", 10)) == 0
    assert rates.update(3.5, peer("actor-0", 110)) == 100


def test_the_panel_tells_progress_lag_speed_groups_and_every_process(tmp_path: Path) -> None:
    status = reply(peer("actor-0", waiting_for="leases"), learner_waits_for="group 17 at actor-0")
    rows = [row(version, **{"train/success": version / 50}) for version in range(1, 43)]
    text = drawn(panel(snapshot(run_in(tmp_path), status), rows, {"actor-0": 5210.0}, width=100))
    for word in (
        "version 42/100",
        "42%",
        "0:29 left",
        "mean 1.5",
        "max 3 of 4",
        "5,210",
        "9,000",
        "open 18",
        "ready 3",
        "assigned 12",
        "trained 504",
        "dropped 2",
    ):
        assert word in text, word
    assert "learner waits for group 17 at actor-0" in text
    assert "restarting" in text
    assert "Ctrl-C stops cleanly" in text


def test_the_panel_fits_a_narrow_terminal_and_a_run_without_any_number(tmp_path: Path) -> None:
    text = drawn(panel(snapshot(run_in(tmp_path), None), [], {}, width=60), width=60)
    assert max(len(line) for line in text.splitlines()) <= 60
    assert "version 0/100" in text
    assert "the buffer has not answered yet" in text


def test_an_actor_started_by_hand_has_its_line(tmp_path: Path) -> None:
    text = drawn(panel(snapshot(run_in(tmp_path), reply(peer("actor-0"), peer("actor-extra"))), [row(42)], {}, width=100))
    assert "actor-extra" in text
    assert "joined" in text


def test_nobody_waits_while_all_are_busy(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert waits(snapshot(run, reply(peer("actor-0")))) == ""
    assert waits(snapshot(run, reply(peer("actor-0")), phase="stopping")) == "stopping"


def test_the_plain_line_says_it_all_in_one_line(tmp_path: Path) -> None:
    line = plain_line(snapshot(run_in(tmp_path), reply(peer("actor-0"))), [row(42)], {"actor-0": 5210.0})
    assert "\n" not in line
    for word in ("1:23", "version 42/100", "reward 0.800", "success 0.500", "lag 1.5/3", "5,210 tok/s sampled", "9,000 trained", "open 18"):
        assert word in line, word


def test_a_pipe_gets_plain_lines_and_notices_without_colour(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    append(run.metrics_path, [row(7)])
    out = io.StringIO()
    with View(Console(file=out, highlight=False)) as view:
        view.show(snapshot(run, reply(peer("actor-0")), notices=("actor-0 died: killed",)))
        view.show(snapshot(run, reply(peer("actor-0")), notices=("actor-0 died: killed",)))
    lines = out.getvalue().splitlines()
    assert lines[0].partition("  ")[2] == "actor-0 died: killed"
    assert len(lines) == 2
    assert "version 42/100" in lines[1]
    assert "\x1b" not in out.getvalue()


def test_a_quiet_view_prints_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    with View(Console(file=out), quiet=True) as view:
        view.show(snapshot(run_in(tmp_path), reply()))
    assert out.getvalue() == ""


def test_a_reader_that_left_silences_the_view_and_does_not_end_the_run(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "w") as closed:  # closing tells of the broken pipe once more
        screen = Screen(file=closed)
        with View(screen) as view:
            for notices in (("one",), ("one", "two")):
                view.show(snapshot(run_in(tmp_path), reply(), notices=notices))
        screen.print("the summary")
    assert screen.quiet


class ClosedTerminal(io.StringIO):
    """A terminal whose window was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def isatty(self) -> bool:
        return False


def test_a_terminal_that_went_away_does_not_end_the_run(tmp_path: Path) -> None:
    view = View(Console(file=ClosedTerminal()))
    with view:
        view.show(snapshot(run_in(tmp_path), reply()))
        view.show(snapshot(run_in(tmp_path), reply()))
