"""A run whose ledger was lost keeps its log: nothing begins a new ledger over rows that only the lost one knew."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import streams
from rollstream.buffer.audit import audit
from rollstream.buffer.client import ActorClient
from rollstream.buffer.server import serve
from rollstream.configs.run_folder import Run
from rollstream.errors import RunFolderError
from rollstream.forks import check_length


async def _play(run: Run) -> None:
    async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
        lease = await streams.one_lease(client)
        await asyncio.gather(*(client.append(streams.play(lease, member)) for member in lease.members))


@pytest.mark.parametrize("left", [None, b""])
def test_a_lost_ledger_is_refused_and_the_log_stays(left: bytes | None, tmp_path: Path) -> None:
    run = streams.run_in(tmp_path)
    with streams.serving(run):
        asyncio.run(_play(run))
    recorded = {path: path.read_bytes() for path in run.stream_folder.iterdir()}
    saved = run.ledger_path.read_bytes()
    for path in run.folder.glob("ledger.sqlite*"):
        path.unlink()
    if left is not None:
        run.ledger_path.write_bytes(left)
    with pytest.raises(RunFolderError, match=r"ledger.sqlite is missing or empty, but .* holds 1 segments that it knew; put back a copy of it"):
        serve(run, threading.Event())
    if left is None:
        with pytest.raises(RunFolderError, match="put back a copy of it"):
            check_length(run.folder, run.config)
    with pytest.raises(RunFolderError, match="put back a copy of it"):
        audit(run.folder)
    assert {path: path.read_bytes() for path in run.stream_folder.iterdir()} == recorded
    run.ledger_path.write_bytes(saved)
    with streams.serving(run):
        asyncio.run(_play(run))


def test_an_older_copy_of_the_ledger_is_refused_and_the_log_stays(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path)
    with streams.serving(run):
        asyncio.run(_play(run))
    recorded = {path: path.read_bytes() for path in run.stream_folder.iterdir()}
    newer = run.checkpoints_folder / "v000002"
    newer.mkdir(parents=True)
    with pytest.raises(RunFolderError, match=r"records batches only up to 0, but there is a checkpoint of version 2: .* put back the newest one"):
        serve(run, threading.Event())
    assert any("it is an older copy" in problem for problem in audit(run.folder).problems)
    assert {path: path.read_bytes() for path in run.stream_folder.iterdir()} == recorded
    newer.rmdir()
    with streams.serving(run):
        asyncio.run(_play(run))
