"""Pulls of the learner's ranks: those that wait for a batch, and what answers them."""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

from ..configs.schema import Config
from ..errors import Corrupt, Refused
from . import wire
from .books import Books
from .columns import Rows
from .deal import costs, deal
from .facts import Fact
from .gather import gather, places, read_header
from .header import Entry, Member, entries
from .ledger import BatchRow
from .log import Log
from .peers import Peer
from .types import Header

_PARK_S = 1.0
"""After this long a rank hears what it waits for."""
_MAX_RANKS = 4096


class Answer(NamedTuple):
    """What goes back to a rank."""

    route: bytes
    request_id: int
    message: wire.ServerMessage
    frames: list[pa.Buffer]


class _Parked(msgspec.Struct):
    """A pull that waits for its batch."""

    route: bytes
    request_id: int
    pull: wire.PullBatch
    since: float


class Pulls:
    """At most one pull per peer. ``books`` say which groups make a batch, ``log`` has their rows."""

    def __init__(self, config: Config, books: Books, log: Log) -> None:
        self._config, self._books, self._log = config, books, log
        self._parked: dict[str, _Parked] = {}
        self._header: tuple[int, int, Header] | None = None
        self._entries: dict[Member, Entry] = {}

    def __bool__(self) -> bool:
        return bool(self._parked)

    def park(self, peer: Peer, pull: wire.PullBatch, request_id: int, now: float) -> None:
        """Takes a pull in; it is answered with the next :meth:`answers` that can.

        Raises:
            Refused: a version that is neither recorded nor next, or a rank that cannot be.

        """
        if not 0 <= pull.rank < pull.ranks <= _MAX_RANKS:
            raise Refused("malformed", f"rank {pull.rank} of {pull.ranks} asks for its rows; ranks count from 0, and there are at most {_MAX_RANKS}")
        if not 1 <= pull.version <= self._books.last_batch + 1:
            self._books.batch(pull.version)  # raises the refusal
        self._parked[peer.peer_id] = _Parked(peer.route, request_id, pull, now)

    def note(self, rows: Rows, found: Sequence[Fact], stored: Sequence[Fact]) -> None:
        """Remembers of stored trajectories what the header of their batch will say, so that it needs no rows read back."""
        of_all = entries(rows, [segment for fact in found for segment in fact.segments])
        self._entries |= {key: of_all[key] for fact in stored if (key := (fact.group_id, fact.member))}

    def forget(self, peer_id: str) -> None:
        """The peer is gone."""
        self._parked.pop(peer_id, None)

    def put_off(self, now: float, reason: str) -> list[Answer]:
        """Tells whoever has waited long enough for a batch why there is none."""
        late = [(peer_id, parked) for peer_id, parked in self._parked.items() if now - parked.since >= _PARK_S]
        for peer_id, _ in late:
            del self._parked[peer_id]
        return [Answer(parked.route, parked.request_id, wire.Wait(reason), []) for _, parked in late]

    def answers(self, now: float, stop_reason: str | None) -> Iterator[Answer]:
        """Answers every pull whose batch is there, and those that waited long with the reason; ``stop_reason`` ends them all."""
        if self._parked:
            self._log.flush()
        for peer_id, parked in list(self._parked.items()):
            answer = Answer(parked.route, parked.request_id, wire.Stop(stop_reason), []) if stop_reason is not None else self._answer(parked, now)
            if answer is not None:
                del self._parked[peer_id]
                yield answer

    def _answer(self, parked: _Parked, now: float) -> Answer | None:
        recorded = parked.pull.version <= self._books.last_batch
        try:
            batch = self._books.batch(parked.pull.version)
            if batch is not None:
                return Answer(parked.route, parked.request_id, *self._rows(parked.pull, batch, recorded=recorded))
        except Refused as error:
            return Answer(parked.route, parked.request_id, wire.Refused(msgspec.convert(error.code, wire.RefusalCode), str(error.args[1])), [])
        except Corrupt as error:
            return Answer(parked.route, parked.request_id, wire.Refused("corrupt", str(error)), [])
        if now - parked.since < _PARK_S:
            return None
        return Answer(parked.route, parked.request_id, wire.Wait(self._books.waits_for()), [])

    def _rows(self, pull: wire.PullBatch, batch: BatchRow, *, recorded: bool) -> tuple[wire.BatchReply, list[pa.Buffer]]:
        """The header of the whole batch, and the rows dealt to the rank that asks."""
        ledger = self._books.ledger
        rows = ledger.members_of(batch.groups)
        if self._header is None or self._header[:2] != (batch.lineage, batch.version):  # the other ranks ask for the same one
            made = read_header(ledger, self._log, rows, batch.groups, self._books.shared(batch), self._entries)
            self._header = (batch.lineage, batch.version, made)
            self._entries = {key: entry for key, entry in self._entries.items() if self._books.is_unassigned(key[0])}
        header = self._header[2]
        if pull.ranks > 1:
            tokens = costs(header, set(batch.withheld), self._config.learner.advantage, self._config.buffer.degenerate)
            dealt = {(header.group_ids[index], header.members[index]) for index in deal(tokens, pull.ranks)[pull.rank]}
            rows = [row for row in rows if (row.group_id, row.member) in dealt]
        identity = (batch.lineage, batch.version, batch.groups, batch.withheld, recorded)
        if pull.mapped:
            pieces = [wire.Piece(*place.location, [] if place.whole else place.keys) for place in places(ledger, rows)]
            return wire.BatchReply(*identity, [], len(rows), header, pieces), []
        frames, checksums = gather(ledger, self._log, rows, self._config.buffer.compression)
        return wire.BatchReply(*identity, checksums, len(rows), header), frames
