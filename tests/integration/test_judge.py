"""The judge of the environments page beside a real run: it scores all that the run plays, and ends with it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from rollstream.buffer.audit import audit
from rollstream.buffer.inspect import Filter, Inspector
from rollstream.tail import read_rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
SMALL = (
    *("name=brief", "imports=[brief.py]", "env={id: demo/Brief-v0}", "warmup=null", "learner.versions=3", "learner.batch_groups=2", "learner.group_size=2"),
    *("model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}", "actors.slots=8", "learner.alarms={ess_stop: null, kl_warn: null}"),
)


def test_the_judge_of_the_page_scores_a_run_to_its_end(tmp_path: Path) -> None:
    for name, text in re.findall(r"<!-- test: (brief.py|judge.py) -->\n```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(text)
    run = tmp_path / "runs" / "brief"
    training = subprocess.Popen([sys.executable, "-m", "rollstream", "train", "quickstart", *SMALL, "--quiet"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (run / "ledger.sqlite").is_file() and training.poll() is None:
        time.sleep(0.1)
    judging = subprocess.run([sys.executable, "judge.py", "runs/brief"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=90)
    _, said = training.communicate(timeout=60)
    assert (judging.returncode, judging.stderr) == (0, "")
    assert training.returncode == 0, said
    assert [row["version"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3]
    with Inspector(run) as stream:
        trained = [one for one in stream.listed(Filter()) if one.trained_version is not None]
        assert len(trained) == 12
        for one in trained:
            assert one.reward is not None
            assert 0 <= one.reward <= 1
    report = audit(run)
    assert (report.closes, report.problems) == (True, [])
    assert report.num_amendments >= 12
