"""A buffer that other machines can reach lets in the run's own roles and nobody else, and counts whom it turned away."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

import streams
from rollstream.buffer.audit import audit
from rollstream.buffer.client import ActorClient, LearnerClient, SupervisorClient
from rollstream.buffer.curve import ClientKeys, buffer_keys, client_keys, prepare_keys
from rollstream.buffer.server import serve
from rollstream.configs.run_folder import Run
from rollstream.errors import ConfigError, Refused


def far_run(folder: Path, host: str = "0.0.0.0") -> Run:
    run = streams.run_in(folder, endpoint=f"tcp://{host}:{streams.free_port()}")
    prepare_keys(run)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return far_run(tmp_path / "run")


def counters(run: Run) -> dict[str, float]:
    with SupervisorClient(run.endpoint, run.run_id, keys=client_keys(run)) as supervisor:
        status = supervisor.status(5.0)
    assert status is not None
    return status.counters


def test_the_keys_are_private_to_the_run_and_its_owner(run: Run, tmp_path: Path) -> None:
    assert stat.S_IMODE(run.keys_folder.stat().st_mode) == 0o700
    assert {(path.name, stat.S_IMODE(path.stat().st_mode)) for path in run.keys_folder.iterdir()} == {("buffer.json", 0o600), ("client.json", 0o600)}
    ours, theirs = client_keys(run), client_keys(far_run(tmp_path / "other"))
    assert ours is not None
    assert theirs is not None
    assert not {ours.buffer, ours.public, ours.secret} & {theirs.buffer, theirs.public, theirs.secret}
    secrets = [ours.secret.decode(), buffer_keys(run).secret.decode()]  # type: ignore[union-attr]
    assert not any(secret in repr((ours, buffer_keys(run))) for secret in secrets)
    again = client_keys(run)
    prepare_keys(run)
    assert client_keys(run) == again == ours


def test_keys_that_others_can_read_are_not_used(run: Run) -> None:
    (run.keys_folder / "client.json").chmod(0o640)
    with pytest.raises(ConfigError, match=r"client\.json can be read by others than its owner; run `chmod 600"):
        client_keys(run)


@pytest.mark.parametrize(
    ("damage", "said"), [(lambda path: path.unlink(), "start the buffer first"), (lambda path: path.write_text("{}"), "hold no buffer key")]
)
def test_keys_that_are_missing_or_damaged_say_what_to_do(run: Run, damage: Any, said: str) -> None:
    damage(run.keys_folder / "client.json")
    with pytest.raises(ConfigError, match=said):
        client_keys(run)


@pytest.mark.parametrize("endpoint", ["ipc", "tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://127.9.9.9:5555", "tcp://[::1]:5555"])
def test_on_this_machine_there_are_no_keys(endpoint: str, tmp_path: Path) -> None:
    run = streams.run_in(tmp_path, endpoint=endpoint)
    prepare_keys(run)
    assert (client_keys(run), buffer_keys(run), run.keys_folder.exists()) == (None, None, False)


def addresses() -> list[str]:
    """This machine's own address beyond loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return []
        return [str(probe.getsockname()[0])]


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "own"])
def test_the_whole_stream_works_with_keys(host: str, tmp_path: Path) -> None:
    if host == "own":
        found = addresses()
        host = found[0] if found else "0.0.0.0"
    if host == "[::]" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    run = far_run(tmp_path, host)
    keys = client_keys(run)
    assert keys is not None

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0", keys=keys) as client:
            await streams.play_groups(client, 2)

    with streams.serving(run), LearnerClient(run.endpoint, run.run_id, keys=keys) as learner:
        learner.hello(0)
        asyncio.run(act())
        assert len(streams.pull(learner, 1).trajectories) == 2 * streams.GROUP_SIZE
        learner.trained(1)
        assert learner.status().counters["refused"] == 0
    report = audit(run.folder)
    assert (report.closes, report.problems, report.refused) == (True, [], {})


def turned_away(run: Run, keys: ClientKeys | None) -> tuple[Refused, Refused]:
    """What a learner and an actor hear."""
    with LearnerClient(run.endpoint, run.run_id, keys=keys, silent_s=8.0) as learner, pytest.raises(Refused) as told_learner:
        learner.hello(0)

    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "stranger", keys=keys, silent_s=8.0) as client:
            await client.next_lease()

    with pytest.raises(Refused) as told_actor:
        asyncio.run(act())
    return told_learner.value, told_actor.value


@pytest.mark.parametrize("kind", ["no key", "unknown key", "keys of another run"])
def test_a_peer_without_the_keys_is_refused_with_the_reason_and_counted(kind: str, run: Run, tmp_path: Path) -> None:
    ours, other = client_keys(run), client_keys(far_run(tmp_path / "other"))
    assert ours is not None
    assert other is not None
    keys = {"no key": None, "unknown key": dataclasses.replace(other, buffer=ours.buffer), "keys of another run": other}[kind]
    code = "no_key" if keys is None else "wrong_key"
    with streams.serving(run):
        for told in turned_away(run, keys):
            assert told.code == code
            assert "keys/client.json" in str(told) or "copy them anew" in str(told)
        found = counters(run)
        assert found[f"refused_{code}"] >= 2
        assert found["refused"] >= found[f"refused_{code}"]
    assert audit(run.folder).refused[code] >= 2


def test_a_peer_with_the_keys_but_of_another_run_or_schema_is_refused_and_counted(run: Run) -> None:
    with streams.serving(run):
        with LearnerClient(run.endpoint, "another", keys=client_keys(run)) as learner, pytest.raises(Refused, match="wrong_run"):
            learner.hello(0)
        with LearnerClient(run.endpoint, run.run_id, keys=client_keys(run)) as learner:
            introduction = learner._introduction(0)
            with pytest.raises(Refused, match=r"wrong_schema.*schema version 99"):
                learner.connection.request(msgspec.structs.replace(introduction, schema_version=99))
        found = counters(run)
    assert found["refused"] == found["refused_wrong_run"] + found["refused_wrong_schema"]
    assert min(found["refused_wrong_run"], found["refused_wrong_schema"]) >= 1
    assert audit(run.folder).refused.keys() == {"wrong_run", "wrong_schema"}


def test_whoever_breaks_off_is_counted_and_whoever_speaks_something_else_does_no_harm(run: Run) -> None:
    with streams.serving(run):
        counters(run)  # it listens
        address = ("127.0.0.1", int(run.endpoint.rpartition(":")[2]))
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        socket.create_connection(address).close()
        streams.wait_until(lambda: counters(run).get("refused_no_key", 0) >= 1)


def test_a_buffer_that_was_killed_comes_back_with_the_same_keys(run: Run) -> None:
    async def act() -> None:
        async with ActorClient(run.endpoint, run.run_id, "actor-0", keys=client_keys(run)) as client:
            lease = await streams.one_lease(client)
            await client.append(streams.play(lease, 0))
            process.kill()
            process.start()
            await client.append(streams.play(lease, 1))

    with streams.ServerProcess(run) as process:
        asyncio.run(act())
        assert process.end() == 0
    assert audit(run.folder).num_trajectories == 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_training_beyond_loopback_runs_with_an_actor_that_was_given_a_copy_of_the_keys(tmp_path: Path) -> None:
    port = streams.free_port()
    config = tmp_path / "far.yaml"
    config.write_text(
        f"name: far\nfolder: {tmp_path}\nenv: {{id: rollstream/KeyValue-v0}}\nbuffer: {{endpoint: 'tcp://0.0.0.0:{port}'}}\n"
        "actors: {num: 1, slots: 4, sampler: {kind: scripted, token_delay_s: 0.005}, sampling: {max_turn_tokens: 8, max_trajectory_tokens: 160}}\n"
        "learner: {versions: 100000, batch_groups: 2, group_size: 2, alarms: {max_skipped: 1000}}\n"
        "model: {kind: tiny, hidden_size: 32, num_layers: 1, num_heads: 1, num_kv_heads: 1}\n"
    )
    rollstream = [sys.executable, "-P", "-m", "rollstream"]
    training = subprocess.Popen([*rollstream, "train", str(config), "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folder, far = tmp_path / "far", tmp_path / "elsewhere"
    try:
        streams.wait_until(lambda: (folder / "ledger.sqlite").exists() or training.poll() is not None, 60)
        far.mkdir()
        shutil.copy(folder / "config.yaml", far)
        shutil.copy(folder / "keys" / "client.json", far / "copied.json")
        options = ["--id", "far-0", "--endpoint", f"tcp://localhost:{port}", "--keys", str(far / "copied.json")]
        with subprocess.Popen([*rollstream, "actor", str(far), *options], stderr=subprocess.PIPE, text=True) as helper:
            streams.wait_until(lambda: helper.poll() is not None or (has_met(folder, "far-0") and version(folder) >= 2), 200)
            training.send_signal(signal.SIGINT)
            output, _ = training.communicate(timeout=60)
            _, told = helper.communicate(timeout=30)
            assert helper.returncode == 0, told
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 128 + signal.SIGINT, output
    report = audit(folder)
    assert (report.closes, report.problems) == (True, [])
    assert report.version >= 2
    secrets = [json.loads((folder / "keys" / name).read_text())["secret"] for name in ("buffer.json", "client.json")]
    written = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "keys"]
    assert not [path for path in written for secret in secrets if secret.encode() in path.read_bytes()]


def has_met(folder: Path, peer_id: str) -> bool:
    return f"event=hello role=actor peer={peer_id}" in (folder / "logs" / "buffer.log").read_text()


def version(folder: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"{(folder / 'ledger.sqlite').as_uri()}?mode=ro", uri=True, timeout=10)) as ledger:
        return int(ledger.execute("SELECT ifnull((SELECT value FROM meta WHERE key = 'version'), 0)").fetchone()[0])


def test_a_port_that_is_taken_is_named_also_beyond_loopback(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        run = streams.run_in(tmp_path, endpoint=f"tcp://0.0.0.0:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"is in use; set another port"):
            serve(run, threading.Event())
