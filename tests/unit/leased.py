"""What the tests of leases and books share: rules, rows as actors would send them, books as the next process finds them."""

from __future__ import annotations

from typing import Any

from rollstream.buffer.books import Books
from rollstream.buffer.evaluations import Evaluations
from rollstream.buffer.facts import Fact
from rollstream.buffer.window import Rules
from rollstream.buffer.wire import Lease


def rules(**changes: Any) -> Rules:
    given: dict[str, Any] = {
        "batch_groups": 2,
        "group_size": 2,
        "depth": 1,
        "max_lag": 2,
        "max_refill": 0,
        "max_infra_attempts": 3,
        "max_env_attempts": 3,
        "overlong": None,
        "exclude_truncated": False,
        "envs": (("Acme/Calculator-v0", 1.0),),
        "seed": 7,
        "versions": 1_000_000,
    }
    return Rules(**(given | changes))


def played(lease: Lease, member: int, **changes: Any) -> Fact:
    """A finished member whose reward is its number."""
    given: dict[str, Any] = {
        "lineage": 0,
        "group_id": lease.group_id,
        "member": member,
        "attempt": lease.attempt,
        "reward": float(member),
        "status": "terminated",
        "stop_reason": "terminated",
        "num_tokens": 9,
        "num_trained_tokens": 5,
        "min_version": lease.admit_version,
        "max_version": lease.admit_version,
        "first_row": 0,
        "num_rows": 1,
    }
    return Fact(**(given | changes))


def failed(lease: Lease, member: int, reason: str = "infra") -> Fact:
    return played(lease, member, reward=None, status="failed", stop_reason=reason)


def grant(books: Books | Evaluations, now: float = 0.0, peer_id: str = "actor-0") -> Lease:
    lease = books.grant(peer_id, now)
    assert lease is not None
    return lease


def leases(books: Books, peer_id: str = "actor-0", now: float = 0.0) -> list[Lease]:
    """All that admission allows."""
    granted: list[Lease] = []
    while (lease := books.grant(peer_id, now)) is not None:
        granted.append(lease)
    return granted


def finish(books: Books, lease: Lease, **changes: Any) -> None:
    for member in lease.members:
        assert books.receive(played(lease, member, **changes), 1) == "store"


def train(books: Books, version: int) -> list[int]:
    batch = books.batch(version)
    assert batch is not None
    books.trained(version)
    return batch.groups


def reopened(books: Books) -> Books:
    """The books as the next process finds them."""
    books.save_counters()
    books.ledger.commit()
    return Books(books.ledger, books.rules)
