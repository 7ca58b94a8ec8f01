"""The summary of a run: first crossing, plots that can be read, a picture on disk."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.summary import Ending, draw_png, passed_at, print_summary, terminal_plot
from rollstream.tail import last_version, read_rows


def learning(num: int = 200, middle: int = 90) -> list[dict[str, Any]]:
    values = [1 / (1 + math.exp(-(version - middle) / 12)) for version in range(1, num + 1)]
    return [
        {"version": version, "train/success": value, "train/reward_mean": 1.3 * value - 0.1, "train/lag_max": 1 + version % 4, "train/lag_mean": 1.5}
        for version, value in enumerate(values, start=1)
    ]


def test_success_counts_as_passed_only_when_the_mean_of_five_versions_holds() -> None:
    rows = [{"version": version, "train/success": 1.0 if version in (2, 3) or version > 10 else 0.0} for version in range(1, 30)]
    found = passed_at(rows)
    assert found is not None
    assert found["version"] == 15
    assert passed_at(rows[:9]) is None
    assert passed_at([]) is None
    assert passed_at(rows[10:13]) is None


def test_a_cut_last_line_of_the_metrics_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    assert last_version(path) == 0
    path.write_text(json.dumps({"version": 1}) + "\n" + '{"version": 2, "tr')
    assert read_rows(path) == [{"version": 1}]
    assert last_version(path) == 1


def dots_of_column(lines: list[str], column: int) -> list[int]:
    return [index for index, line in enumerate(lines) if 0x2800 < ord(line[column]) <= 0x28FF]


def test_the_terminal_plot_climbs_from_the_bottom_left_to_the_top_right() -> None:
    lines = [line.plain for line in terminal_plot(learning(), width=80, height=10)]
    assert len(lines) == 12
    assert all(len(line) <= 80 for line in lines)
    grid = lines[:10]
    assert max(dots_of_column(grid, 8)) == 9
    assert min(dots_of_column(grid, 79)) == 0
    assert "1.20" in lines[0] or "1.2" in lines[0] or float(lines[0].split()[0]) == pytest.approx(1.2, abs=0.01)
    assert "success" in lines[-1]
    assert "reward" in lines[-1]
    assert lines[-1].rstrip().endswith("200")


@pytest.mark.parametrize("num", [1, 2, 7])
def test_a_run_of_few_versions_can_be_plotted(num: int) -> None:
    lines = terminal_plot(learning(num), width=60, height=8)
    assert len(lines) == 10


def test_a_run_whose_environment_reports_no_success_still_plots_its_reward() -> None:
    rows = [{"version": version, "train/reward_mean": -2.0 + version / 10} for version in range(1, 30)]
    lines = [line.plain for line in terminal_plot(rows, width=60, height=8)]
    assert "success" not in lines[-1]
    assert float(lines[7].split()[0]) == pytest.approx(-1.9)
    assert terminal_plot([{"version": 1}], width=60, height=8) == []


def test_the_picture_is_a_png_in_the_run_folder(tmp_path: Path) -> None:
    run = Run(folder=tmp_path, config=load_config("quickstart"), run_id="a" * 32)
    path = draw_png(run, learning())
    assert path == tmp_path / "rewards.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_png(run, [{"version": 1}]).is_file()


@pytest.mark.parametrize("lost", [0, 3])
def test_rows_of_metrics_that_were_lost_are_told(lost: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(folder=tmp_path, config=load_config("quickstart"), run_id="a" * 32)
    rows = [row for row in learning(20) if not 5 <= row["version"] < 5 + lost]
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_summary(run, Ending(exit_code=0, wall_s=1.0, cpu_s={}, num_restarts=0, arguments=()), Console(width=100))
    assert ("metrics.jsonl lacks the rows of 3 versions" in capsys.readouterr().out) == (lost == 3)


def test_skipped_steps_are_told_with_their_cause(tmp_path: Path) -> None:
    def told(*rows: dict[str, Any]) -> list[str]:
        run = Run(folder=tmp_path, config=load_config("quickstart"), run_id="a" * 32)
        out = io.StringIO()
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"version": place, **row}) + "\n" for place, row in enumerate(rows, start=1)))
        print_summary(run, Ending(0, 1.0, {}, 0, ("train", "quickstart")), Console(file=out, width=120))
        return [line for line in out.getvalue().splitlines() if line.startswith("steps ")]

    nothing, spoilt, fine = ({"train/tokens": tokens} for tokens in (0, 9, 9))
    assert told(fine | {"optim/skipped_steps": 0}) == []
    (line,) = told(nothing | {"optim/skipped_steps": 1}, fine | {"optim/skipped_steps": 1}, nothing | {"optim/skipped_steps": 2})
    assert line.split("steps ", 1)[1].strip() == "2 steps skipped (nothing to train on)"
    (line,) = told(nothing | {"optim/skipped_steps": 1}, spoilt | {"optim/skipped_steps": 2})
    assert line.endswith("2 steps skipped (1 nothing to train on, 1 gradient not finite)")


def test_the_newest_warning_of_any_role_is_told_with_the_log_it_is_in(tmp_path: Path) -> None:
    run = Run(folder=tmp_path, config=load_config("quickstart"), run_id="a" * 32)
    run.logs_folder.mkdir()
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in learning(20)))

    def told(**logs: str) -> list[str]:
        for name, text in logs.items():
            (run.logs_folder / f"{name}.log").write_text(text)
        out = io.StringIO()
        print_summary(run, Ending(0, 1.0, {}, 0, ()), Console(file=out, width=120))
        return [line for line in out.getvalue().splitlines() if line.startswith("warnings ")]

    def line(second: int, level: str, message: str) -> str:
        return f"ts=2026-01-01T00:00:{second:02}.000Z level={level} role=x logger=y {message}\n"

    assert told(learner=line(1, "info", "fine") + "Traceback\n") == []
    (shown,) = told(
        buffer=line(1, "info", "a") + line(9, "warning", "event=disk_full " + 50 * "word ") + line(10, "info", "b"), actor=line(3, "error", "event=c")
    )
    assert " 2, the last in logs/buffer.log: event=disk_full word" in shown
    assert shown.endswith("…")
