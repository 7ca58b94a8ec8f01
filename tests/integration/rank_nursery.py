"""Processes that ranks are forked from, so that many jobs import torch once. A test file hands it a script and answers its jobs in :func:`serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class Nursery:
    """A process that runs ``script``, which calls :func:`serve`, with ``variables`` in its environment."""

    def __init__(self, script: str, **variables: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        self._process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def run(self, job: str, folder: Path, num: int) -> tuple[list[int], list[str]]:
        """Runs ``job`` in ``num`` ranks: the exit code and the errors of each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([job, str(folder), num]) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        return codes, [(folder / f"errors-{rank}.log").read_text() for rank in range(num)]

    def close(self) -> None:
        self._process.communicate()


def serve(main: Callable[[str, Path, int, int], None]) -> None:
    """Forks the ranks of each job that a line on standard input names; answers with their exit codes. Each calls ``main(job, folder, rank, num)``.

    An error that ``main`` raises is the rank's last line, its exit code 1.
    """
    for line in sys.stdin:
        job, folder, num = json.loads(line)
        children: list[int] = []
        for rank in range(num):
            pid = os.fork()
            if pid == 0:
                errors = os.open(Path(folder) / f"errors-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(errors, 2)
                _live(main, job, Path(folder), rank, num)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


def _live(main: Callable[[str, Path, int, int], None], *arguments: Any) -> NoReturn:
    """The life of a rank. Where it fails it ends at once: what it holds may wait for the others when it is let go."""
    try:
        main(*arguments)
    except Exception as error:  # noqa: BLE001 - told to the test
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(1)
    os._exit(0)
