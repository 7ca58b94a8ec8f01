"""After power loss: forgets what the ledger recorded but the log no longer holds.

A killed process never needs this (the log is written before the ledger). Only rows that no sync covered can be gone, so no complete checkpoint stands on them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from .ledger import Ledger

logger = logging.getLogger(__name__)

_NEWER_MEMBERS = """
SELECT group_id, member, attempt, append_id FROM members
WHERE max_version >= ? AND group_id IN (SELECT group_id FROM groups WHERE state IN ('open', 'ready') OR version >= ?)
"""


def forget(ledger: Ledger, lost_appends: Iterable[int]) -> None:
    """Removes lost appends and their members; reopens their groups, and every batch from the first that had one of them on.

    Members that hold tokens of a version made by a removed batch go too: that version will be made again from other groups. Commits.
    """
    touched: set[int] = set()
    for append_id in lost_appends:
        touched.update(group_id for (group_id,) in ledger.rows("SELECT group_id FROM members WHERE append_id = ?", (append_id,)))
        ledger.write("DELETE FROM members WHERE append_id = ?", (append_id,))
        ledger.write("DELETE FROM appends WHERE append_id = ?", (append_id,))
    groups = [group for group_id in sorted(touched) if (group := ledger.group(group_id)) is not None and group.state != "dropped"]
    first = min((group.version for group in groups if group.version is not None), default=None)
    if first is not None:
        ledger.write("DELETE FROM batches WHERE version >= ?", (first,))
        ledger.write("DELETE FROM versions WHERE version >= ?", (first,))
        ledger.set_meta("version", min(int(ledger.meta("version") or 0), first - 1))
        touched.update(group_id for (group_id,) in ledger.rows("SELECT group_id FROM groups WHERE version >= ?", (first,)))
        for group_id, member, attempt, append_id in list(ledger.rows(_NEWER_MEMBERS, (first, first))):
            touched.add(group_id)
            ledger.write("DELETE FROM members WHERE group_id = ? AND member = ?", (group_id, member))
            ledger.write("INSERT INTO discarded VALUES(?, ?, ?, ?)", (group_id, member, attempt, append_id))
    num_reopened = 0
    for group_id in sorted(touched):
        group = ledger.group(group_id)
        if group is not None and group.state != "dropped":
            complete = len(ledger.members(group_id)) + len(ledger.unplayed(group_id)) == group.num_members
            if not complete:
                ledger.write("DELETE FROM unplayed WHERE group_id = ?", (group_id,))
            ledger.put_group(group._replace(state="ready" if complete else "open", version=None, holder=None))
            num_reopened += not complete
    if first is not None:  # nobody may wait for a version that these very groups have to make
        ledger.write("UPDATE groups SET admit_version = min(admit_version, ?) WHERE state IN ('open', 'ready')", (first - 1,))
    ledger.commit()
    logger.warning("event=power_loss_repaired groups_to_complete=%d first_removed_batch=%s", num_reopened, first)
