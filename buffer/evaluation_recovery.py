"""After power loss: what becomes of evaluations whose rows are gone. Those of versions that a new lineage leaves behind are dropped when the learner speaks."""

from __future__ import annotations

from collections.abc import Iterable

from .ledger import Ledger


def forget_evaluations(ledger: Ledger, lost_appends: Iterable[int]) -> None:
    """Removes members whose rows are lost, so that their evaluations are open again. Does not commit."""
    groups: set[int] = set()
    for append_id in lost_appends:
        groups.update(group_id for (group_id,) in ledger.rows("SELECT group_id FROM evaluation_members WHERE append_id = ?", (append_id,)))
        ledger.write("DELETE FROM evaluation_members WHERE append_id = ?", (append_id,))
    for group_id in sorted(groups):
        (evaluation_id,) = next(ledger.rows("SELECT evaluation_id FROM evaluation_groups WHERE group_id = ?", (group_id,)))
        if list(ledger.rows("SELECT 1 FROM evaluations WHERE evaluation_id = ? AND state IN ('open', 'done')", (evaluation_id,))):
            ledger.write("UPDATE evaluation_groups SET state = 'open', holder = NULL WHERE group_id = ?", (group_id,))
            ledger.write("UPDATE evaluations SET state = 'open', number = NULL, metrics = NULL WHERE evaluation_id = ?", (evaluation_id,))
