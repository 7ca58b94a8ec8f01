"""A run whose roles are killed: starts them through the nursery, kills them, and closes the books from the files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rollstream.buffer.audit import audit
from rollstream.buffer.audit_report import AuditReport
from rollstream.buffer.client import SupervisorClient
from rollstream.buffer.weights import remove_weights
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config

HERE = Path(__file__).resolve().parent
Member = tuple[int, int, int, int]


class World:
    """The processes of one run, by name. ``settings`` are merged into a small configuration, section by section."""

    def __init__(self, folder: Path, seed: int, *, step_s: float = 0.06, num_actors: int = 2, **settings: dict[str, Any]) -> None:
        sections: dict[str, dict[str, Any]] = {
            "env": {"id": "test-faults/Waiting-v0"},
            "buffer": {"depth": 2, "max_lag": 4},
            "actors": {"slots": 6, "sampler": {"kind": "scripted", "token_delay_s": 0.002}, "sampling": {"max_turn_tokens": 32, "max_trajectory_tokens": 200}},
            "learner": {"versions": 1_000_000, "batch_groups": 2, "group_size": 2},
        }
        for name, values in settings.items():
            sections[name] = sections.get(name, {}) | values
        config = Config.model_validate({"name": "faults", "seed": seed, "imports": [str(HERE / "waiting_env.py")], **sections})
        self.run = Run(folder, config, f"faults-{folder}-{os.getpid()}")
        self.names = ["buffer", "learner", *(f"actor-{index}" for index in range(num_actors))]
        self.names += [f"evaluator-{index}" for index in range(config.evaluation.num if config.evaluation is not None else 0)]
        self.pids: dict[str, int] = {}
        self._step_s = step_s
        (folder / "logs").mkdir(parents=True)
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "nursery.py"), str(folder), config.model_dump_json(), self.run.run_id]
        self._nursery = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    # --- processes ------------------------------------------------------------------------------------------------------------------

    def start(self, name: str, seed: int = 0, **more: Any) -> None:
        role = {"role": name.split("-")[0], "name": name, "seed": seed, "step_s": self._step_s, "every": 2, **more}
        self.pids[name] = int(self._command(role))

    def kill(self, *names: str) -> None:
        """SIGKILL, all at once; returns when they are gone."""
        assert self._command({"kill": [self.pids[name] for name in names]}) == "killed"

    def fork_at_an_older_checkpoint(self) -> dict[str, Any]:
        """Leaves the learner's double the second oldest of its checkpoints as the newest; gives the fork that goes on from it."""
        kept = sorted((self.run.folder / "double").glob("v*.json"))
        for path in kept[2:]:
            path.unlink()
        return {"fork_id": "asked", "lineage": 1, "version": int(kept[1].stem[1:]), "reason": "asked for"}

    def _command(self, command: dict[str, Any]) -> str:
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.write(json.dumps(command) + "\n")
        self._nursery.stdin.flush()
        return self._nursery.stdout.readline().strip()

    def is_alive(self, name: str) -> bool:
        try:
            return psutil.Process(self.pids[name]).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def check_alive(self) -> None:
        """Whoever was not killed lives."""
        for name in self.names:
            assert self.is_alive(name), f"{name} ended by itself:\n{self.log(name)}"

    def log(self, name: str) -> str:
        path = self.run.folder / "logs" / f"{name}.log"
        return path.read_text()[-3000:] if path.exists() else ""

    def whole_log(self, name: str) -> str:
        return (self.run.folder / "logs" / f"{name}.log").read_text()

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in self.names) if time.monotonic() > deadline else ""
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}\n{logs}"
            time.sleep(0.02)

    def close(self) -> None:
        assert self._nursery.stdin is not None
        self._nursery.stdin.close()
        try:
            self._nursery.wait(10)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        assert self._nursery.stdout is not None
        self._nursery.stdout.close()
        remove_weights(self.run.weights_folder)
        shutil.rmtree(self.run.socket_folder, ignore_errors=True)

    # --- what the files say -----------------------------------------------------------------------------------------------------------

    def audit(self) -> AuditReport:
        report = audit(self.run.folder)
        assert (report.closes, report.problems, report.duplicates) == (True, [], 0)
        assert report.max_lag_trained <= self.run.config.buffer.max_lag
        return report

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What the ledger answers; nothing where a buffer has not yet made its tables."""
        if not self.run.ledger_path.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"{self.run.ledger_path.as_uri()}?mode=ro", uri=True, timeout=10)) as ledger:
            tables = ledger.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('versions', 'evaluation_groups', 'evaluation_members')").fetchone()[0]
            return ledger.execute(query).fetchall() if tables == 3 else []

    def members(self) -> set[tuple[Any, ...]]:
        """Every committed member: group, member, attempt, append."""
        return set(self.rows("SELECT group_id, member, attempt, append_id FROM members"))

    def last_batch(self) -> int:
        found = self.rows("SELECT ifnull(max(version), 0) FROM batches")
        return int(found[0][0]) if found else 0

    def journal(self, name: str) -> list[dict[str, Any]]:
        path = self.run.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def counters(self) -> dict[str, float]:
        with SupervisorClient(self.run.endpoint, self.run.run_id) as client:
            status = client.status(5.0)
        assert status is not None
        return status.counters
