"""Every configuration key is read by the code, has a meaning, and is on the reference page as it is in the schema."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from rollstream import cli
from rollstream.configs.explain import parts
from rollstream.configs.loader import load_config

ROOT = Path(__file__).resolve().parents[2]
READERS = ("actors", "buffer", "configs", "envs", "learner")
NOT_READERS = {"schema.py", "learner_schema.py", "explain.py"}
KEYS = {key.path: key for part in parts() for key in part.keys}


@pytest.fixture(scope="module")
def code() -> str:
    files = [path for folder in READERS for path in (ROOT / folder).rglob("*.py") if path.name not in NOT_READERS]
    return "\n".join(path.read_text() for path in [*files, *ROOT.glob("*.py")])


@pytest.mark.parametrize("path", sorted(path for path in KEYS if path.rpartition(".")[2] != "kind" or path == "learner.loss.kind"))
def test_the_code_reads_the_key(path: str, code: str) -> None:
    name = path.rpartition(".")[2]
    assert re.search(rf"\.{name}\b", code), f"nothing reads {path}"


def test_every_key_has_a_meaning_of_one_line() -> None:
    assert len(KEYS) > 90
    assert [path for path, key in KEYS.items() if not key.meaning] == []
    assert [path for path, key in KEYS.items() if len(key.meaning) > 160] == []


def test_the_reference_page_is_current() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "generate.py"))  # a command of the docs, no module: its folder is on nobody's path
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run python docs/generate.py"


def test_bounds_defaults_and_kinds_are_those_of_the_schema() -> None:
    assert (KEYS["buffer.depth"].bound, KEYS["buffer.depth"].default, KEYS["buffer.depth"].type) == ("≥ 0, ≤ 10000", "1", "integer")
    assert KEYS["actors.sampling.top_p"].bound == "> 0, ≤ 1"
    assert KEYS["learner.optimizer.betas"].bound == "≥ 0, < 1"
    assert KEYS["learner.loss.dual_clip"].type == "number or null"
    assert KEYS["learner.versions"].default == ""
    assert {(part.path, part.kind) for part in parts()} >= {("model", "tiny"), ("model", "folder"), ("learner.loss.correction[]", "")}


@pytest.mark.parametrize(
    "overrides", [(), ("learner.preset=grpo", "env.kwargs={keys: abc}", "warmup=null"), ("learner.advantage.overlong={max_len: 9, buffer: 3}",)]
)
def test_an_explained_configuration_reads_back_as_itself_and_comments_every_value(
    overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["show-config", "quickstart", *overrides, "--explain"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    copy = tmp_path / "copy.yaml"
    copy.write_text(text)
    assert load_config(copy) == load_config("quickstart", overrides)
    uncommented = {line.strip() for line in text.splitlines() if re.match(r"\s*\w+:", line) and "  # " not in line}
    sections = {line for line in uncommented if not re.match(r"(keys|level|mode|low|high):", line)}
    assert sections == {"model:", "sampler:", "policy:", "launcher:"}, "their kind has the comment"
