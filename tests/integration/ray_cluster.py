"""A Ray cluster of several nodes on this machine, in a process of its own: ``python ray_cluster.py '{"CPU": 1}'`` starts the head with these resources.

A command is one JSON line: ``{"add": {"CPU": 1, "player": 1}}`` is answered with the process id of the new node's raylet, ``{"remove": PID}`` with
``removed``: that raylet is killed at once. The first line of the output is the cluster's address. The end of standard input ends it all.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import ray
from ray.cluster_utils import Cluster

OBJECTS_BYTES = 80_000_000
ATTEMPTS = 3


def split(resources: dict[str, float]) -> dict[str, Any]:
    custom = {name: amount for name, amount in resources.items() if name != "CPU"}
    return {"num_cpus": resources.get("CPU", 0), "resources": custom, "object_store_memory": OBJECTS_BYTES}


def started(start: Callable[[], Any]) -> Any:
    """What ``start`` gives, which on a machine that runs other tests too may miss the half minute that Ray allows a node."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(Exception):  # Ray raises no narrower one
            return start()
    return start()


def answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    logging.disable(logging.WARNING)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: sockets lie in it
    head = split(json.loads(sys.argv[1])) | {"include_dashboard": False, "temp_dir": folder}
    cluster: Any = started(lambda: Cluster(initialize_head=True, connect=False, head_node_args=head))
    answer(cluster.address)
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "add" in command:
            node = started(functools.partial(cluster.add_node, **split(command["add"])))
            raylet = node.all_processes["raylet"][0].process.pid
            nodes[raylet] = node
            answer(str(raylet))
        else:
            cluster.remove_node(nodes.pop(command["remove"]), allow_graceful=False)
            answer("removed")
    cluster.shutdown()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
