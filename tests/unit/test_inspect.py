"""``rollstream log``: what it lists, shows, exports and answers, and what it says to bad input."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollstream import cli
from rollstream.buffer.books import Books
from rollstream.buffer.columns import Rows, encode, frame_checksum, to_frame
from rollstream.buffer.facts import facts
from rollstream.buffer.inspect import VIEWS, Inspector
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.log import Log
from rollstream.buffer.sealed import seal, sealed_path
from rollstream.buffer.types import Segment, Trajectory, TrajectoryKey
from rollstream.buffer.window import Rules
from rollstream.buffer.wire import Lease
from rollstream.configs.loader import create_run, load_config
from rollstream.configs.run_folder import Run
from rollstream.models import prepare_model

RULES = Rules(2, 3, 1, 2, 0, 1, 1, None, False, (("Acme/Calculator-v0", 1.0),), 3, 1_000_000)
MESSAGES = json.dumps([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])


def trajectory(lease: Lease, member: int) -> Trajectory:
    """Eight tokens, of which the last four were sampled; the last member failed."""
    mask = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.uint8)
    starts, versions = np.array([0, 6], np.int32), np.array([lease.admit_version] * 2, np.int32)
    turns = (np.array([0, 4], np.int32), ("user", "assistant"), (None, 0.5))
    segment = Segment(np.arange(60, 68, dtype=np.int32), mask, np.where(mask == 1, -0.25, 0).astype(np.float32), starts, versions, *turns)
    key, failed = TrajectoryKey(0, lease.group_id, member, lease.attempt), member == 2
    ending = (None, "failed", "env") if failed else (float(member), "terminated", "terminated")
    parts = {"answer": float(member), "odd": float("nan")}
    return Trajectory(key, "Acme/Calculator-v0", 0, 7, "train", (segment,), *ending, parts, error="boom" if failed else "", messages=MESSAGES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three versions of two groups with three members each, and two ready groups; the first segment is sealed."""
    folder = tmp_path_factory.mktemp("runs")
    run = create_run(load_config("quickstart", [f"folder={folder}"]), resume=False)
    ledger, log = Ledger(run.ledger_path, run.run_id), Log(run.stream_folder, segment_bytes=20_000)
    books = Books(ledger, RULES)
    append_id = 0
    for version in range(1, 4):
        while (lease := books.grant("actor-0", 0.0)) is not None:
            batch = encode([trajectory(lease, member) for member in lease.members])
            append_id += 1
            assert {books.receive(fact, append_id) for fact in facts(Rows(batch))} == {"store"}
            frame = to_frame(batch)
            ledger.put_append(append_id, log.append(frame, frame_checksum(frame)), batch.num_rows, len(lease.members))
        assert books.batch(version) is not None
        books.trained(version)
    log.close()
    ledger.commit()
    sealed = seal(log.path(1), sealed_path(log.folder, 1), ledger.next_segment(0), threading.Event())
    assert sealed is not None
    ledger.put_segment(sealed)
    ledger.close()
    log.path(1).unlink()
    assert log.path(2).exists()
    return run


def log_of(capsys: pytest.CaptureFixture[str], run: Run, *arguments: str) -> list[str]:
    """What ``rollstream log`` prints."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["log", str(run.folder), *arguments])
    out, err = capsys.readouterr()
    assert (caught.value.code, err) == (0, "")
    return out.splitlines()


def test_the_list_says_what_became_of_each_trajectory(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    lines = log_of(capsys, run, "--group", "3")
    assert lines[0].split() == ["group", "member", "attempt", "env", "reward", "status", "tokens", "trained", "on", "versions", "in", "version", "lag", "state"]
    assert [line.split() for line in lines[1:4]] == [
        ["3", "0", "0", "Acme/Calculator-v0", "0", "terminated", "8", "4", "0", "2", "1", "trained"],
        ["3", "1", "0", "Acme/Calculator-v0", "1", "terminated", "8", "4", "0", "2", "1", "trained"],
        ["3", "2", "0", "Acme/Calculator-v0", "–", "failed:", "env", "8", "0", "0", "2", "1", "left", "out"],
    ]
    assert lines[4] == "3 trajectories"


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--version", "2"], {(group, member) for group in (2, 3) for member in range(3)}),
        (["--failed", "--version", "1"], {(0, 2), (1, 2)}),
        (["--status", "terminated", "--group", "0"], {(0, 0), (0, 1)}),
        (["--reward-above", "0.5", "--version", "3"], {(4, 1), (5, 1)}),
        (["--reward-below", "0.5", "--version", "3"], {(4, 0), (5, 0)}),
        (["--env", "Acme/Calculator-v0", "--limit", "2"], {(7, 1), (7, 2)}),
        (["--version", "99"], set()),
    ],
)
def test_filters_choose(capsys: pytest.CaptureFixture[str], run: Run, options: list[str], keys: set[tuple[int, int]]) -> None:
    lines = log_of(capsys, run, *options)
    assert {tuple(map(int, line.split()[:2])) for line in lines[1:-1]} == keys


def test_a_long_list_is_cut_at_the_newest_and_says_so(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    assert log_of(capsys, run, "--limit", "5")[-1] == "24 trajectories; the newest 5 are shown, --limit N shows more"


@pytest.mark.parametrize("group", [0, 7])
def test_one_trajectory_is_shown_turn_by_turn_from_sealed_and_from_open_segments(capsys: pytest.CaptureFixture[str], run: Run, group: int) -> None:
    lines = log_of(capsys, run, "--show", f"{group}/2")
    assert lines[0].startswith(f"group {group} member 2 attempt 0 of lineage 0: Acme/Calculator-v0 task 0 seed 7")
    assert lines[1] == ("state     left out, in the batch of version 1, lag 0" if group == 0 else "state     ready, in no batch")
    assert "ended     failed: env: boom" in lines
    assert [line for line in lines if line.startswith("[")] == ["[user] 2 + 2?", "[assistant] 4"]
    version = 0 if group == 0 else 2
    assert lines[-2:] == ["turn 0 user: tokens 0 to 4", f"turn 1 assistant: tokens 4 to 8, 4 sampled by versions {version}, reward 0.5"]


def test_tokens_are_shown_with_their_text_id_version_logprob_and_mask(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    folder = prepare_model(run)
    lines = log_of(capsys, run, "--show", "5/1", "--tokens")
    rows = [line.split() for line in lines if line.startswith("  ")]
    assert rows[0] == ["position", "id", "version", "logprob", "mask", "text"]
    from rollstream.models import load_tokenizer

    text = json.dumps(load_tokenizer(folder).decode([64]))
    assert rows[4] == ["3", "63", "1", "0.000000", "0", rows[4][5]]
    assert rows[6] == ["4", "64", "1", "-0.250000", "1", text]


def test_exports_hold_every_column_and_what_became_of_the_rows(capsys: pytest.CaptureFixture[str], run: Run, tmp_path: Path) -> None:
    log_of(capsys, run, "--export", str(tmp_path / "all.parquet"))
    table = pq.read_table(tmp_path / "all.parquet")
    assert (table.num_rows, set(table.column("state").to_pylist())) == (24, {"trained", "ready"})
    assert log_of(capsys, run, "--export", str(tmp_path / "some.jsonl"), "--version", "2", "--failed")[0].endswith("2 trajectories in 2 rows")
    rows = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    assert [(row["group_id"], row["member"], row["lag"], row["trained_version"]) for row in rows] == [(2, 2, 1, 2), (3, 2, 1, 2)]
    assert rows[0]["reward_parts"] == {"answer": 2.0, "odd": None}
    assert rows[0]["token_ids"] == list(range(60, 68))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.parquet", "some.jsonl"]


def test_sql_sees_sealed_and_open_segments_as_one(capsys: pytest.CaptureFixture[str], run: Run, tmp_path: Path) -> None:
    lines = log_of(capsys, run, "--sql", "SELECT count(*) n, sum(len(token_ids)) tokens, count(DISTINCT group_id) g FROM trajectories WHERE state = 'trained'")
    assert [line.split() for line in lines] == [["n", "tokens", "g"], ["18", "144", "6"], ["1", "row"]]
    lines = log_of(capsys, run, "--sql", "SELECT version, unnest(groups) FROM batches ORDER BY 2 LIMIT 1")
    assert lines[1].split() == ["1", "0"]
    log_of(capsys, run, "--sql", "SELECT m.group_id FROM members m JOIN groups g USING (group_id) WHERE m.lag = 1", "--export", str(tmp_path / "a.parquet"))
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 12


def test_the_views_have_the_columns_that_their_page_lists(run: Run) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "log.md").read_text(encoding="utf-8")
    listed = {view: re.findall(r"`(\w+)`", columns) for view, columns in re.findall(r"^\| `(\w+)` \|[^|]*\|(.*)\|$", page, re.MULTILINE)}
    assert tuple(listed) == VIEWS
    with Inspector(run.folder) as stream:
        assert {view: stream.query(f"DESCRIBE {view}")["column_name"].to_pylist() for view in VIEWS} == listed
        (query,) = re.findall(r'--sql "(SELECT json.*)"', page)
        assert stream.query(query.replace("\\$", "$"))["asked"].to_pylist()[0] == "2 + 2?"


def test_a_list_beside_a_writer_sees_what_it_committed(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    ledger = Ledger(run.ledger_path, run.run_id)
    try:
        ledger.write("UPDATE groups SET reason = 'looked at' WHERE group_id = 7")
        assert log_of(capsys, run, "--group", "7")[-1] == "3 trajectories"
        assert log_of(capsys, run, "--sql", "SELECT count(*) FROM groups WHERE reason = 'looked at'")[1].strip() == "0"
    finally:
        ledger.abandon()
        ledger.close()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--show", "3"], ("--show 3", "GROUP/MEMBER")),
        (["--show", "30/1"], ("group 30 was never leased", "8")),
        (["--show", "3/9"], ("no finished member 9", "0, 1, 2 finished")),
        (["--tokens"], ("--tokens needs --show",)),
        (["--show", "3/1", "--export", "a.jsonl"], ("--show and --export",)),
        (["--export", "a.csv"], ("a.csv", ".parquet or .jsonl")),
        (["--export", "/no/such/a.jsonl"], ("no folder /no/such",)),
        (["--env", "Acme/Chess-v0"], ("Acme/Chess-v0", "Acme/Calculator-v0")),
        (["--status", "bad"], ("bad", "terminated, truncated, failed")),
        (["--failed", "--status", "truncated"], ("contradict",)),
        (["--reward-above", "2", "--reward-below", "1"], ("nothing lies between",)),
        (["--limit", "0"], ("--limit", "greater than or equal to 1")),
        (["--sql", "SELECT nope FROM members"], ("nope", "the views are")),
        (["--sql", "SELECT 1", "--failed"], ("WHERE",)),
        (["--sql", "COPY (SELECT 1) TO 'stolen.csv'"], ("stolen.csv",)),
    ],
)
def test_bad_input_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run, options: list[str], names: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(["log", str(run.folder), *options])
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    for name in names:
        assert name in err
    assert list(tmp_path.iterdir()) == []
