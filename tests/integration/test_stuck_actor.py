"""An environment that never gives way: the actor is ended, the method is named, and the run goes on to its end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.buffer.audit import audit

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(240)]

ENV = """
import pathlib
import rollstream
from rollstream.envs.key_value import KeyValue

FLAG = pathlib.Path(__file__).with_name("was_stuck")

class Stuck(KeyValue):
    def respond(self, message):
        self.spin()
        return super().respond(message)

    def spin(self):
        first = not FLAG.exists()
        FLAG.touch()
        while first:
            pass

rollstream.register("test/Stuck-v0", Stuck)
"""
CONFIG = """
name: stuck
imports: [stuck.py]
env: {id: test/Stuck-v0}
model: {kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}
buffer: {depth: 1, max_lag: 2, lease_timeout_s: 6}
actors: {slots: 8, sampling: {max_turn_tokens: 8, max_trajectory_tokens: 64}}
learner: {versions: 2, batch_groups: 2, group_size: 4, tokens_per_micro_batch: 512}
"""


def test_a_busy_loop_in_an_environment_costs_one_restart_of_the_actor_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(ENV)
    (tmp_path / "was_stuck").touch()  # not yet: the trial before the run shall pass
    (tmp_path / "stuck.yaml").write_text(CONFIG)
    check = "import pathlib, rollstream.cli as cli; pathlib.Path('was_stuck').unlink(); cli.main(['train', 'stuck.yaml'])"
    (tmp_path / "start.py").write_text(f"import rollstream.run as run\nrun.try_out = lambda *_, **__: []\n{check}\n")
    done = subprocess.run([sys.executable, "start.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    told = (tmp_path / "runs/stuck/logs/supervisor.log").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{told}"
    assert re.search(r"actor-0 died: said nothing for 8 s \(buffer\.lease_timeout_s 6\) and was ended; it was in respond \(stuck\.py, line 1[67]\)", told)
    report = audit(tmp_path / "runs/stuck")
    assert (report.problems, report.version) == ([], 2)
