"""A Ray cluster of several nodes on this machine, in a process of its own: ``python ray_cluster.py '{"head": 1}'`` starts the head with these resources.

A command is one JSON line: ``{"add": {"player": 1}, "env": {}}`` is answered with the process id of the new node's raylet, ``{"remove": PID}`` with
``removed``: that raylet is killed at once, and all it started. The first line of the output is the cluster's address. The end of standard input ends it all.

A node is as small as Ray can have it. Its two helper processes get ports chosen here: with ports that Ray chooses a raylet waits for its helpers to tell
them, for 15 s and no longer, and aborts where a busy machine needs more (ray-project/ray#65983).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

SETTINGS = {
    "agent_register_timeout_ms": 120_000,
    "worker_register_timeout_seconds": 120,
    "enable_worker_prestart": 0,
    "prestart_worker_first_driver": 0,
    "memory_monitor_refresh_ms": 0,
    "event_stats": 0,
    "enable_metrics_collection": 0,
    # a node whose port is closed is dead after 5 s, one that is merely slow after 5 * 20 s
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 20_000,
    "health_check_failure_threshold": 5,
}
OBJECTS_BYTES = 80_000_000
ATTEMPTS = 3
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def free_ports() -> dict[str, int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("", 0))) for _ in PORTS]
        return {name: int(each.getsockname()[1]) for name, each in zip(PORTS, sockets, strict=True)}


def node(resources: dict[str, float]) -> dict[str, Any]:
    custom = {name: amount for name, amount in resources.items() if name != "CPU"}
    return {"num_cpus": resources.get("CPU", 0), "resources": custom, "object_store_memory": OBJECTS_BYTES, "include_log_monitor": False, **free_ports()}


def started(start: Callable[[], Any]) -> Any:
    """What ``start`` gives, which on a machine that runs other tests too may miss the half minute that Ray allows a node."""
    for _ in range(ATTEMPTS - 1):
        try:
            return start()
        except Exception as error:  # noqa: BLE001 - Ray raises no narrower one
            sys.stderr.write(f"a node did not start, and is tried again: {error}\n")
    return start()


def kill(raylet: int) -> None:
    """Everything of a node but what left its session, as a power cut would."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(raylet)
        for each in [process, *process.children()]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    logging.disable(logging.WARNING)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: sockets lie in it
    Path(folder, "ray").mkdir()  # where Ray writes the address of its newest cluster, and does not make the folder for it
    os.environ |= {f"RAY_{name}": str(value) for name, value in SETTINGS.items()} | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
    head = node(json.loads(sys.argv[1])) | {"include_dashboard": False, "no_monitor": True}
    cluster: Any = started(lambda: Cluster(initialize_head=True, connect=False, head_node_args=head))
    answer(cluster.address)
    nodes: dict[int, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "add" in command:
            made = started(functools.partial(cluster.add_node, env_vars=command.get("env") or None, **node(command["add"])))
            raylet = made.all_processes["raylet"][0].process.pid
            nodes[raylet] = made
            answer(str(raylet))
        else:
            kill(command["remove"])
            cluster.remove_node(nodes.pop(command["remove"]), allow_graceful=False)
            answer("removed")
    for raylet, made in nodes.items():
        kill(raylet)
        cluster.remove_node(made, allow_graceful=False)
    cluster.remove_node(cluster.head_node, allow_graceful=False)
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
