"""Images through the whole stream: from a real actor's client over the buffer to the learner, once each, whatever is killed when."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streams
from rollstream.buffer.audit import audit
from rollstream.buffer.blob_store import blob_path
from rollstream.buffer.blobs import MAX_BLOB_BYTES, Blob, BlobCache, digest_of
from rollstream.buffer.client import ActorClient, LearnerClient, SupervisorClient
from rollstream.buffer.inspect import Filter
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.log_files import local_files
from rollstream.configs.run_folder import Run
from rollstream.errors import Corrupt, DataRefused, Refused
from rollstream.log_command import log_lines


def png(seed: int, size: int = 24) -> bytes:
    """A real PNG of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def image(seed: int, size: int = 24) -> Blob:
    return Blob.of(png(seed, size), "image/png")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return streams.run_in(tmp_path)


async def play_group(client: ActorClient, *blobs: Blob) -> None:
    """A whole group, every member of which names these images."""
    lease = await streams.one_lease(client)
    spans = tuple(blob.span(2 * place, 2) for place, blob in enumerate(blobs))
    await asyncio.gather(*(client.append(streams.play(lease, member, media=spans), blobs) for member in lease.members))
    client.finish(lease.group_id)


def counters(run: Run) -> dict[str, float]:
    with SupervisorClient(run.endpoint, run.run_id) as supervisor:
        status = supervisor.status(10.0)
    assert status is not None
    return status.counters


def test_images_reach_the_learner_with_the_rows_that_name_them_and_travel_once(run: Run) -> None:
    shared, own = image(1), image(2)

    async def act(name: str, *blobs: Blob) -> None:
        async with ActorClient(run.endpoint, run.run_id, name) as client:
            await play_group(client, *blobs)

    with streams.serving(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        asyncio.run(act("actor-0", shared))
        asyncio.run(act("actor-1", shared, own))
        batch, again = streams.pull(learner, 1), streams.pull(learner, 1)
        assert batch.blobs == again.blobs == {shared.digest: png(1), own.digest: png(2)}
        assert {span.digest for item in batch.trajectories for span in item.segments[0].media} == set(batch.blobs)
        found = counters(run)
        assert (found["blobs_received"], found["blobs_stored"], found["blobs_sent"]) == (2, 2, 2)
        assert found["blob_bytes_stored"] == len(png(1)) + len(png(2))
        assert learner.blobs([own.digest]) == {own.digest: png(2)}
    assert {path.name: path.read_bytes() for path in run.blobs_folder.glob("*/*")} == dict(batch.blobs)
    report = audit(run.folder)
    assert (report.closes, report.problems, report.num_blobs, report.blob_bytes) == (True, [], 2, len(png(1)) + len(png(2)))


def test_a_learner_beside_the_buffer_reads_images_from_their_files_and_checks_them(run: Run) -> None:
    blob = image(7)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            await play_group(client, blob)
            await play_group(client, blob)

    with streams.serving(run), LearnerClient(run.endpoint, run.run_id, files=local_files(run)) as learner:
        learner.hello(0)
        asyncio.run(act())
        assert streams.pull(learner, 1).blobs == {blob.digest: png(7)}
        assert counters(run)["blobs_sent"] == 0
        blob_path(run.blobs_folder, blob.digest).write_bytes(png(8))
        with LearnerClient(run.endpoint, run.run_id, "learner-1", rank=1, ranks=2, files=local_files(run)) as other:
            other.hello(None)
            with pytest.raises(Corrupt, match=f"blob {blob.digest} do not match their digest"):
                streams.pull(other, 1)


def test_the_cache_of_a_learner_is_bounded_and_checks_what_comes() -> None:
    images = [image(seed) for seed in range(3)]
    cache = BlobCache(max_bytes=2 * len(png(0)) + 100)
    asked: list[list[str]] = []

    def fetch(digests: list[str]) -> dict[str, bytes]:
        asked.append(digests)
        return {blob.digest: blob.data for blob in images if blob.digest in digests}

    digests = [blob.digest for blob in images]
    assert cache.gather(digests, fetch).keys() == set(digests)
    cache.gather(digests[1:], fetch)
    cache.gather(digests[:1], fetch)
    assert asked == [digests, digests[:1]]
    with pytest.raises(Corrupt, match="do not match their digest"):
        BlobCache(1000).gather(digests[:1], lambda missing: {missing[0]: b"other"})


def test_bytes_that_are_not_given_too_many_or_damaged_are_refused(run: Run) -> None:
    with pytest.raises(DataRefused, match=r"between 1 and 33,554,432: encode the image smaller"):
        Blob.of(bytes(MAX_BLOB_BYTES + 1), "image/png")
    good, fresh = image(1), image(5)
    wrong, false = (Blob(digest_of(what), "image/png", good.data) for what in (b"other", b"another"))
    large = Blob(digest_of(b"large"), "image/png", bytes(MAX_BLOB_BYTES + 1))

    async def act() -> list[Any]:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            lease = await streams.one_lease(client)
            spans = [(blob.span(0, 2),) for blob in (good, wrong, large)]
            return await asyncio.gather(
                client.append(streams.play(lease, 0, media=spans[0])),
                client.append(streams.play(lease, 0, media=spans[1]), [wrong]),
                client.append(streams.play(lease, 0, media=spans[2]), [large]),
                client.append(streams.play(lease, 1, media=(fresh.span(0, 1), false.span(1, 1))), [fresh, false]),
                client.append(streams.play(lease, 1, media=spans[0]), [good]),
                return_exceptions=True,
            )

    with streams.serving(run):
        missing, damaged, too_large, beside, fine = asyncio.run(act())
    assert isinstance(missing, DataRefused)
    assert "names 1 images whose bytes were not given" in str(missing)
    assert isinstance(damaged, Refused)
    assert (damaged.code, "announced was" in str(damaged)) == ("corrupt", True)
    assert isinstance(beside, Refused), "all the images of a message are taken, or none"
    assert beside.code == "corrupt"
    assert isinstance(too_large, Refused)
    assert "encode the image smaller" in str(too_large)
    assert fine is None
    report = audit(run.folder)
    assert (report.problems, report.num_blobs, report.num_trajectories) == ([], 1, 1)


def test_rows_that_name_an_image_the_buffer_no_longer_has_bring_it_again(run: Run) -> None:
    blob = image(3)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            client._appends.blobs._stored[blob.digest] = None  # it believes that the buffer still has it
            await play_group(client, blob)

    with streams.serving(run):
        asyncio.run(act())
        assert counters(run)["refused_unknown_blob"] >= 1
    assert blob_path(run.blobs_folder, blob.digest).read_bytes() == png(3)
    assert (audit(run.folder).problems, audit(run.folder).num_trajectories) == ([], streams.GROUP_SIZE)


KILLED = """
import os, signal
from rollstream.buffer import blob_store, handlers
place = sys.argv[4]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
flush, commit = blob_store.BlobStore.flush, handlers.Handlers.commit
def flushing(self):
    pending = bool(self._pending)
    if pending and place == "before": die()
    if pending and place == "between":
        path = blob_store.blob_path(self._folder, next(iter(self._pending)))
        path.parent.mkdir(parents=True); path.write_bytes(b"torn"); die()
    flush(self)
    if pending and place == "written": die()
def committing(self):
    appended = self.books.counters["appends"] > 0
    if appended and place == "append":
        self.blobs.flush(); self.log.flush(); die()
    commit(self)
    if appended and place == "committed": die()
blob_store.BlobStore.flush, handlers.Handlers.commit = flushing, committing
"""


@pytest.mark.parametrize("place", ["before", "between", "written", "append", "committed"])
def test_a_buffer_killed_at_the_boundary_of_image_and_rows_loses_neither(place: str, run: Run) -> None:
    blob = image(4)
    script = streams.SERVE.replace("stop = threading", KILLED + "stop = threading", 1)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0", silent_s=90) as client:
            playing = asyncio.create_task(play_group(client, blob))
            while process.process.poll() is None:
                await asyncio.sleep(0.05)
            assert process.process.returncode == -9
            assert audit(run.folder).problems == []
            with streams.ServerProcess(run) as again:
                await asyncio.wait_for(playing, 60)
                assert await asyncio.to_thread(fetch) == {blob.digest: png(4)}
                assert again.end() == 0

    def fetch() -> dict[str, bytes]:
        with LearnerClient(run.endpoint, run.run_id) as learner:
            return learner.blobs([blob.digest])

    with streams.ServerProcess(run, script, place) as process:
        asyncio.run(act())
    assert [path.name for path in run.blobs_folder.rglob("*") if path.is_file()] == [blob.digest]
    report = audit(run.folder)
    assert (report.closes, report.problems, report.num_trajectories, report.num_blobs) == (True, [], streams.GROUP_SIZE, 1)


def test_an_image_lost_with_the_power_takes_the_rows_that_no_sync_covered_with_it(run: Run) -> None:
    kept, lost = image(5), image(6)

    async def act(*blobs: Blob) -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            await play_group(client, *blobs)

    with streams.serving(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        asyncio.run(act(kept))
        learner.sync()
        asyncio.run(act(kept, lost))
    blob_path(run.blobs_folder, lost.digest).write_bytes(b"torn")
    with streams.serving(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        asyncio.run(act(kept, lost))
        batch = streams.pull(learner, 1)
        assert batch.blobs == {kept.digest: png(5), lost.digest: png(6)}
    report = audit(run.folder)
    assert (report.closes, report.problems, report.num_trajectories) == (True, [], 2 * streams.GROUP_SIZE)


def test_the_audit_finds_an_image_that_was_damaged_or_removed(run: Run) -> None:
    one, two = image(7), image(8)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            await play_group(client, one, two)

    with streams.serving(run):
        asyncio.run(act())
    blob_path(run.blobs_folder, one.digest).write_bytes(png(9))
    blob_path(run.blobs_folder, two.digest).unlink()
    problems = " ".join(audit(run.folder).problems)
    assert f"blob {one.digest} does not match its digest" in problems
    assert f"blob {two.digest} is missing" in problems


def test_retention_removes_the_images_that_nothing_kept_names_any_more(tmp_path: Path) -> None:
    run = streams.run_in(tmp_path, segment_mb=1, keep_gb=0.0005)
    always = image(100)

    async def act(learner: LearnerClient) -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            for version in range(1, 7):
                for group in range(2):
                    lease = await streams.one_lease(client)
                    blobs = (always, image(1000 * version + group, 100))
                    spans = tuple(blob.span(2 * place, 2) for place, blob in enumerate(blobs))
                    for member in lease.members:
                        await client.append(streams.play(lease, member, 40_000, media=spans), blobs)
                    client.finish(lease.group_id)
                await asyncio.to_thread(streams.pull, learner, version)
                await asyncio.to_thread(learner.trained, version)
                (run.checkpoints_folder / f"v{version:06d}").mkdir(parents=True)
                await asyncio.to_thread(learner.sync)

    with streams.serving(run), LearnerClient(run.endpoint, run.run_id) as learner:
        learner.hello(0)
        asyncio.run(act(learner))
        streams.wait_until(lambda: len(list(run.blobs_folder.glob("*/*"))) < 13)
    ledger = Ledger(run.ledger_path, run.run_id, read_only=True)
    recorded = {digest for (digest,) in ledger.rows("SELECT digest FROM blobs")}
    ledger.close()
    assert {path.name for path in run.blobs_folder.glob("*/*")} == recorded
    assert always.digest in recorded
    report = audit(run.folder)
    assert report.problems == []
    assert report.num_removed > 0


def test_rollstream_log_shows_and_exports_the_images(run: Run, tmp_path: Path) -> None:
    blob = image(9)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0") as client:
            await play_group(client, blob)

    with streams.serving(run):
        asyncio.run(act())
    shown = list(log_lines(run, Filter(), show="0/0"))
    assert any(line.startswith(f"image at tokens 0 to 2: image/png, {len(blob.data):,} bytes in ") and blob.digest in line for line in shown)
    lines = list(log_lines(run, Filter(), export=tmp_path / "all.jsonl"))
    assert lines[-1].endswith("all-blobs: 1 images, each named by its digest")
    assert (tmp_path / "all-blobs" / blob.digest).read_bytes() == blob.data
    blob_path(run.blobs_folder, blob.digest).unlink()
    assert any("its bytes are not there any more" in line for line in log_lines(run, Filter(), show="0/0"))


def test_a_full_disk_holds_an_image_and_its_rows_until_there_is_space(small_disk: Path) -> None:
    run = streams.run_in(small_disk / "run")
    run.folder.mkdir()
    ballast, blob = small_disk / "ballast", image(10, 300)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0", silent_s=60) as client:
            await play_group(client)
            assert await in_thread(held) == ""
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(65536))
            playing = asyncio.create_task(play_group(client, blob))
            await in_thread(lambda: streams.wait_until(lambda: "disk full" in held(), 30))
            assert not playing.done()
            assert not blob_path(run.blobs_folder, blob.digest).exists()
            ballast.unlink()
            await asyncio.wait_for(playing, 60)

    async def in_thread(call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, call)  # always the same thread, so the same connection

    def held() -> str:
        status = supervisor.status(10.0)
        assert status is not None
        return status.holds_for

    with streams.ServerProcess(run) as process, SupervisorClient(run.endpoint, run.run_id) as supervisor, ThreadPoolExecutor(1) as pool:
        asyncio.run(act())
        assert process.end() == 0
    assert [path.name for path in run.blobs_folder.rglob("*") if path.is_file()] == [blob.digest]
    report = audit(run.folder)
    assert (report.closes, report.problems, report.num_trajectories, report.num_blobs) == (True, [], 2 * streams.GROUP_SIZE, 1)
