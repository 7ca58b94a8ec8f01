"""The ledger: which groups were leased, who finished which member, which groups made which batch, where the rows lie.

One SQLite database in write-ahead mode, written by the buffer alone and readable by anyone at any time. Everything the buffer does between two polls is
one transaction, committed after the log was flushed and before anybody is told. Every query at run time goes by primary key, so its cost does not grow
with the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import DiskFull, RunFolderError, StreamError
from .columns import SCHEMA_VERSION
from .evaluation_tables import EVALUATION_TABLES
from .lineages import NEVER, Fork, Lineages
from .log import Location, refuse_without_ledger
from .sealed import SealedFile, StoredAppend, flush_file
from .tables import LEDGER_VERSION, TABLES, BatchRow, GroupRow, MemberRow
from .types import GroupState

_LITTLE_SPACE_BYTES = 2**20

_pairs = msgspec.json.Decoder(list[tuple[int, int]])
_ids = msgspec.json.Decoder(list[int])


class Ledger:
    """The ledger at ``path`` of the run ``run_id``.

    ``read_only`` opens it beside a live buffer; nothing can then be written, and no table is made. A new one is begun only where ``log_folder`` has no log.

    Raises:
        RunFolderError: it belongs to another run, another version of Rollstream wrote it, or it was lost.

    """

    def __init__(self, path: Path, run_id: str | None, *, read_only: bool = False, log_folder: Path | None = None) -> None:
        self.path = path
        if log_folder is not None and not path.is_file():
            refuse_without_ledger(log_folder, path)
        target = f"{path.absolute().as_uri()}?mode=ro" if read_only else str(path)
        self._noted: dict[str, dict[Any, Sequence[Any]]] = {"groups": {}, "members": {}, "appends": {}}
        self._round: list[tuple[str, list[Sequence[Any]]]] = []
        self._database = sqlite3.connect(target, uri=read_only, isolation_level=None, check_same_thread=False, timeout=10)
        try:
            if not read_only:
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.execute("PRAGMA synchronous = NORMAL")
                self._database.execute("PRAGMA cache_spill = OFF")  # so that a full disk shows at the commit and nowhere else
                self._database.execute("PRAGMA temp_store = MEMORY")
            self._check_identity(run_id, read_only=read_only, log_folder=log_folder)
        except BaseException:
            self._database.close()
            raise

    def _check_identity(self, run_id: str | None, *, read_only: bool, log_folder: Path | None) -> None:
        """Refuses a ledger that is not this run's, or not of this format; makes the tables of a new one."""
        wanted = {"run_id": run_id, "schema_version": SCHEMA_VERSION, "ledger_version": LEDGER_VERSION}
        found = {key: self.meta(key) for key in wanted}
        if not any(found.values()):
            if log_folder is not None:
                refuse_without_ledger(log_folder, self.path)
            if read_only:
                raise RunFolderError(f"{self.path} holds nothing yet: the buffer of this run is just starting; look again in a moment")
            self._database.executescript(TABLES + EVALUATION_TABLES)
            for key, value in wanted.items():
                self.set_meta(key, value)
            self.commit()
        elif run_id is not None and found["run_id"] != run_id:
            raise RunFolderError(f"{self.path} has run_id {found['run_id']}, this run has {run_id}; give the run another name or folder")
        else:
            for key in ("schema_version", "ledger_version"):
                if found[key] != wanted[key]:
                    raise RunFolderError(
                        f"{self.path} has {key} {found[key]}, this version of Rollstream has {wanted[key]}; use the version that wrote it, or a new run"
                    )
        self.synced_append_id = int(self.meta("synced_append_id") or 0)
        self._note_removed()

    # --- transactions ---------------------------------------------------------------------------------------------------------------

    def write(self, statement: str, values: Sequence[Any] = ()) -> None:
        """Adds one change to the open transaction, beginning it where none is open.

        Raises:
            StreamError: the database refused (full disk).

        """
        self.write_all(statement, [values])

    def write_all(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """As :meth:`write`, once for each of ``rows``."""
        self._round.append((statement, list(rows)))
        try:
            self._execute(*self._round[-1])
        except sqlite3.OperationalError as error:
            raise self._refused(error) from error

    def _execute(self, statement: str, rows: list[Sequence[Any]]) -> None:
        if not self._database.in_transaction:
            self._database.execute("BEGIN IMMEDIATE")
        self._database.executemany(statement, rows)

    def _refused(self, error: sqlite3.OperationalError) -> StreamError:
        """The error to raise: a full disk may pass, anything else will not."""
        code = error.sqlite_errorcode & 0xFF
        space = os.statvfs(self.path.parent)
        full = code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and space.f_bavail * space.f_frsize < _LITTLE_SPACE_BYTES)
        kind = DiskFull if full else StreamError
        return kind(f"cannot write {self.path}: {error}; free space there{' and the run goes on' if full else ' and run again with --resume'}")

    def _settle(self) -> None:
        """Writes the groups, members and appends that were only noted: each once a round, whatever happened to it in between."""
        for table, noted in self._noted.items():
            if noted:
                rows = list(noted.values())
                noted.clear()  # only groups ever change
                self.write_all(f"INSERT{' OR REPLACE' if table == 'groups' else ''} INTO {table} VALUES({', '.join('?' * len(rows[0]))})", rows)

    def commit(self) -> None:
        """Ends the open transaction, if any: its changes survive the death of the process.

        Raises:
            DiskFull: nothing of it was written; commit again once there is space, and all of it will be.
            StreamError: the database refused for another reason.

        """
        self._settle()
        try:
            if self._round and not self._database.in_transaction:  # SQLite rolls back what it could not commit
                for statement, rows in self._round:
                    self._execute(statement, rows)
            if self._database.in_transaction:
                self._database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise self._refused(error) from error
        self._round.clear()

    def abandon(self) -> None:
        """Forgets what was not committed."""
        for noted in self._noted.values():
            noted.clear()
        self._round.clear()
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def flush_to_disk(self) -> None:
        """Makes what was committed survive power loss, without a transaction of its own."""
        flush_file(Path(f"{self.path}-wal"))  # SQLite takes its locks on other files, so closing this one drops none

    def sync(self) -> None:
        """Makes everything committed survive power loss (the write-ahead log is flushed to the disk)."""
        self.commit()
        self._database.execute("PRAGMA synchronous = FULL")
        self.write("INSERT OR REPLACE INTO meta VALUES('synced_append_id', (SELECT ifnull(max(append_id), 0) FROM appends))")
        self.commit()
        self._database.execute("PRAGMA synchronous = NORMAL")
        self.synced_append_id = int(self.meta("synced_append_id"))

    def close(self) -> None:
        """Commits and closes."""
        try:
            self.commit()
        finally:
            self._database.close()

    @contextlib.contextmanager
    def snapshot(self) -> Generator[None, None, None]:
        """Everything read inside is of one moment, whatever the buffer goes on to write."""
        self._database.execute("BEGIN")
        try:
            yield
        finally:
            self._database.execute("ROLLBACK")

    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """What ``query`` finds."""
        self._settle()
        return self._database.execute(query, values)

    def meta(self, key: str) -> Any:
        """One value of the meta table, None where it was never set."""
        found = self._database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone() if self._has_tables() else None
        return None if found is None else found[0]

    def set_meta(self, key: str, value: str | float | None) -> None:
        """Sets one value of the meta table."""
        self.write("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, value))

    def _has_tables(self) -> bool:
        return self._database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is not None

    # --- groups and members ---------------------------------------------------------------------------------------------------------

    def put_group(self, group: GroupRow) -> None:
        """Adds a group or replaces what is known of it."""
        self._noted["groups"][group.group_id] = group

    def set_states(self, group_ids: Iterable[int], state: GroupState, version: int | None) -> None:
        """Moves groups to ``state``, in the batch of ``version``."""
        self._settle()
        self.write_all("UPDATE groups SET state = ?, version = ?, holder = NULL WHERE group_id = ?", [(state, version, group_id) for group_id in group_ids])

    def put_member(self, member: MemberRow) -> None:
        """Records a committed member."""
        self._noted["members"][member.group_id, member.member] = member

    def set_reward(self, group_id: int, member: int, reward: float) -> None:
        """Gives a committed member the reward that came later."""
        self._settle()
        self.write("UPDATE members SET reward = ? WHERE group_id = ? AND member = ?", (reward, group_id, member))

    def put_failure(self, group_id: int, member: int, attempt: int, reason: str) -> None:
        """Records a failed attempt that will be played again."""
        self.write("INSERT OR IGNORE INTO failures VALUES(?, ?, ?, ?)", (group_id, member, attempt, reason))

    def put_unplayed(self, group_id: int, members: Iterable[int]) -> None:
        """Records the members that a group was closed without."""
        self.write_all("INSERT OR IGNORE INTO unplayed VALUES(?, ?, NULL, NULL)", [(group_id, member) for member in members])

    def put_late(self, group_id: int, member: int, num_tokens: int, reward: float | None) -> bool:
        """Records what came for a member that its group was closed without; False where something had come already, or the group does have it."""
        waiting = "SELECT 1 FROM unplayed WHERE group_id = ? AND member = ? AND num_tokens IS NULL"
        if next(self.rows(waiting, (group_id, member)), None) is None:
            return False
        self.write("UPDATE unplayed SET num_tokens = ?, reward = ? WHERE group_id = ? AND member = ?", (num_tokens, reward, group_id, member))
        return True

    def group(self, group_id: int) -> GroupRow | None:
        """One group, None where it was never leased."""
        return next(map(GroupRow._make, self.rows("SELECT * FROM groups WHERE group_id = ?", (group_id,))), None)

    def unassigned(self) -> list[GroupRow]:
        """Open and ready groups, oldest lease first."""
        return [GroupRow(*row) for row in self.rows("SELECT * FROM groups WHERE state IN ('open', 'ready') ORDER BY sequence")]

    def members(self, group_id: int) -> list[MemberRow]:
        """Committed members of a group, in order."""
        return self.members_of([group_id])

    def members_of(self, group_ids: Sequence[int]) -> list[MemberRow]:
        """Committed members of several groups, in one question."""
        query = "SELECT * FROM members WHERE group_id IN (SELECT value FROM json_each(?)) ORDER BY group_id, member"
        return list(map(MemberRow._make, self.rows(query, (_json(group_ids),))))

    def failures(self, group_id: int) -> dict[tuple[int, int], str]:
        """Reason of each of a group's failed attempts, by (member, attempt)."""
        found = self.rows("SELECT member, attempt, reason FROM failures WHERE group_id = ?", (group_id,))
        return {(member, attempt): reason for member, attempt, reason in found}

    def unplayed(self, group_id: int) -> set[int]:
        """Members that a group was closed without."""
        return {member for (member,) in self.rows("SELECT member FROM unplayed WHERE group_id = ?", (group_id,))}

    def counts(self) -> dict[str, int]:
        """Groups per state, over the whole run; reads every group, so it is for starts and audits."""
        return dict(self.rows("SELECT state, count(*) FROM groups GROUP BY state"))

    def num_groups(self) -> int:
        """Groups ever leased: their ids count from 0."""
        return next(self.rows("SELECT ifnull(max(group_id), -1) + 1 FROM groups"))[0]

    # --- appends --------------------------------------------------------------------------------------------------------------------

    def put_append(self, append_id: int, location: Location, num_rows: int, num_trajectories: int) -> None:
        """Records where an append lies and what it holds."""
        self._noted["appends"][append_id] = (append_id, *location[:3], f"{location.checksum:016x}", num_rows, num_trajectories)

    def append(self, append_id: int) -> tuple[Location, int]:
        """Where an append lies, and how many trajectories it holds."""
        return self.appends([append_id])[0][1:]

    def appends(self, append_ids: Sequence[int]) -> list[tuple[int, Location, int]]:
        """The same of several, each with its id, in one question."""
        found = self.rows("SELECT * FROM appends WHERE append_id IN (SELECT value FROM json_each(?)) ORDER BY append_id", (_json(append_ids),))
        return [(append_id, Location(segment, offset, size, int(digits, 16)), num) for append_id, segment, offset, size, digits, _, num in found]

    def locations(self, first: int = 1) -> Iterator[tuple[int, Location]]:
        """Every append from id ``first`` on, in order."""
        query = "SELECT append_id, segment, offset, size_bytes, checksum FROM appends WHERE append_id >= ? ORDER BY append_id"
        for append_id, segment, offset, size_bytes, checksum in self.rows(query, (first,)):
            yield append_id, Location(segment, offset, size_bytes, int(checksum, 16))

    def segment_ends(self) -> dict[int, int]:
        """Bytes each log segment must hold, but for those sealed or removed; reads every append, so it is for starts and audits."""
        query = "SELECT segment, max(offset + size_bytes) FROM appends WHERE segment NOT IN (SELECT segment FROM segments) GROUP BY segment"
        return dict(self.rows(query))

    def last_segment(self) -> int:
        """The highest number a log segment ever had; 0 where there was none."""
        query = "SELECT max(ifnull((SELECT segment FROM appends ORDER BY append_id DESC LIMIT 1), 0), ifnull((SELECT max(segment) FROM segments), 0))"
        return next(self.rows(query))[0]

    def unsynced(self) -> list[tuple[int, Location]]:
        """Appends that no sync covered yet."""
        return list(self.locations(1 + self.synced_append_id))

    def last_append_id(self) -> int:
        """Id of the newest append; 0 where there is none."""
        return next(self.rows("SELECT ifnull(max(append_id), 0) FROM appends"))[0]

    # --- sealed segments ------------------------------------------------------------------------------------------------------------

    def segments(self) -> list[tuple[SealedFile, bool]]:
        """Sealed segments in order, and whether retention removed them."""
        query = "SELECT segment, last_append_id, size_bytes, checksum, num_rows, removed FROM segments ORDER BY segment"
        return [(SealedFile(*row[:5]), bool(row[5])) for row in self.rows(query)]

    def put_segment(self, sealed: SealedFile) -> None:
        """Records a sealed segment."""
        self.write("INSERT OR REPLACE INTO segments VALUES(?, ?, ?, ?, ?, 0)", sealed)

    def remove_segment(self, segment: int) -> None:
        """Records that retention removed a sealed segment, the oldest that was left."""
        self.write("UPDATE segments SET removed = 1 WHERE segment = ?", (segment,))
        self._note_removed()

    def _note_removed(self) -> None:
        self.removed_up_to: int = next(self.rows("SELECT ifnull(max(last_append_id), 0) FROM segments WHERE removed = 1"))[0]
        """The last append whose rows retention removed; 0 where it removed none."""

    def next_segment(self, last_append_id: int) -> list[StoredAppend]:
        """Every append of the segment that begins after ``last_append_id``; empty where none does."""
        query = "SELECT append_id, offset, size_bytes, checksum, num_rows, segment FROM appends WHERE append_id > ? ORDER BY append_id"
        for _, rows in itertools.groupby(self.rows(query, (last_append_id,)), key=lambda row: row[-1]):
            return [StoredAppend(row[0], row[1], row[2], int(row[3], 16), row[4]) for row in rows]
        return []

    def segment_after(self, last_append_id: int) -> int | None:
        """The segment of the first append after ``last_append_id``; None where there is none."""
        query = "SELECT segment FROM appends WHERE append_id > ? ORDER BY append_id LIMIT 1"
        return next((segment for (segment,) in self.rows(query, (last_append_id,))), None)

    def first_segment_of(self, first_group: int) -> int | None:
        """The first log segment with rows of this group or a later one; None where there are no such rows yet."""
        query = "SELECT segment FROM appends WHERE append_id = (SELECT min(append_id) FROM members WHERE group_id >= ?)"
        return next((segment for (segment,) in self.rows(query, (first_group,))), None)

    # --- batches --------------------------------------------------------------------------------------------------------------------

    def put_batch(self, batch: BatchRow) -> None:
        """Records a batch."""
        values = (batch.lineage, batch.version, _json(batch.groups), _json(batch.withheld), batch.max_lag, batch.lag_bound)
        self.write("INSERT INTO batches VALUES(?, ?, ?, ?, ?, ?)", values)

    def batch(self, lineage: int, version: int) -> BatchRow | None:
        """The batch that makes ``version`` in the history of ``lineage``, None where it was not yet formed."""
        return next(self.batches(lineage, version, version), None)

    def batches(self, lineage: int, first: int = 1, last: int = NEVER) -> Iterator[BatchRow]:
        """Recorded batches ``first`` to ``last`` of the history of ``lineage``, in order; each names the lineage that formed it."""
        query = "SELECT version, groups, withheld, max_lag, lag_bound FROM batches WHERE lineage = ? AND version BETWEEN ? AND ? ORDER BY version"
        for span in self.lineages().spans(lineage):
            for version, groups, withheld, max_lag, lag_bound in self.rows(query, (span.lineage, max(first, span.first), min(last, span.last))):
                yield BatchRow(span.lineage, version, _ids.decode(groups), _pairs.decode(withheld), max_lag, lag_bound)

    def all_batches(self) -> list[BatchRow]:
        """Every recorded batch of every lineage, abandoned or not."""
        return [
            BatchRow(lineage, version, _ids.decode(groups), _pairs.decode(withheld), max_lag, lag_bound)
            for lineage, version, groups, withheld, max_lag, lag_bound in self.rows("SELECT * FROM batches ORDER BY lineage, version")
        ]

    def last_batch(self, lineage: int) -> int:
        """Version of the newest recorded batch in the history of ``lineage``; where the lineage has none, that of its fork."""
        fork = self.lineages().fork_of(lineage)
        return next(self.rows("SELECT ifnull(max(version), ?) FROM batches WHERE lineage = ? AND version > ?", (fork.version, lineage, fork.version)))[0]

    def digest(self, lineage: int, version: int) -> str | None:
        """Digest of a version's weights in the history of ``lineage``, None where it was not yet published."""
        values = (self.lineages().owner(lineage, version), version)
        return next((digest for (digest,) in self.rows("SELECT digest FROM versions WHERE lineage = ? AND version = ?", values)), None)

    def put_digest(self, lineage: int, version: int, digest: str) -> None:
        """Records the digest of a version's weights in the history of ``lineage``."""
        self.write("INSERT INTO versions VALUES(?, ?, ?)", (self.lineages().owner(lineage, version), version, digest))

    # --- lineages -------------------------------------------------------------------------------------------------------------------

    def lineages(self) -> Lineages:
        """The tree of lineages."""
        return Lineages(Fork(*row) for row in self.rows("SELECT lineage, parent, version, reason FROM forks"))

    def put_fork(self, fork: Fork) -> None:
        """Records where a new lineage begins."""
        self.write("INSERT INTO forks VALUES(?, ?, ?, ?)", fork)


def _json(values: Sequence[Any]) -> str:
    return msgspec.json.encode(values).decode()
