"""What the ledger must be told before a run goes on: that another history begins (a fork), and that rows it recorded are gone.

A killed process needs neither: the log is written before the ledger, and resuming is redo. Both are done by the buffer at its start, each in one transaction.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ..configs.run_folder import ForkPoint
from ..errors import Corrupt, RunFolderError
from .evaluation_recovery import forget_evaluations
from .ledger import Ledger
from .lineages import Fork
from .log import Location
from .tables import GroupRow, MemberRow

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"v(\d{6,})")

Readable = Callable[[Location], object]
"""Reads the rows of an append. Raises :class:`Corrupt` where it cannot."""


def refuse_older(ledger: Ledger, newest: int) -> None:
    """Refuses a ledger that is behind ``newest``, the version of the run's newest checkpoint, which is complete only once its ledger is on the disk.

    So it is an older copy, and going on would cut from the log what came after it.

    Raises:
        RunFolderError: names both, and what to do.

    """
    recorded = ledger.last_batch(ledger.lineages().current)
    if newest > recorded:
        raise RunFolderError(
            f"{ledger.path} records batches only up to {recorded}, but there is a checkpoint of version {newest}: it is an older copy, and going on would cut "
            f"what came after it from the log; put back the newest one, or move the checkpoints beyond {recorded} away to go on from there without it"
        )


def newest_version(checkpoints: Path) -> int:
    """Version of the newest checkpoint; 0 where there is none."""
    return max((int(match[1]) for path in checkpoints.glob("v*") if (match := _CHECKPOINT.fullmatch(path.name))), default=0)


def fork_once(ledger: Ledger, asked: ForkPoint | None, read: Readable) -> None:
    """Opens the lineage that ``asked`` asks for, unless that was done already: killed at any instant, it happens once. Commits.

    Raises:
        RunFolderError: the version to fork at was never trained.

    """
    if asked is None or ledger.meta("forked") == asked.fork_id:
        return
    recorded = ledger.last_batch(ledger.lineages().current)
    if asked.version > recorded:
        raise RunFolderError(f"a fork at version {asked.version} was asked for, batches only up to {recorded} are recorded")
    ledger.set_meta("forked", asked.fork_id)
    fork(ledger, asked.version, asked.reason, read)


def fork(ledger: Ledger, version: int, reason: str, read: Readable) -> Fork:
    """Opens a new lineage after ``version``: what was recorded beyond it is undone. Commits and flushes to the disk.

    Groups of undone batches are ready again. Where rows of a group, of these or of those that no batch has yet, cannot be read any more, those members are
    played again; where retention removed them the group is dropped, reason ``removed``.
    """
    lineages = ledger.lineages()
    made = Fork(lineages.current + 1, lineages.owner(lineages.current, version), version, reason)
    undone = list(ledger.batches(lineages.current, version + 1))
    waiting = ledger.unassigned()
    ledger.put_fork(made)
    ledger.set_meta("version", min(int(ledger.meta("version") or 0), version))
    removed = {sealed.segment for sealed, gone in ledger.segments() if gone}
    for group_id in (group_id for batch in undone for group_id in batch.groups):
        group = ledger.group(group_id)
        if group is not None:
            lost = [member for member in ledger.members(group_id) if not _is_readable(ledger, member, removed, read)]
            _put_back(ledger, group, lost, removed=any(ledger.append(member.append_id)[0].segment in removed for member in lost))
    for group in waiting:
        if lost := [member for member in ledger.members(group.group_id) if not _is_readable(ledger, member, removed, read)]:
            _put_back(ledger, group, lost)
    _ask_for_no_version_beyond(ledger, version)
    ledger.sync()
    logger.warning("event=forked lineage=%d parent=%d version=%d undone_batches=%d reason=%r", made.lineage, made.parent, version, len(undone), reason)
    return made


def forget(ledger: Ledger, lost_appends: Iterable[int], read: Readable) -> None:
    """After power loss: removes appends that the log no longer holds, and their members; their groups are completed anew. Commits.

    Only rows that no sync covered can be gone, so no complete checkpoint stands on them. From the first recorded batch on that had one of them the history
    cannot be served again: it is removed, and a new lineage begins before it.
    """
    touched: set[int] = set()
    lost = list(lost_appends)
    for append_id in lost:
        touched.update(group_id for (group_id,) in ledger.rows("SELECT group_id FROM members WHERE append_id = ?", (append_id,)))
        ledger.write("DELETE FROM members WHERE append_id = ?", (append_id,))
        ledger.write("DELETE FROM appends WHERE append_id = ?", (append_id,))
    groups = [group for group_id in sorted(touched) if (group := ledger.group(group_id)) is not None and group.state != "dropped"]
    first = min((group.version for group in groups if group.version is not None), default=None)
    for group in groups:
        _put_back(ledger, group, [])
    if first is not None:
        lineage = ledger.lineages().current
        cut = [(batch.lineage, batch.version) for batch in ledger.batches(lineage, first)]
        fork(ledger, first - 1, "rows lost with the power of the machine", read)
        for key in cut:
            ledger.write("DELETE FROM batches WHERE lineage = ? AND version = ?", key)
            ledger.write("DELETE FROM versions WHERE lineage = ? AND version = ?", key)
    forget_evaluations(ledger, lost)
    ledger.commit()
    logger.warning("event=power_loss_repaired groups=%d first_removed_batch=%s", len(groups), first)


def _is_readable(ledger: Ledger, member: MemberRow, removed: set[int], read: Readable) -> bool:
    location = ledger.append(member.append_id)[0]
    if location.segment in removed:
        return False
    try:
        read(location)
    except Corrupt as error:
        logger.warning("event=member_lost group=%d member=%d reason=%r", member.group_id, member.member, str(error))
        return False
    return True


def _put_back(ledger: Ledger, group: GroupRow, lost: list[MemberRow], *, removed: bool = False) -> None:
    """A group without its batch: ready where it is complete, open where members are missing, dropped where they were ``removed`` on purpose."""
    if removed:
        ledger.put_group(group._replace(state="dropped", version=None, reason="removed", holder=None))
        return
    for member in lost:
        ledger.write("DELETE FROM members WHERE group_id = ? AND member = ?", member[:2])
    complete = len(ledger.members(group.group_id)) + len(ledger.unplayed(group.group_id)) == group.num_members
    if not complete:
        ledger.write("DELETE FROM unplayed WHERE group_id = ?", (group.group_id,))
    ledger.put_group(group._replace(state="ready" if complete else "open", version=None, holder=None))


def _ask_for_no_version_beyond(ledger: Ledger, version: int) -> None:
    """Nobody may wait for a version that these very groups have to make."""
    for group in ledger.unassigned():
        if group.admit_version > version:
            ledger.put_group(group._replace(admit_version=version))
