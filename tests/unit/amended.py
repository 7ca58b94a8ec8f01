"""What the tests of amendments share: books and amendments over one ledger, rows and scores to give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollstream.buffer.amendments import REWARD, WHOLE, Amendment, Amendments, places, read_amendments
from rollstream.buffer.books import Books
from rollstream.buffer.facts import Fact
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.window import Rules
from rollstream.buffer.wire import Lease

RULES = Rules(
    batch_groups=1, group_size=2, depth=0, max_lag=0, max_refill=0, max_infra_attempts=1, max_env_attempts=1, overlong=None, exclude_truncated=False,
    envs=(("demo/A-v0", 1.0),), seed=7, versions=99, score_timeout_s=60.0,
)  # fmt: skip


def played(lease: Lease, member: int, reward: float | None = None, **changes: Any) -> Fact:
    return Fact(0, lease.group_id, member, lease.attempt, reward, "terminated", "terminated", 9, 5, 0, 0, 0, 1)._replace(**changes)


def score(lease: Lease, member: int, value: float = 1.0, **changes: Any) -> Amendment:
    return Amendment(0, lease.group_id, member, WHOLE, lease.attempt, REWARD, value, "judge", 100.0)._replace(**changes)


class Stream:
    """Books and amendments over one ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "ledger.sqlite", "run-a")
        self.amendments = Amendments(folder / "amendments", self.ledger, segment_bytes=4000)
        self.books = Books(self.ledger, RULES)

    def amend(self, *amendments: Amendment) -> int:
        new = self.books.amend(amendments, self.amendments.known)
        if new:
            self.amendments.store(new)
        self.amendments.flush()
        self.books.save_counters()
        self.ledger.commit()
        return len(new)

    def lease(self) -> Lease:
        lease = self.books.grant("actor-0", 0.0)
        assert lease is not None
        return lease

    def logged(self) -> list[Amendment]:
        return [
            amendment
            for _, found in read_amendments(self.folder / "amendments", self.ledger, places(self.ledger))
            for amendment in found
            if isinstance(amendment, Amendment)
        ]

    def close(self) -> None:
        self.amendments.close()
        self.ledger.close()

    def reopened(self) -> Stream:
        self.close()
        return Stream(self.folder)
