"""Who may import whom (ARCHITECTURE, "Layers"), and what a light import may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ALLOWED = {
    "errors": set(),
    "configs": {"errors"},
    "buffer": {"configs", "errors"},
    "envs": {"configs", "errors"},
    "models": {"configs", "errors"},
    "actors": {"models", "envs", "buffer", "configs", "errors"},
    "learner": {"models", "envs", "buffer", "configs", "errors"},
    "pretrained": {"models", "learner", "configs", "errors"},
    "tail": {"configs", "errors"},
    "evaluation_lines": {"tail", "buffer", "configs"},
    "summary": {"evaluation_lines", "tail", "buffer", "configs", "errors"},
    "watch": {"evaluation_lines", "tail", "buffer", "configs", "errors"},
    "watchdog": {"buffer", "errors"},
    "processes": {"configs", "errors"},
    "supervisor": {"processes", "tail", "watch", "watchdog", "buffer", "configs", "errors"},
    "by_hand": {"processes", "buffer", "configs", "errors"},
    "ray_keeper": {"processes", "configs", "errors"},
    "ray_places": {"ray_keeper", "processes", "configs", "errors"},
    "ray_process": {"ray_places", "ray_keeper", "processes", "configs", "errors"},
    "ray_session": {"configs", "errors"},
    "ray_launcher": {"ray_session", "ray_process", "ray_places", "processes", "configs", "errors"},
    "roles": {"processes", "actors", "learner", "models", "envs", "buffer", "configs", "errors"},
    "run": {"ray_launcher", "forks", "supervisor", "processes", "watch", "models", "envs", "buffer", "configs", "errors"},
    "evaluate_command": {
        "pretrained",
        *("evaluation_lines", "log_command", "supervisor", "processes", "tail", "watch"),
        *("envs", "buffer", "configs", "errors"),
    },
    "log_command": {"models", "buffer", "configs", "errors"},
    "forks": {"buffer", "configs", "errors"},
    "options": set(),
    "models_command": {"options", "pretrained", "configs", "errors"},
    "replay_command": {"learner", "envs", "buffer", "configs", "errors"},
    "role_commands": {"options", "by_hand", "run", "roles", "configs", "errors"},
    "cli": {
        *("options", "role_commands", "evaluate_command", "models_command", "log_command", "replay_command", "pretrained", "run", "roles"),
        *("tail", "watch", "summary", "models", "learner", "envs", "buffer", "configs", "errors"),
    },
}
DOORS = {
    "transformers": {"models.py"},
    "tensorboard": {"learner/tracker.py"},
    "ray": {"ray_launcher.py"},
    "vllm": set(),
    "sglang": set(),
    "megatron": set(),
    "wandb": {"learner/wandb_tracker.py"},
    "peft": {"learner/lora.py"},
    "duckdb": {"buffer/inspect.py"},
}
"""Each heavy library has one door. transformers' cache and attention interfaces belong to the two files that implement them."""
EXTRA_DOORS = {"transformers": {"actors/kv_cache.py", "learner/attention.py"}}


def sources() -> list[Path]:
    roots = [ROOT / name for name in ("actors", "buffer", "configs", "envs", "learner")]
    return sorted([path for root in roots for path in root.rglob("*.py")] + [ROOT / f"{name}.py" for name in ALLOWED if (ROOT / f"{name}.py").is_file()])


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[str, ...]]:
    """Absolute module paths imported anywhere in a file; relative ones are resolved to start with ``rollstream``."""
    package = ("rollstream", *path.relative_to(ROOT).parts[:-1])
    found: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            found += [(*module, alias.name) for alias in node.names] if module == ("rollstream",) else [module]
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_imports_only_from_the_layers_below_it(path: Path) -> None:
    layer = layer_of(path)
    for module in imports_of(path):
        if module[0] == "rollstream" and len(module) > 1 and module[1] != "__version__":
            assert module[1] == layer or module[1] in ALLOWED[layer], f"{path.name} imports {'.'.join(module)}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_heavy_library_is_imported_only_through_its_door(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    for module in imports_of(path):
        if module[0] in DOORS:
            assert name in DOORS[module[0]] | EXTRA_DOORS.get(module[0], set()), f"{name} imports {'.'.join(module)}"


def loaded_by(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_rollstream_loads_neither_torch_nor_ray_nor_arrow() -> None:
    assert not loaded_by("import rollstream") & {"torch", "ray", "transformers", "pyarrow", "gymnasium", "zmq"}


def test_the_buffer_the_environments_and_the_configuration_load_no_torch() -> None:
    names = [
        ".".join(("rollstream", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in sources()
        if layer_of(path) in ("buffer", "envs", "configs", "errors")
    ]
    assert not loaded_by("\n".join(f"import {name}" for name in names)) & {"torch", "ray", "transformers"}


def test_the_command_line_loads_nothing_heavy_before_a_command_runs() -> None:
    assert not loaded_by("import rollstream.cli") & {"torch", "ray", "transformers", "pyarrow", "gymnasium", "matplotlib"}


def test_files_and_functions_stay_small() -> None:
    for path in sources():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, f"{path.name} is over 400 lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name} is {node.end_lineno - node.lineno + 1} lines"


def test_every_error_is_also_the_standard_exception_it_claims_and_pickles() -> None:
    import pickle

    from rollstream import errors

    for name in errors.__all__:
        kind = getattr(errors, name)
        error = kind("code", "what went wrong")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == "code: what went wrong"
        assert name in (errors.__doc__ or "")
