"""Ranks that are told an address meet there: they talk over the interface that leads to it, and hear of one another's end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed

from rollstream.errors import ConfigError, DeadlineExceeded, RankFailed
from rollstream.learner.meeting import join
from rollstream.learner.ranks import naming_the_lost
from streams import free_port

distributed: Any = torch.distributed
NOWHERE = Path("/nonexistent")


def own_address() -> str:
    """An address of this machine beyond loopback; loopback where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # nothing is sent
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def rank(number: int, meet: str) -> None:
    """One of two: says what it saw, and dies or sees the other die."""
    ranks = join(NOWHERE, number, 2, device="cpu", timeout_s=60, meet=meet, run_id="ours")
    seen: dict[str, Any] = {"before": ranks.asked_to_stop}
    seen["gave"] = [data.decode() for data in ranks.exchange(f"from {number}".encode())]
    if number == 0:
        listening = {found.laddr.ip for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_LISTEN}
        seen["listens"] = sorted(listening)
    if number == 1:
        ranks.ask_to_stop()
    ranks.exchange(b"")
    seen |= {"after": ranks.asked_to_stop, "interface": os.environ["GLOO_SOCKET_IFNAME"], "lost": ""}
    if number == 1:
        os.write(1, (json.dumps(seen) + "\n").encode())
        os._exit(9)
    try:
        with naming_the_lost(ranks):
            ranks.exchange(b"nobody answers")
    except RankFailed as error:
        seen["lost"] = str(error)
    os.write(1, (json.dumps(seen) + "\n").encode())
    os._exit(0)


@pytest.mark.parametrize("host", sorted({"127.0.0.1", own_address()}))
def test_ranks_meet_at_an_address_over_the_interface_that_leads_to_it_and_miss_one_another(host: str) -> None:
    fresh = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}  # another test's meeting in this process set it
    command = [sys.executable, __file__, f"{host}:{free_port()}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=fresh)
    first, second = sorted((json.loads(line) for line in found.stdout.splitlines()), key=lambda seen: "listens" not in seen)
    interface = next(name for name, addresses in psutil.net_if_addrs().items() if any(address.address == host for address in addresses))
    for seen in (first, second):
        assert (seen["gave"], seen["before"], seen["after"]) == (["from 0", "from 1"], False, True), found.stderr
        assert seen["interface"] == interface
    assert set(first["listens"]) == {host}, "nothing else of this machine can be reached"
    assert first["lost"].startswith("another rank of the learner is gone, rank 0 cannot go on without it")


def test_who_does_not_come_to_the_address_is_named_and_a_rank_of_another_run_is_a_stranger() -> None:
    meet = f"127.0.0.1:{free_port()}"
    with pytest.raises(DeadlineExceeded, match=r"ranks 1, 2 of the learner did not come within 0\.3 s .* rank 0 of 3 waited at 127\.0\.0\.1"):
        join(NOWHERE, 0, 3, device="cpu", timeout_s=0.3, meet=meet, run_id="ours")
    with pytest.raises(DeadlineExceeded, match=r"rank 0 of the learner did not come within 0\.3 s .* rank 2 of 3 waited at 127\.0\.0\.1"):
        join(NOWHERE, 2, 3, device="cpu", timeout_s=0.3, meet=f"127.0.0.1:{free_port()}", run_id="ours")
    stranger = distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    distributed.PrefixStore("theirs", stranger).set("here-0", "")
    with pytest.raises(DeadlineExceeded, match="rank 0 of the learner did not come"):
        join(NOWHERE, 1, 2, device="cpu", timeout_s=0.5, meet=f"127.0.0.1:{stranger.port}", run_id="ours")


def test_an_address_where_rank_0_cannot_listen_is_refused_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--meet 127\.0\.0\.1:{port}: rank 0 cannot listen there \(.*in use"):
            join(NOWHERE, 0, 2, device="cpu", timeout_s=1, meet=f"127.0.0.1:{port}", run_id="ours")
    with pytest.raises(ConfigError, match=r"--meet 192\.0\.2\.77:5700: rank 0 cannot listen there"):
        join(NOWHERE, 0, 2, device="cpu", timeout_s=1, meet="192.0.2.77:5700", run_id="ours")
    for wrong in ("5700", "host", "host:0", "host:70000", "tcp://host:5700"):
        with pytest.raises(ConfigError, match=r"must be HOST:PORT"):
            join(NOWHERE, 0, 2, device="cpu", timeout_s=1, meet=wrong, run_id="ours")


if __name__ == "__main__":
    child = os.fork()
    rank(1 if child == 0 else 0, sys.argv[1])
