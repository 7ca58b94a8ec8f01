"""What whole files of these tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of sixteen megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a full disk needs the right to mount a tmpfs: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
