"""What the pages show works: their code runs, their configurations are accepted, their commands exist, their links and file names resolve.

A block is tested under the name in the comment before it, ``<!-- test: NAME -->``.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import registry as gymnasium_registry

from rollstream import cli
from rollstream.configs.checks import check_config
from rollstream.configs.loader import load_config
from rollstream.envs import registry
from rollstream.envs.messages import assistant_call
from rollstream.learner import advantages, aggregation, corrections, token_advantages
from rollstream.learner.losses import registry as losses
from rollstream.learner.objective import Objective, Tokens
from rollstream.learner.plan import Rows, plan
from rollstream.learner.token_advantages import TokenScores
from rollstream.run import check_env

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MARKED = re.compile(r"<!-- test: (\S+) -->\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> dict[str, str]:
    return dict(MARKED.findall((ROOT / page).read_text(encoding="utf-8")))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder; what is registered or imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for module, name in [(registry, "_registrations"), (losses, "_LOSSES"), (advantages, "_MODES"), (aggregation, "_MODES"), (token_advantages, "_MODES")]:
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    for name in ("_LEVELS", "_MODES"):
        monkeypatch.setattr(corrections, name, dict(getattr(corrections, name)))
    before = set(sys.modules)
    yield tmp_path
    for env_id in ("demo/Safe-v0", "demo/Double-v0"):
        gymnasium_registry.pop(env_id, None)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(folder: Path, page: str) -> None:
    for name, text in blocks(page).items():
        (folder / name).write_text(text, encoding="utf-8")


def test_the_environment_of_the_readme_registers_and_opens_its_safe(here: Path) -> None:
    write(here, "README.md")
    registry.load_imports(["guess.py"])
    env = gymnasium.make("demo/Safe-v0", disable_env_checker=True).unwrapped
    env.reset(seed=0)
    messages, reward, terminated, _, _ = env.step(assistant_call("try_code", code=10))
    assert (messages[0]["content"], reward, terminated) == ("higher", 0.0, False)
    messages, reward, terminated, _, _ = env.step(assistant_call("try_code", code=env.code))
    assert (messages[0]["content"], reward, terminated) == ("open", 1.0, True)
    env.reset(seed=0)
    assert env.step("open, please")[1] == -0.1


def test_the_configuration_of_the_readme_is_accepted_with_a_tiny_model(here: Path) -> None:
    write(here, "README.md")
    assert load_config("safe.yaml").model.kind == "folder"
    (tiny,) = re.findall(r"`model: (\{kind: tiny.*?\})`", (ROOT / "README.md").read_text())
    config = load_config("safe.yaml", [f"model={tiny}"])
    check_config(config)
    check_env(config)


def test_the_session_by_hand_goes_as_the_page_says(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "docs/environments.md")
    sys.path.insert(0, str(here))
    exec((here / "session").read_text(), {"__name__": "session"})
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "Open the safe. Use try_code. ['try_code']"
    assert second.split()[0] in ("higher", "lower")
    assert last == "open 1.0 True 1.0"


@pytest.mark.parametrize("correct", [True, False])
def test_the_demonstration_of_the_page_goes_as_the_environment_would_answer(correct: bool, here: Path) -> None:
    write(here, "docs/environments.md")
    registry.load_imports(["demonstrate.py"])
    env = registry.make("demo/Double-v0")
    said, _ = env.reset(seed=7)
    first, *rest = env.demonstrate(correct)
    assert [first] == list(said)
    reward, ended = 0.0, False
    while rest:
        answers, reward, ended, _, _ = env.step(rest.pop(0))
        assert rest[: len(answers)] == list(answers) or ended
        rest = rest[len(answers) :]
    assert (ended, reward) == (True, float(correct))


def test_maths_registered_from_outside_is_used_by_name(here: Path) -> None:
    write(here, "docs/algorithms.md")
    registry.load_imports(["mine.py"])
    learner = load_config("mine.yaml").learner
    rows = Rows(offsets=np.array([0, 1, 5]), mask=np.ones(5, bool), row_trajectory=np.arange(2), rewards=np.array([5.0, 1.0]), groups=np.zeros(2, int))
    step = plan(rows, learner.loss, learner.advantage, "keep")
    assert step.advantages.tolist() == [1.0, -1.0]
    assert step.row_weight.tolist() == [0.5, 0.25]

    scores = TokenScores(
        rewards=np.array([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]]), mask=np.array([[True, True, True], [True, False, False]]), mu=np.zeros((2, 3)),
        prox=np.zeros((2, 3)), values=np.array([[0.5, 0.25, 0.125], [1.0, 0.0, 0.0]]), bootstrap=np.zeros(2), config=learner.advantage,
    )  # fmt: skip
    entry = token_advantages.token_mode("td")
    assert entry is not None
    assert entry.needs_values
    assert entry.function(scores).advantages.tolist() == [[-0.25, 0.875, -0.125], [1.0, 0.0, 0.0]]

    row = torch.tensor([0, 1, 1, 1, 1])
    adv, agg = torch.as_tensor(step.row_advantage)[row], torch.as_tensor(step.row_weight)[row]
    prox = torch.full((5,), -1.0, dtype=torch.float64)
    mu = prox - torch.tensor([0.0, 0.0, 0.0, 0.0, np.log(16.0)])  # ratios of row 1 spread by 16, bound 4: its tokens count a quarter
    x = (prox + np.log(4.0)).clamp(max=0.0).requires_grad_()
    loss, stats = Objective(learner.loss.model_copy(update={"mu_sq_coef": 0.0}))(
        x, Tokens(row=row, num_rows=2, mask=torch.ones(5, dtype=torch.bool), adv=adv, agg=agg, mu=mu, prox=prox)
    )
    softened = float(np.exp(0.5))  # x is 0, one above prox
    assert float(loss.detach()) == pytest.approx(-0.5 * softened + 4 * 0.25 * 0.25 * softened)
    assert stats.result()["w_hit_frac"] == 0.8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_file_names_of_a_page_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|yaml))`", text)
    assert [name for name in named if not (ROOT / name).exists() and not name.startswith("runs/")] == []


@pytest.mark.parametrize("page", ["README.md", "docs/environments.md"])
def test_commands_of_a_page_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    shells = "\n".join(re.findall(r"```sh\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    lines = [shlex.split(line, comments=True) for line in shells.splitlines() if line.startswith("rollstream ")]
    assert lines
    for _, command, *arguments in lines:
        path = [command, *(arguments[:1] if command in ("envs", "models") else [])]
        with pytest.raises(SystemExit) as caught:
            cli.main([*path, "--help"])
        assert caught.value.code == 0, f"{page}: rollstream {' '.join(path)}"
        options = [argument for argument in arguments if argument.startswith("--")]
        helped = capsys.readouterr().out
        assert [option for option in options if option not in helped] == []


def test_sections_of_the_algorithms_page_that_the_code_names_exist() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "learner").rglob("*.py"))
    named = set(re.findall(r"algorithms,? section (\d+)", code))
    assert named
    assert named <= set(re.findall(r"^## (\d+)\.", (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8"), re.MULTILINE))
