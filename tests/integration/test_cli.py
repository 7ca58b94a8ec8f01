"""The command line: bad input is one clear line and exit code 2 with nothing written, help is quick, debug adds the trace."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollstream import cli
from rollstream.configs.claim import locked
from rollstream.configs.loader import create_run, load_config
from rollstream.errors import ConfigError
from rollstream.roles import probe

ENV_FILE = """
import rollstream

class Silent(rollstream.ChatEnv):
    def start(self, task):
        return "say something"

    def respond(self, message):
        return rollstream.Turn("thank you", reward=0.5, done=True)

rollstream.register("demo/Silent-v0", Silent, max_turns=2)
"""


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Runs the command line in this process: exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int)
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must be refused: exit code 2 and one line, which is returned."""
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err.strip()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder; nothing may be in it after a refusal."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("learner.learning_rate=1", ("learner.learning_rate", "unknown key")),
        ("actors.num=many", ("actors.num", "integer", "'many'")),
        ("actors.slots=0", ("actors.slots", "greater than or equal to 1")),
        ("env.id=rollstream/KeyValu-v0", ("rollstream/KeyValu-v0", "did you mean", "rollstream/KeyValue-v0")),
        ("env.kwargs={colour: red}", ("colour", "takes")),
        ("imports=[no_such_file.py]", ("no_such_file.py",)),
        ("buffer.depth=6", ("buffer.depth 6", "buffer.max_lag 4", "wait for ever", "lower buffer.depth to 4")),
        ("actors.sampling.max_trajectory_tokens=4096", ("max_trajectory_tokens 4096", "512 positions", "raise model.max_positions")),
        ("learner.tokens_per_micro_batch=100", ("tokens_per_micro_batch 100", "max_trajectory_tokens 160", "at least 160")),
        ("actors.sampling.top_p=0.9", ("top_p 0.9", "must be 1 in training")),
        ("actors.sampling.top_k=20", ("top_k 20", "must be 0 in training")),
        ("learner.group_size=1", ("group_size 1", "every advantage would be 0")),
        ("model.num_heads=3", ("num_heads 3", "num_kv_heads 2")),
        ("model={kind: folder, path: nowhere}", ("model.path", "nowhere", "not a folder")),
        ("buffer.endpoint=tcp://127.0.0.1:99999", ("port 99999", "65535")),
        ("model={kind: tiny, hidden_size: 8192, num_layers: 64, max_positions: 512}", ("MiB free", "weights channel needs")),
    ],
)
def test_training_with_bad_input_is_refused_in_one_line_and_writes_nothing(
    override: str, names: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "train", "quickstart", override)
    for name in names:
        assert name in line
    assert list(here.iterdir()) == []


def test_what_check_refuses_train_refuses_with_the_same_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "check", "quickstart", "buffer.depth=6") == refused(capsys, "train", "quickstart", "buffer.depth=6")


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("learner.loss.kind=ppp", ("ppp", "known are")),
        ("learner.advantage.mode=best", ("best", "known are")),
        ("learner.device=cuda:77", ("learner.device 'cuda:77'", "cannot be used")),
    ],
)
def test_a_loss_or_device_that_cannot_work_is_told_by_the_probe(override: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        probe(load_config("quickstart", [override]))
    for name in names:
        assert name in str(caught.value)


def test_check_asks_the_probe_and_passes_on_its_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ppp" in refused(capsys, "check", "quickstart", "learner.loss.kind=ppp")
    assert list(here.iterdir()) == []


def test_a_missing_configuration_names_the_shipped_recipes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "quickstart" in refused(capsys, "train", "nosuch.yaml")


def test_a_busy_port_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        endpoint = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        line = refused(capsys, "train", "quickstart", f"buffer.endpoint={endpoint}")
    assert endpoint in line
    assert "in use" in line
    assert list(here.iterdir()) == []


def test_a_temporary_folder_too_deep_for_a_socket_is_refused(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    deep = here / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert "107" in refused(capsys, "check", "quickstart")


def test_a_warm_up_for_an_environment_without_demonstrations_says_what_to_write(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "silent.py").write_text(ENV_FILE)
    silent = ("imports=[silent.py]", "env={id: demo/Silent-v0}")
    line = refused(capsys, "check", "quickstart", *silent)
    assert "demonstrate" in line
    code, out, _ = call(capsys, "check", "quickstart", *silent, "warmup=null")
    assert code == 0
    assert "fine" in out
    assert [entry.name for entry in here.iterdir() if entry.name != "__pycache__"] == ["silent.py"]


def test_an_environment_that_raises_is_refused_before_a_run_and_a_tool_without_docstring_is_noticed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "silent.py").write_text(ENV_FILE)
    (here / "broken.py").write_text(ENV_FILE.replace("Silent", "Broken") + "\n\ndef fail(self, message):\n    return 1 / 0\n\n\nBroken.respond = fail\n")
    (here / "plain.py").write_text(ENV_FILE.replace("Silent", "Plain") + "\n\nPlain.look = rollstream.tool(lambda self: 'dark')\n")
    chosen = ("warmup=null", "imports=[broken.py]", "env={id: demo/Broken-v0}")
    line = refused(capsys, "check", "quickstart", *chosen)
    assert "demo/Broken-v0: respond raised ZeroDivisionError: division by zero (broken.py, line " in line
    assert refused(capsys, "train", "quickstart", *chosen) == line
    assert not (here / "runs").exists()
    code, _, err = call(capsys, "check", "quickstart", "warmup=null", "imports=[plain.py]", "env={id: demo/Plain-v0}")
    assert code == 0
    assert err.strip() == "notice: demo/Plain-v0: tool look has no docstring; the policy reads what a tool does there, write one"


def test_a_folder_that_holds_a_run_is_refused_with_the_three_ways_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_run(load_config("quickstart"), resume=False)
    before = sorted(here.rglob("*"))
    line = refused(capsys, "train", "quickstart")
    for way in ("--resume", "name=NEW", "remove"):
        assert way in line
    assert [path for path in sorted(here.rglob("*")) if path.name != ".lock"] == before


def test_check_looks_at_the_environment_also_where_the_folder_holds_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").write_text(ENV_FILE.replace("Silent", "Mine"))
    chosen = ("quickstart", "warmup=null", "imports=[mine.py]", "env={id: demo/Mine-v0}")
    create_run(load_config(*chosen[:1], chosen[1:]), resume=False)
    line = refused(capsys, "check", *chosen)
    assert line.startswith("error: all is fine but the folder: ")
    assert "already holds a run; go on with --resume" in line
    broken = (*chosen[:2], "imports=[wrong.py]", "env={id: demo/Wrong-v0}")
    (here / "wrong.py").write_text(ENV_FILE.replace("Silent", "Wrong").replace("rollstream.Turn(", "rollstream.Turm("))
    assert "demo/Wrong-v0: respond raised AttributeError" in refused(capsys, "check", *broken)
    assert "already holds a run" in refused(capsys, "train", *broken)


def test_check_refuses_adapters_whose_library_is_missing_with_the_line_of_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None if name == "peft" else find(name, package))
    line = refused(capsys, "check", "quickstart", "learner.policy={kind: single, lora: {rank: 4}}")
    assert line.startswith("error: learner.policy.lora needs peft, not installed here: pip install 'rollstream[lora]'")
    assert refused(capsys, "train", "quickstart", "learner.policy.lora={rank: 4}") == line
    assert not (here / "runs").exists()


def test_a_folder_that_a_live_run_holds_is_refused_with_its_process(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run(load_config("quickstart"), resume=False)
    with locked(run.folder):
        assert f"process {os.getpid()}" in refused(capsys, "train", "quickstart")
        assert "in use" in refused(capsys, "train", "quickstart", "--resume")


def test_resuming_where_there_is_no_run_is_refused_and_makes_no_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a run folder" in refused(capsys, "train", "quickstart", "--resume")
    assert list(here.iterdir()) == []


def test_resuming_with_another_seed_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_run(load_config("quickstart"), resume=False)
    assert "seed" in refused(capsys, "train", "quickstart", "seed=3", "--resume")


def test_a_folder_that_cannot_be_made_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs").write_text("a file")
    assert "cannot be made" in refused(capsys, "train", "quickstart")


@pytest.mark.parametrize("command", ["audit", "buffer", "learner", "actor"])
def test_a_command_on_a_folder_that_is_no_run_says_so(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, command, str(here))
    assert code == 2
    assert "is not a run folder" in err.splitlines()[-1]


def test_a_wrong_command_or_option_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert "trian" in refused(capsys, "trian", "quickstart")
    assert "--fast" in refused(capsys, "train", "quickstart", "--fast")
    assert "CONFIG" in refused(capsys, "train")


@pytest.mark.parametrize("arguments", [(), ("envs",), ("models",)])
def test_a_command_that_needs_another_shows_its_help_as_written(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: rollstream")
    assert err.count("\n") > 8


def test_a_wrong_option_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "log", "runs/x", "--limit", "0").endswith("greater than or equal to 1; see rollstream log --help")


def test_show_config_prints_yaml_that_resolves_to_itself(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "show-config", "quickstart", "learner.versions=7")
    assert code == 0
    (here / "copy.yaml").write_text(out)
    assert load_config(here / "copy.yaml") == load_config("quickstart", ["learner.versions=7"])


def test_envs_list_names_built_in_and_imported_environments(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "other.py").write_text(ENV_FILE.replace("Silent", "Other"))
    code, out, _ = call(capsys, "envs", "list", "other.py")
    assert code == 0
    assert {"demo/Other-v0", "rollstream/KeyValue-v0"} <= set(out.split())


def test_debug_adds_the_trace_above_the_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "show-config", "nosuch", "--debug")
    assert code == 2
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("error: nosuch")


def test_an_error_nobody_foresaw_is_one_line_that_points_to_debug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rollstream.configs import loader

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("division by\nzero")

    monkeypatch.setattr(loader, "load_config", broken)
    code, _, err = call(capsys, "show-config", "quickstart")
    assert (code, err) == (1, "error: ZeroDivisionError: division by zero; run with --debug for the trace\n")


def test_ctrl_c_before_a_run_has_started_exits_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rollstream.configs import loader

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "load_config", interrupted)
    code, _, _ = call(capsys, "show-config", "quickstart")
    assert code == 130


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import rollstream

    assert call(capsys, "--version")[:2] == (0, f"rollstream {rollstream.__version__}\n")


def test_help_comes_within_a_second_and_is_plain_text() -> None:
    environment = os.environ | {"COLUMNS": "100"}
    times = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "rollstream", "--help"], capture_output=True, text=True, check=True, env=environment)
        times.append(time.perf_counter() - began)
    assert min(times) < 1.0
    for word in ("train", "check", "show-config", "audit", "envs", "buffer", "learner", "actor", "--version", "rollstream train quickstart"):
        assert word in done.stdout, word
    assert "\x1b" not in done.stdout
    assert "probe" not in done.stdout


@pytest.mark.parametrize("command", ["train", "check", "show-config", "audit", "replay", "actor"])
def test_every_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert f"rollstream {command} " in out.partition("Example")[2]
