"""The golden cases of the algorithms page, and the tool that runs files like it."""

import copy
import json
from pathlib import Path

import pytest

from rollstream.learner.golden import check_case, main, run

CASES = Path(__file__).parents[1] / "golden" / "cases.json"


@pytest.fixture(scope="module")
def cases():
    return json.loads(CASES.read_text())["cases"]


def case_named(cases, name):
    return copy.deepcopy(next(case for case in cases if case["id"] == name))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_golden_case_comes_out(cases, dtype):
    assert len(cases) == 65
    assert {verdict.id: verdict.problem for verdict in run(cases, dtype) if not verdict.passed} == {}


def test_a_number_off_by_more_than_the_tolerance_fails_and_names_where(cases):
    case = case_named(cases, "ppo-basic")
    case["expect"]["grad"][0][1] *= 1 + 1e-8
    assert "grad[0][1]: expected" in check_case(case, "float64").problem
    assert check_case(case, "float32").passed


@pytest.mark.parametrize(("name", "trap"), [("decoupled-tis-token", "weight_missing"), ("gspo", "token_ratio"), ("adv-grpo", "population_std")])
def test_a_result_that_fell_into_a_trap_is_told_which(cases, name, trap):
    case = case_named(cases, name)
    right = case["expect"]
    case["expect"] = {**right, **case["traps"][trap]}
    case["traps"] = {trap: {output: right[output] for output in case["traps"][trap]}}
    assert check_case(case, "float64").problem.endswith(f"this is the trap {trap}")


def test_a_metric_nobody_expects_fails(cases):
    case = case_named(cases, "all-masked")
    del case["expect"]["metrics"]["skip_step"]
    assert "metrics: skip_step not expected" in check_case(case, "float64").problem


def test_a_case_that_must_be_refused_and_is_not_fails(cases):
    case = case_named(cases, "ppo-basic")
    case["expect"] = {"error": "rejected", "why": "a reason"}
    assert "not refused" in check_case(case, "float64").problem


REFUSALS = {
    "non-binary mask": {"mask": [[1, 0.5, 1]]},
    "NaN in the mask": {"mask": [[1, "nan", 1]]},
    "non-finite advantage": {"adv": ["nan"]},
    "non-finite token advantage": {"adv": [[1, "inf", 1]]},
    "non-finite live log-probability": {"cur": [[-1, "nan", -1]]},
    "non-finite proximal log-probability": {"prox": [[-1, "-inf", -1]]},
    "positive behaviour log-probability": {"mu": [[-1, 0.001, -1]]},
    "ragged rows": {"cur": [[-1, -1, -1], [-1]], "adv": [1, 1]},
    "one row of mu too many": {"mu": [[-1, -1, -1], [-1, -1, -1]]},
    "one advantage too many": {"adv": [1, 1]},
    "a trajectory id too few": {"row_traj": []},
}


@pytest.mark.parametrize("name", REFUSALS)
def test_data_that_must_not_train_are_refused(name):
    inputs = {"cur": [[-1, -1, -1]], "prox": [[-1, -1, -1]], "mu": [[-1, -1, -1]], "mask": [[1, 1, 1]], "adv": [1], **REFUSALS[name]}
    for kind, extra in (("loss", {}), ("split", {"ranks": [[[0]]]})):
        assert check_case({"id": name, "kind": kind, "inputs": inputs, "hyper": extra, "expect": {"error": "rejected"}}, "float64").passed
    unpoisoned = {**inputs, "mask": [[1, 0, 1]]}
    if len(REFUSALS[name]) == 1 and name.endswith("log-probability"):
        assert not check_case({"id": name, "kind": "loss", "inputs": unpoisoned, "hyper": {}, "expect": {"error": "rejected"}}, "float64").passed


@pytest.mark.parametrize(
    "hyper",
    [
        {"old": "mu", "correction": [{"level": "token", "mode": "truncate", "high": 2}]},
        {"kl": "k3", "kl_coef": 0.1},
        {"loss": "no-such-loss"},
        {"agg": "seq_mean_fixed"},
        {"agg": "fixed"},
        {"kl": "k4"},
    ],
)
def test_configurations_that_cannot_run_are_refused(hyper):
    inputs = {"cur": [[-1, -1]], "mu": [[-1, -1]], "mask": [[1, 1]], "adv": [1]}
    assert check_case({"id": "x", "kind": "loss", "inputs": inputs, "hyper": hyper, "expect": {"error": "rejected"}}, "float64").passed


def test_old_mu_without_recorded_mu_is_refused():
    case = {"id": "x", "kind": "loss", "inputs": {"cur": [[-1]], "mask": [[1]], "adv": [1]}, "hyper": {"old": "mu"}, "expect": {"error": "rejected"}}
    assert check_case(case, "float64").passed


def test_the_command_line_prints_verdicts_and_fails_when_one_does(cases, tmp_path, capsys):
    wrong = case_named(cases, "adv-grpo")
    wrong["expect"]["advantages"][0] = 0.5
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [case_named(cases, "adv-rloo"), wrong]}))
    assert main([str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pass adv-rloo"
    assert lines[1].startswith("FAIL adv-grpo: advantages[0]: expected 0.5")
    assert lines[-1] == "1 passed, 1 failed"
    assert main([str(CASES), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.endswith("65 passed, 0 failed\n")


def test_a_file_without_cases_is_an_error_and_no_success(tmp_path, capsys):
    path = tmp_path / "cases.json"
    path.write_text("{}")
    assert main([str(path)]) == 2
    path.write_text('{"cases": []}')
    assert main([str(path)]) == 1
