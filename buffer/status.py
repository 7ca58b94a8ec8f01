"""The state of the stream as the terminal view and the learner's metrics are told it."""

from __future__ import annotations

import time

from . import wire
from .books import Books
from .evaluations import Evaluations

_STATES = ("open", "ready", "assigned", "trained", "dropped")
_COUNTERS = (
    *("leases", "leases_given_up", "leases_expired", "episodes", "superseded", "duplicates", "refused"),
    *("invalid_infra", "invalid_env", "retries_infra", "retries_env", "unplayed_members", "groups_closed_early", "groups_dropped_late"),
    *("scores", "scores_missing"),
    *("appends", "rows_stored", "trajectories_stored", "bytes_stored", "blobs_stored", "blob_bytes_stored", "blobs_received", "blobs_sent"),
    *("age_drops", "refilled_groups", "digests_differ"),
)
"""Always told, also while they are 0."""


def status_of(books: Books, evaluations: Evaluations, peers: list[wire.PeerStatus], waits_for: str, holds_for: str) -> wire.StatusReply:
    """What is answered to a :class:`wire.StatusRequest`."""
    counters: dict[str, float] = {**dict.fromkeys(_COUNTERS, 0.0), **books.counters, **evaluations.counters}
    counters |= {"leased": books.num_leased, "cpu_s": time.process_time(), **books.bias.figures()}
    groups = {state: books.counts[state] for state in _STATES}
    return wire.StatusReply(books.lineage, books.version, groups, counters, peers, waits_for, holds_for, evaluations.status())
