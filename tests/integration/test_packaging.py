"""The wheel is what users get: it must hold exactly what the repository holds, and import from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = ("actors", "buffer", "configs", "envs", "learner")


def tracked_package_files() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    inside = [path for path in files if path.parts[0] in PACKAGE_FOLDERS or len(path.parts) == 1]
    return {f"rollstream/{path.as_posix()}" for path in inside if path.suffix == ".py" or path.name == "py.typed" or path.parts[0] == "configs"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "tree"
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        if (ROOT / line).is_file() and not (ROOT / line).is_symlink():
            (source / line).parent.mkdir(parents=True, exist_ok=True)
            (source / line).write_bytes((ROOT / line).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.mark.timeout(180)
def test_the_wheel_holds_every_tracked_package_file_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == tracked_package_files()


@pytest.mark.timeout(180)
def test_every_module_of_the_wheel_imports_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in (path.relative_to(tmp_path).as_posix() for path in (tmp_path / "rollstream").rglob("*.py"))
        if not name.endswith("__main__.py")
    )
    script = (
        "import importlib, sys\n"
        f"sys.path[:] = [{str(tmp_path)!r}] + [entry for entry in sys.path if entry not in ({str(ROOT)!r}, {str(ROOT / '.typing')!r})]\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in repr(finder).lower()]\n"
        f"for name in {modules!r}:\n"
        f"    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__\n"
        "print('imported', len(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr


def test_the_wheel_declares_the_command_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "rollstream = rollstream.__main__:start" in archive.read(entry_points).decode()
        assert any(name.endswith("licenses/LICENSE") for name in names)
