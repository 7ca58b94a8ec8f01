"""Whole runs as a user would start them: what the tests share that start ``rollstream train`` and do things to it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.configs.loader import load_run

SMALL = (
    "actors.slots=8",
    "learner.batch_groups=2",
    "learner.group_size=4",
    "learner.checkpoint.every=5",
    "warmup.steps=2",
    "warmup.demonstrations_per_step=8",
    "model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}",
)
FOR_EVER = "learner.versions=1000000"


class Job:
    """``rollstream train`` in a folder of its own, as a user would start it."""

    patience_s = 90.0

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.run_folder = folder / "runs" / "quickstart"
        command = [sys.executable, "-m", "rollstream", "train", "quickstart", *SMALL, *arguments]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.roles: dict[int, psutil.Process] = {}

    def role(self, name: str) -> psutil.Process:
        """The live process of a role."""

        def find() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, not yet collected
                    line = child.cmdline()
                    if "--id" in line and line[line.index("--id") + 1] == name:
                        self.roles[child.pid] = child
                        return child
            return None

        return self.wait_for(find, f"process {name}")

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float | None = None) -> Any:
        timeout_s = timeout_s or self.patience_s
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            if self.process.poll() is not None:
                out, err = self.process.communicate()
                pytest.fail(f"the run ended ({self.process.returncode}) before {what}:\n{out}\n{err}\n{self.logs()}")
            time.sleep(0.1)
        pytest.fail(f"waited {timeout_s} s for {what}\n{self.logs()}")

    def wait_for_version(self, version: int) -> None:
        self.wait_for(lambda: self.version() >= version, f"version {version}")

    def version(self) -> int:
        rows = self.rows()
        return rows[-1]["version"] if rows else 0

    def rows(self) -> list[dict[str, Any]]:
        path = self.run_folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted((self.run_folder / "logs").glob("*")))

    def note_roles(self) -> None:
        for name in ("buffer", "learner", "actor-0"):
            self.role(name)

    def end(self, timeout_s: float | None = None) -> tuple[int, str, str]:
        timeout_s = timeout_s or self.patience_s
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {timeout_s} s\n{self.logs()}")
        return self.process.returncode, out, err

    def finish(self) -> None:
        """Ends what a test left running, in order if it can be, and whatever outlived it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.communicate(timeout=35)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()
        for child in self.roles.values():
            if child.is_running():
                child.kill()

    def leftovers(self) -> list[str]:
        """Processes, sockets and shared memory that outlive the run."""
        found = [f"process {child.pid}" for child in self.roles.values() if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        if (self.run_folder / "config.yaml").exists():
            run = load_run(self.run_folder)
            found += [str(path) for path in (run.weights_folder, run.socket_folder) if path.exists()]
        return found


class PatientJob(Job):
    """A run among many processes: it may take its time on a busy machine."""

    patience_s = 200.0
