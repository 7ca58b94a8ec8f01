"""What the next lease is about: the environment, dealt by weight, and the task, by that environment's own cursor.

Both follow from the number of the lease and the run's seed alone, so a resume goes on exactly where it was and an audit can reckon them again.

* *Environment.* After any number n of leases each environment has had its share of n to within one lease (:class:`Mixture`): nothing is drawn by chance.
* *Task.* The m-th lease of an environment with T tasks is place m mod T in its epoch m div T; each epoch is a permutation of all tasks, seeded by run,
  environment and epoch (:func:`task_at`). So no task comes again before all have had their turn. Without a finite set the task is m itself.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..configs.limits import MAX_TASKS
from ..errors import Refused
from .ledger import Ledger

Ints = npt.NDArray[np.int64]


class Mixture:
    """Numbers ``0 .. k - 1`` in proportion to ``weights``, ``[k]``, each never more than one away from its share.

    Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980): of those that are behind their share by at least 1 / (2k - 2), the
    one that would first be behind by 1 - 1 / (2k - 2). With n dealt, every count stays within 1 - 1 / (2k - 2) of its share of n.
    """

    def __init__(self, weights: Sequence[float], counts: Sequence[int] | None = None) -> None:
        total = sum(weights)
        self.shares = [weight / total for weight in weights]
        self.counts = [0] * len(weights) if counts is None else list(counts)
        self._num = sum(self.counts)

    def next(self) -> int:
        """The next number."""
        self._num += 1
        chosen = self._most_urgent() if len(self.shares) > 1 else 0
        self.counts[chosen] += 1
        return chosen

    def _most_urgent(self) -> int:
        bound = 1.0 / (2 * len(self.shares) - 2)
        behind = [share * self._num - count for share, count in zip(self.shares, self.counts, strict=True)]
        ripe = [place for place, deficit in enumerate(behind) if deficit >= bound - 1e-9] or [max(range(len(behind)), key=behind.__getitem__)]
        return min(ripe, key=lambda place: (1.0 - bound - behind[place]) / self.shares[place])


def task_at(seed: int, env_id: str, cursor: int, num_tasks: int | None) -> int:
    """The task of an environment's lease number ``cursor``; ``num_tasks`` is None where the set has no end."""
    if num_tasks is None:
        return cursor
    epoch, place = divmod(cursor, num_tasks)
    return int(epoch_order(seed, env_id, epoch, num_tasks)[place])


@functools.lru_cache(maxsize=16)
def epoch_order(seed: int, env_id: str, epoch: int, num_tasks: int) -> Ints:
    """All tasks of an environment in the order of one epoch, ``[num_tasks]``."""
    name = int.from_bytes(hashlib.sha256(env_id.encode()).digest()[:8], "big")
    order = np.random.default_rng([seed, name, epoch]).permutation(num_tasks)
    order.flags.writeable = False
    return order


class Tasks:
    """The cursors of a run. ``envs`` are ids and weights; how many tasks each has is what the actors say, kept in the ledger from then on."""

    def __init__(self, ledger: Ledger, envs: Sequence[tuple[str, float]], seed: int) -> None:
        self._ledger = ledger
        self._seed = seed
        self._ids = [env_id for env_id, _ in envs]
        leased = dict(ledger.rows("SELECT env_id, count(*) FROM groups GROUP BY env_id"))
        self._mixture = Mixture([weight for _, weight in envs], [leased.get(env_id, 0) for env_id in self._ids])
        known = dict(ledger.rows("SELECT env_id, num_tasks FROM tasks"))
        self._num_tasks: dict[str, int | None] = {env_id: known.get(env_id) for env_id in self._ids}
        for place, (env_id, weight) in enumerate(envs):
            if env_id not in known:
                ledger.write("INSERT INTO tasks VALUES(?, ?, ?, NULL, 0)", (place, env_id, weight))
        if ledger.meta("seed") is None:
            ledger.set_meta("seed", seed)

    def next(self) -> tuple[str, int]:
        """Environment and task of the next lease."""
        place = self._mixture.next()
        env_id, cursor = self._ids[place], self._mixture.counts[place] - 1
        return env_id, task_at(self._seed, env_id, cursor, self._num_tasks[env_id])

    def announce(self, num_tasks: Mapping[str, int]) -> None:
        """Takes up how many tasks environments have. Nobody may say otherwise later: tasks would come again, or never.

        Raises:
            Refused: another number is known, or the number is none, or too large.

        """
        for env_id, num in num_tasks.items():
            known = self._num_tasks.get(env_id)
            if num > MAX_TASKS:
                raise Refused("wrong_tasks", f"{env_id} has num_tasks {num}; it may have at most {MAX_TASKS:,}, or no end (num_tasks = None)")
            if env_id not in self._num_tasks or known == num:
                continue
            if known is not None or num < 1:
                raise Refused(
                    "wrong_tasks",
                    f"{env_id} has {num} tasks for this actor, this run counts {known}: tasks would be left out or come again; give every actor the data that "
                    "the run began with, or start a new run",
                )
            since = self._mixture.counts[self._ids.index(env_id)]
            self._num_tasks[env_id] = num
            self._ledger.write("UPDATE tasks SET num_tasks = ?, since = ? WHERE env_id = ?", (num, since, env_id))
