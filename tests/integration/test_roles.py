"""When a dead role is started again and when it is not; how its end is told in one line."""

from __future__ import annotations

import json
import logging
import signal
import threading
from pathlib import Path

import pytest

from rollstream.configs.loader import create_run, load_config
from rollstream.configs.run_folder import Run
from rollstream.errors import ConfigError, DeadlineExceeded, EnvError, RollstreamError, describe
from rollstream.processes import Death, Role, RoleProcess, error_path, write_error
from rollstream.roles import root_cause, run_role
from rollstream.supervisor import MAX_RESTART_DELAY_S, RESTART_DELAY_S, Restarts


def death(
    message: str = "boom", *, kind: str = "WeightsError", families: tuple[str, ...] = ("WeightsError",), lived_s: float = 3.0, exit_code: int = 1
) -> Death:
    return Death("actor-0", exit_code, message, lived_s, kind, families, exit_code)


def killed(lived_s: float = 3.0) -> Death:
    return Death("actor-0", -signal.SIGKILL, "killed by signal 9 (SIGKILL)", lived_s)


def test_the_same_error_twice_in_a_row_ends_the_run() -> None:
    restarts = Restarts()
    assert restarts.refuse(death(), 10) is None
    restarts.plan(death(), 0.0)
    refusal = restarts.refuse(death(), 10)
    assert refusal is not None
    assert "boom" in refusal
    assert "twice" in refusal


def test_the_same_error_after_a_long_life_is_answered_with_a_restart() -> None:
    restarts = Restarts()
    restarts.plan(death(), 0.0)
    assert restarts.refuse(death(lived_s=120.0), 10) is None


def test_another_error_a_kill_and_a_silent_buffer_are_answered_with_a_restart() -> None:
    restarts = Restarts()
    restarts.plan(death("boom"), 0.0)
    assert restarts.refuse(death("bang"), 10) is None
    restarts.plan(killed(), 0.0)
    assert restarts.refuse(killed(), 10) is None
    silent = death("waited 10 s for the buffer", kind="DeadlineExceeded", families=tuple(base.__name__ for base in DeadlineExceeded.__mro__))
    restarts.plan(silent, 0.0)
    assert restarts.refuse(silent, 10) is None


def test_an_error_of_the_input_ends_the_run_at_once() -> None:
    assert Restarts().refuse(death(exit_code=2), 10) == "boom"


def test_environments_that_fail_too_often_end_the_run_at_once() -> None:
    assert Restarts().refuse(death("60 of the last 100 failed", kind="EnvError", families=("EnvError", "RollstreamError")), 10) == "60 of the last 100 failed"


def test_restarts_are_bounded_and_the_refusal_names_the_bound() -> None:
    restarts = Restarts()
    for _ in range(3):
        assert restarts.refuse(killed(), 3) is None
        restarts.plan(killed(), 0.0)
    refusal = restarts.refuse(killed(), 3)
    assert refusal is not None
    assert "launcher.max_restarts 3" in refusal


def test_delays_double_up_to_a_bound_and_start_anew_after_a_healthy_life() -> None:
    restarts = Restarts()
    delays = [restarts.plan(killed(), 0.0) for _ in range(10)]
    assert delays[:3] == [RESTART_DELAY_S, 2 * RESTART_DELAY_S, 4 * RESTART_DELAY_S]
    assert delays[-1] == MAX_RESTART_DELAY_S
    assert restarts.plan(killed(lived_s=3600.0), 100.0) == RESTART_DELAY_S
    assert restarts.due_at == 100.0 + RESTART_DELAY_S


def test_the_cause_inside_a_group_of_failed_tasks_is_our_own_error() -> None:
    ours = EnvError("its server is gone")
    group = ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("inner", [KeyError("y"), ours])])
    assert root_cause(group) is ours
    assert isinstance(root_cause(ExceptionGroup("tasks", [ValueError("x"), KeyError("y")])), ValueError)
    assert describe(ours) == "its server is gone"
    assert describe(ValueError("two\nlines")) == "ValueError: two lines"
    assert describe(KeyError()) == "KeyError"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(load_config("quickstart", [f"folder={tmp_path}"]), resume=False)


def wait_for_death(process: RoleProcess) -> Death:
    ended = threading.Event()
    for _ in range(600):
        found = process.poll()
        if found is not None:
            return found
        ended.wait(0.05)
    process.kill()
    raise AssertionError(f"{process.role.name} did not end")


def test_a_role_killed_by_a_signal_is_told_with_the_signals_name(run: Run) -> None:
    process = RoleProcess(run, Role("actor", "actor-0"))
    process.start()
    process.kill()
    found = wait_for_death(process)
    assert found.returncode == -signal.SIGKILL
    assert found.message == "killed by signal 9 (SIGKILL); out of memory?"
    assert process.pid is None
    assert process.poll() is None


def test_a_role_that_fails_hands_over_its_error_and_its_cpu_time(run: Run) -> None:
    broken = run.folder / "config.yaml"
    broken.write_text(broken.read_text().replace("imports: []", "imports: [nowhere.py]"))
    process = RoleProcess(run, Role("actor", "actor-0"))
    process.start()
    found = wait_for_death(process)
    assert (found.kind, found.exit_code, found.needs_other_input) == ("ConfigError", 2, True)
    assert "nowhere.py" in found.message
    assert str(found.error()) == f"actor-0: {found.message}"
    assert process.cpu_s > 0.05
    log = process.log_path.read_text()
    assert "level=critical role=actor-0" in log
    assert "Traceback" in log
    process.start()
    assert not (run.logs_folder / "actor-0.error.json").exists()
    process.kill()
    wait_for_death(process)


def test_a_role_that_dies_before_it_can_record_anything_is_told_by_the_last_line_of_its_log(run: Run) -> None:
    run.config_path.write_text("name: [")
    process = RoleProcess(run, Role("buffer", "buffer"))
    process.start()
    found = wait_for_death(process)
    assert found.returncode == 2
    assert found.message.startswith(f"{run.config_path}: not valid YAML"), "what it said, without the words around it"


def test_an_id_that_is_no_file_name_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="actor-1"):
        run_role("actor", run.folder, "../escape", supervised=False)


def test_an_error_record_is_readable_by_anybody(run: Run) -> None:
    class Odd(RollstreamError):
        exit_code = 3

    write_error(error_path(run, "learner"), Odd("what", "where"))
    record = json.loads((run.logs_folder / "learner.error.json").read_text())
    assert record == {"kind": "Odd", "families": ["Odd", "RollstreamError", "Exception", "BaseException", "object"], "message": "what: where", "exit_code": 3}


def test_log_lines_are_pairs_with_utc_time_level_and_role() -> None:
    from rollstream.roles import _KeyValues

    record = logging.LogRecord("rollstream.buffer.server", logging.WARNING, __file__, 1, "event=truncated bytes=%d", (7,), None)
    record.created, record.msecs = 0.0, 5.0
    line = _KeyValues("buffer").format(record)
    assert line == "ts=1970-01-01T00:00:00.005Z level=warning role=buffer logger=rollstream.buffer.server event=truncated bytes=7"
