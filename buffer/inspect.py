"""Looking at a run's trajectories from the outside: listed and filtered by the ledger, read from the log, queried with SQL.

Reads only, also beside a live buffer, and keeps no lock: what the ledger says is read at once, files after that. Segments may be sealed or removed in between:
rows are found in either form, and those that retention removed are left out and counted. A listing opens no segment; a trajectory or an export reads only the
appends that hold its rows, checksums verified.

SQL goes through DuckDB over six views: ``members`` (one row per trajectory: what became of it), ``trajectories`` (one row per segment: every column of the
stream, with ``state``, ``trained_version``, ``lag`` and ``withheld``), ``groups`` and ``batches``.
"""

# pyarrow and duckdb ship no complete types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from ..errors import ConfigError, MissingExtra
from .columns import SCHEMA, decode, rows_of, with_reward
from .evaluation_tables import FIRST_GROUP
from .lineages import Lineages
from .recorded import Segments, open_ledger
from .types import Purpose, Trajectory

_OTHER_FILES = 256  # that a process has open beside the sealed segments
VIEWS = ("trajectories", "members", "groups", "batches", "evaluations", "amendments")


@dataclass(frozen=True, slots=True)
class Filter:
    """Which trajectories are meant; None does not filter.

    ``version`` is the one they were trained in, or the one that an evaluation is pinned to; rewards are exclusive bounds. Groups of evaluations have ids from
    :data:`~rollstream.buffer.evaluation_tables.FIRST_GROUP` on.
    """

    group: int | None = None
    version: int | None = None
    status: str | None = None
    env: str | None = None
    reward_below: float | None = None
    reward_above: float | None = None
    purpose: Purpose | None = None
    limit: int | None = None

    def where(self) -> tuple[str, list[Any]]:
        """As SQL over :data:`_COMMITTED`."""
        terms = {
            "group_id = ?": self.group,
            "version = ?": self.version,
            "status = ?": self.status,
            "env_id = ?": self.env,
            "reward < ?": self.reward_below,
            "reward > ?": self.reward_above,
            "purpose = ?": self.purpose,
        }
        chosen = {term: value for term, value in terms.items() if value is not None}
        return " AND ".join(chosen) or "1", list(chosen.values())


class Listed(NamedTuple):
    """One committed trajectory and what became of it.

    ``trained_version`` is the version its batch makes, ``lag`` what it was (or will be) trained with: None for a group in no batch, for a withheld trajectory,
    and where nothing was sampled.
    """

    group_id: int
    member: int
    attempt: int
    env_id: str
    reward: float | None
    status: str
    stop_reason: str
    num_tokens: int
    num_trained_tokens: int
    min_version: int | None
    max_version: int | None
    state: str
    trained_version: int | None
    lag: int | None
    withheld: bool
    lineage: int
    append_id: int
    purpose: str


_MEMBERS_TABLE = pa.schema(
    [
        *((name, pa.int64()) for name in ("group_id", "member", "attempt")),
        ("env_id", pa.string()),
        ("reward", pa.float64()),
        *((name, pa.string()) for name in ("status", "stop_reason")),
        *((name, pa.int64()) for name in ("num_tokens", "num_trained_tokens", "min_version", "max_version")),
        ("state", pa.string()),
        *((name, pa.int64()) for name in ("trained_version", "lag")),
        ("withheld", pa.bool_()),
        *((name, pa.int64()) for name in ("lineage", "append_id")),
        ("purpose", pa.string()),
    ]
)
_OF_MEMBER = "m.reward, m.status, m.stop_reason, m.num_tokens, m.num_trained_tokens, m.min_version, m.max_version"
_COMMITTED = f"""(
SELECT m.group_id, m.member, m.attempt, g.env_id, {_OF_MEMBER}, g.state, g.version AS trained_version, m.lineage, m.append_id, 'train' AS purpose, g.version
FROM members m JOIN groups g USING (group_id)
UNION ALL
SELECT m.group_id, m.member, m.attempt, g.env_id, {_OF_MEMBER}, g.state, NULL, e.lineage, m.append_id, 'eval', e.version
FROM evaluation_members m JOIN evaluation_groups g USING (group_id) JOIN evaluations e USING (evaluation_id))
"""  # noqa: S608 - our own names
"""Every committed trajectory; ``version`` is that of its batch, or the one its evaluation is pinned to."""
_KNOWN = (
    "group_id, member, attempt, env_id, reward, status, stop_reason, num_tokens, num_trained_tokens, min_version, max_version, "
    "state, trained_version, lineage, append_id, purpose"
)
_REWARD = SCHEMA.get_field_index("reward")
_ADDED = ("state", "trained_version", "lag", "withheld")
EXPORTED = pa.schema([*SCHEMA, *(_MEMBERS_TABLE.field(name) for name in _ADDED)])
"""Columns of an export: those of the stream, and what became of the trajectory."""


class Inspector:
    """The stream of the run in ``folder``, open for reading; a context manager.

    Raises:
        RunFolderError: there is no ledger.

    """

    def __init__(self, folder: Path) -> None:
        self._ledger = open_ledger(folder)
        self._segments = Segments(folder / "stream", self._ledger)
        self.num_removed = 0
        """Trajectories that :meth:`tables` left out, since retention removed their rows."""

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.close()

    # --- what there is --------------------------------------------------------------------------------------------------------------

    def count(self, chosen: Filter) -> int:
        """How many trajectories a filter means, whatever its limit."""
        where, values = chosen.where()
        return next(self._ledger.rows(f"SELECT count(*) FROM {_COMMITTED} WHERE {where}", values))[0]  # noqa: S608 - fixed terms

    def listed(self, chosen: Filter) -> list[Listed]:
        """The trajectories a filter means, in the order of (group, member); with a limit, the newest."""
        with self._ledger.snapshot():
            return self._listed(chosen)

    def _listed(self, chosen: Filter) -> list[Listed]:
        where, values = chosen.where()
        query = f"SELECT {_KNOWN} FROM {_COMMITTED} WHERE {where} ORDER BY group_id DESC, member DESC LIMIT ?"  # noqa: S608
        rows = list(self._ledger.rows(query, [*values, -1 if chosen.limit is None else chosen.limit]))
        versions = [row[12] for row in rows if row[12] is not None]
        lineages = self._ledger.lineages()
        batches = list(self._ledger.batches(lineages.current, min(versions), max(versions))) if versions else []
        withheld = {pair for batch in batches for pair in batch.withheld}
        owners = {batch.version: batch.lineage for batch in batches}
        return [_listed(row, (row[0], row[1]) in withheld, owners.get(row[12], 0), lineages) for row in reversed(rows)]

    def awaited(self) -> list[Listed]:
        """Trajectories that wait for a score that comes later, oldest first; see :class:`rollstream.buffer.client.ScorerClient`."""
        listed = self.listed(Filter())
        return [one for one in listed if one.purpose == "train" and one.state == "open" and one.reward is None and one.status != "failed"]

    def envs(self) -> list[str]:
        """Every environment that was leased."""
        return sorted(env_id for (env_id,) in self._ledger.rows("SELECT env_id FROM groups UNION SELECT env_id FROM evaluation_groups"))

    # --- rows -----------------------------------------------------------------------------------------------------------------------

    def trajectory(self, group_id: int, member: int) -> tuple[Listed, Trajectory]:
        """One trajectory with all its tokens.

        Raises:
            ConfigError: it was not committed, or its rows were removed by retention.
            Corrupt: its rows are damaged.

        """
        found = [listed for listed in self.listed(Filter(group=group_id)) if listed.member == member]
        if not found:
            group = self._ledger.group(group_id)
            if group_id >= FIRST_GROUP:
                raise ConfigError(f"no evaluation has a finished member {member} of group e{group_id - FIRST_GROUP}; list them with --purpose eval")
            if group is None:
                raise ConfigError(f"group {group_id} was never leased; there are {self._ledger.num_groups()}, counted from 0")
            done = [str(known.member) for known in self._ledger.members(group_id)]
            raise ConfigError(
                f"group {group_id} has no finished member {member}: it has {group.num_members} members, of which {', '.join(done) or 'none'} finished; "
                f"list them with --group {group_id}"
            )
        batch = next((batch for _, batch in self._batches(found)), None)
        if batch is None:
            raise ConfigError(f"group {group_id} member {member}: its rows were removed by retention (buffer.keep_gb); only its line in the list is left")
        return found[0], with_reward(decode(batch)[0], found[0].reward)

    def tables(self, listed: Iterable[Listed]) -> Iterator[pa.Table]:
        """The rows of these trajectories in :data:`EXPORTED`, append by append.

        Raises:
            Corrupt: rows are damaged.

        """
        for owners, batch in self._batches(listed):
            columns = [*batch.columns, *(pa.array([getattr(owner, name) for owner in owners], _MEMBERS_TABLE.field(name).type) for name in _ADDED)]
            columns[_REWARD] = pa.array([owner.reward for owner in owners], pa.float64())  # with those that came later
            yield pa.Table.from_arrays(columns, schema=EXPORTED)

    def _batches(self, listed: Iterable[Listed]) -> Iterator[tuple[list[Listed], pa.RecordBatch]]:
        """Rows of these trajectories, with the trajectory that each belongs to; what retention removed is only counted."""
        wanted: dict[int, dict[tuple[int, int, int], Listed]] = {}
        for one in listed:
            wanted.setdefault(one.append_id, {})[one[:3]] = one
        for append_id in sorted(wanted):
            batch = self._segments.read(self._ledger.append(append_id)[0])
            if batch is None:
                self.num_removed += len(wanted[append_id])
                continue
            keys = list(zip(*(batch.column(name).to_pylist() for name in ("group_id", "member", "attempt")), strict=True))
            rows = [row for row, key in enumerate(keys) if key in wanted[append_id]]
            yield [wanted[append_id][keys[row]] for row in rows], rows_of(batch, rows)

    # --- SQL ------------------------------------------------------------------------------------------------------------------------

    def query(self, sql: str) -> pa.Table:
        """What one SQL statement finds in the views; a view that it does not name is not loaded.

        Raises:
            ConfigError: DuckDB refused the statement.
            MissingExtra: DuckDB is not installed.

        """
        try:
            import duckdb
        except ImportError:
            raise MissingExtra("--sql needs DuckDB: pip install duckdb") from None
        named = {name for name in VIEWS if re.search(rf"\b{name}\b", sql, re.IGNORECASE)}
        with contextlib.ExitStack() as opened, duckdb.connect() as database:
            database.execute("SET threads = 2")
            sealed = [opened.enter_context(file) for file in self._register(database.register, named)]
            files = [f"/proc/self/fd/{file.fileno()}" for file in sealed]
            if "trajectories" in named:
                database.execute(_trajectories_view(files))
            # DuckDB asks what a path resolves to: a name that retention takes away meanwhile resolves to itself, "(deleted)"
            names = [str(Path(file.name).resolve()) for file in sealed]
            database.execute(f"SET allowed_paths = {[*files, *names, *(f'{name} (deleted)' for name in names)]}")
            database.execute("SET enable_external_access = false")
            database.execute("SET lock_configuration = true")
            try:
                found: Any = database.sql(sql)
            except duckdb.Error as error:
                raise ConfigError(f"--sql: {' '.join(str(error).split())}; the views are {', '.join(VIEWS)}") from None
            if found is None:
                raise ConfigError("--sql: the statement gives no rows; write one that selects")
            try:
                return found.to_arrow_table()
            except duckdb.Error as error:
                raise ConfigError(f"--sql: {' '.join(str(error).split())}") from None

    def _register(self, register: Callable[[str, pa.Table], object], named: set[str]) -> list[BinaryIO]:
        """Gives DuckDB the tables behind the views, all of one moment; the result are the sealed files, which it reads itself.

        They are given open, so that retention takes none of them away from a statement that has begun.
        """
        with self._ledger.snapshot():
            for name in ("groups", "batches", "evaluations", "amendments"):
                if name in named:
                    register(name, self._table(name))
            if named & {"members", "trajectories"}:
                register("members", _table_of(self._listed(Filter())))
            if "trajectories" not in named:
                return []
            segments = {sealed.segment: removed for sealed, removed in self._ledger.segments()}
            unsealed = [location for _, location in self._ledger.locations() if location.segment not in segments]
        batches = [batch for location in unsealed if (batch := self._segments.read(location)) is not None]
        register("unsealed_rows", pa.Table.from_batches(batches, SCHEMA))
        kept = [segment for segment, removed in sorted(segments.items()) if not removed]
        _allow_files(len(kept))
        return [file for segment in kept if (file := self._segments.open_sealed(segment)) is not None]

    def _table(self, name: str) -> pa.Table:
        if name == "batches":
            batches = self._ledger.all_batches()
            columns = {field: [getattr(batch, field) for batch in batches] for field in ("lineage", "version", "groups", "max_lag", "lag_bound")}
            lineages = self._ledger.lineages()
            columns["surviving"] = [lineages.shares(batch.lineage, batch.version) for batch in batches]
            withheld = [[{"group_id": group_id, "member": member} for group_id, member in batch.withheld] for batch in batches]
            return pa.table({**columns, "withheld": pa.array(withheld, pa.list_(pa.struct([("group_id", pa.int64()), ("member", pa.int64())])))})
        types = {"TEXT": pa.string(), "INTEGER": pa.int64(), "REAL": pa.float64()}
        columns = [(row[1], types[row[2]]) for row in self._ledger.rows(f"PRAGMA table_info({name})")]
        rows = list(self._ledger.rows(f"SELECT * FROM {name} ORDER BY 1"))  # noqa: S608 - one of our own names
        return pa.table({column: pa.array([row[place] for row in rows], kind) for place, (column, kind) in enumerate(columns)})


def _allow_files(num: int) -> None:
    """Lets this process have that many more files open, where the machine lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(hard, wanted), hard))


def _listed(row: tuple[Any, ...], withheld: bool, learner: int, lineages: Lineages) -> Listed:
    *known, state, version, lineage, append_id, purpose = row
    oldest, newest = known[9:11]
    lag = None if version is None or oldest is None or withheld else version - 1 - lineages.reckoned(lineage, oldest, newest, learner)
    return Listed._make((*known, state, version, lag, withheld, lineage, append_id, purpose))


def _table_of(listed: list[Listed]) -> pa.Table:
    columns = zip(*listed, strict=True) if listed else [[] for _ in _MEMBERS_TABLE]
    return pa.Table.from_arrays([pa.array(column, field.type) for column, field in zip(columns, _MEMBERS_TABLE, strict=True)], schema=_MEMBERS_TABLE)


def _trajectories_view(files: list[str]) -> str:
    sealed = f" UNION ALL BY NAME SELECT * FROM read_parquet({files})" if files else ""  # noqa: S608 - our own names
    added = ", ".join(f"members.{name}" for name in _ADDED)
    rows = "rows.* REPLACE (members.reward AS reward)"  # with those that came later
    join = "JOIN members ON (members.group_id = rows.group_id AND members.member = rows.member AND members.attempt = rows.attempt)"
    return f"CREATE TEMP VIEW trajectories AS SELECT {rows}, {added} FROM (SELECT * FROM unsealed_rows{sealed}) rows {join}"  # noqa: S608 - our own names
