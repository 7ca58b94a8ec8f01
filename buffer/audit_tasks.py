"""Reckons again which environment and which task every lease had to get, and compares that with what was leased."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .audit_report import AuditReport, EnvCursor, note
from .ledger import Ledger
from .tasks import Mixture, epoch_order

Ints = npt.NDArray[np.int64]


def check_tasks(ledger: Ledger, report: AuditReport) -> None:
    """Fills ``report.cursors`` and notes leases that went elsewhere than weights and cursors say."""
    known = list(ledger.rows("SELECT env_id, weight, num_tasks, since FROM tasks ORDER BY place"))
    if not known:
        return
    ids = {env_id: place for place, (env_id, *_) in enumerate(known)}
    leased = list(ledger.rows("SELECT group_id, env_id, task_index FROM groups ORDER BY sequence"))
    dealt = np.array([ids.get(env_id, -1) for _, env_id, _ in leased], np.int64)
    numbers = np.array([row[0] for row in leased], np.int64)
    tasks = np.array([row[2] for row in leased], np.int64)
    mixture = Mixture([weight for _, weight, _, _ in known])
    wanted = np.array([mixture.next() for _ in range(len(leased))], np.int64) if len(known) > 1 else np.zeros(len(leased), np.int64)
    wrong = np.flatnonzero(dealt != wanted)
    note(report, [f"group {numbers[at]} was leased for {leased[at][1]}, by its weights it is {known[wanted[at]][0]}'s" for at in wrong.tolist()])
    seed = int(ledger.meta("seed"))
    for place, (env_id, _, num_tasks, since) in enumerate(known):
        here = np.flatnonzero(dealt == place)
        expected = _expected(seed, env_id, len(here), num_tasks, since)
        differ = here[tasks[here] != expected]
        note(report, [f"group {numbers[at]} was leased for task {tasks[at]} of {env_id}, its cursor says another" for at in differ.tolist()])
        report.cursors[env_id] = EnvCursor(len(here), mixture.shares[place], num_tasks)


def _expected(seed: int, env_id: str, num: int, num_tasks: int | None, since: int) -> Ints:
    """The tasks of an environment's first ``num`` leases."""
    if num_tasks is None:
        return np.arange(num)
    epochs = [epoch_order(seed, env_id, epoch, num_tasks) for epoch in range(-(-num // num_tasks))]
    tasks = np.concatenate(epochs)[:num] if epochs else np.empty(0, np.int64)
    tasks[:since] = np.arange(min(since, num))
    return tasks
