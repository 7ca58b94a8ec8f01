"""What the buffer does with each message.

A handler changes the books and queues its answer; answers leave only after :meth:`Handlers.commit`. Anything malformed, of another run, another protocol or
another schema version is refused with a code and a reason, counted, and never stored; no message can end the loop.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import zmq

from ..configs.run_folder import Run
from ..errors import Corrupt, DataRefused, Refused
from . import wire
from .amendments import Amendments
from .blob_store import BlobStore, digests_of
from .books import Books, Verdict
from .columns import SCHEMA_VERSION, Compression, Rows, aligned, from_frame, rows_of, stated_checksum, to_frame
from .evaluation_facts import played_of, purpose_of
from .evaluation_rules import EvaluationRules
from .evaluations import Evaluations
from .facts import Fact, facts
from .hold import Hold
from .holders import Holders
from .log import Log
from .peers import Peer, Peers, check_name, check_role
from .pulls import Pulls
from .status import status_of

logger = logging.getLogger(__name__)

Payload = Sequence[zmq.Frame]

_AWAY_S = 5.0  # without a round: many times what the longest one takes

_header = msgspec.msgpack.Decoder(wire.Envelope[msgspec.Raw])  # the message itself is decoded once protocol and run are known to be ours
_message = msgspec.msgpack.Decoder(wire.ClientMessage)
_encoder = msgspec.msgpack.Encoder()


class Handlers:
    """The state of the buffer between two polls: books, log, peers, the answers of this round."""

    def __init__(self, run: Run, books: Books, log: Log, amendments: Amendments) -> None:
        self.books = books
        self.evaluations = Evaluations(books.ledger, EvaluationRules.of(run.config))
        self.log = log
        self.amendments = amendments
        self.peers = Peers()
        self.round_bytes = 0
        self._run_id = run.run_id
        self._temperature = run.config.actors.sampling.temperature
        self._vocabulary: int | None = books.ledger.meta("vocabulary")
        self._compression: Compression = run.config.buffer.compression
        self._holders = Holders(books, self.evaluations, self.peers, run.config.buffer.lease_timeout_s)
        self._outbox: list[Sequence[Any]] = []
        self._pulls = Pulls(run.config, books, log)
        self.blobs = BlobStore(run.blobs_folder, books.ledger, books.counters, log.page_cache)
        self._next_append_id = books.ledger.last_append_id() + 1
        self._sync_wanted = False
        self.hold: Hold | None = None
        self._stopping_since: float | None = None
        self._stop_reason = ""
        self._ticked_at = math.inf
        self._handlers: dict[type[wire.Message], Callable[[Peer, Any, int, Payload, float], None]] = {
            wire.Credit: self._credit,
            wire.Append: self._append,
            **dict.fromkeys((wire.AskBlobs, wire.PutBlobs, wire.FetchBlobs), self._blobs),
            wire.Amend: self._amend,
            wire.Heartbeat: self._heartbeat,
            wire.Release: self._release,
            wire.PullBatch: self._pull,
            wire.Trained: self._trained,
            wire.Published: self._published,
            wire.Retained: self._retained,
            wire.Sync: self._sync,
            wire.StatusRequest: self._status,
            wire.Farewell: self._farewell,
        }

    # --- one round ------------------------------------------------------------------------------------------------------------------

    def receive(self, frames: Sequence[zmq.Frame], now: float) -> None:
        """Handles one message: ``frames`` are the route, the header, and the payload."""
        route = frames[0].bytes
        self.round_bytes += sum(len(frame) for frame in frames)
        request_id = 0
        try:
            if len(frames) < 2:
                raise Refused("malformed", "a message without a header frame")
            header = _header.decode(frames[1].buffer)
            request_id = header.request_id
            if header.protocol != wire.PROTOCOL_VERSION:
                raise Refused("wrong_protocol", f"protocol {header.protocol}, this buffer speaks {wire.PROTOCOL_VERSION}; install the same version everywhere")
            if header.run_id != self._run_id:
                raise Refused("wrong_run", f"a message of run {header.run_id}, this is the buffer of run {self._run_id}")
            message = _message.decode(header.message)
            if self.hold is not None and not self.hold.lets_through(message):
                self._hold_back(self.hold, message, request_id, frames, now)
                return
            if isinstance(message, wire.Hello):
                self._hello(route, message, request_id, now)
                return
            peer = self.peers.at(route)
            if peer is None:
                raise Refused("unknown_peer", "say Hello first: this buffer was started after you spoke to it, or you had been silent for too long")
            peer.last_heard = now
            check_role(peer.role, message)
            self._handlers[type(message)](peer, message, request_id, frames[2:], now)
        except Refused as error:
            self._refuse(route, request_id, error.code, str(error.args[1]))
        except Corrupt as error:
            self._refuse(route, request_id, "corrupt", str(error))
        except (DataRefused, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._refuse(route, request_id, "malformed", str(error))

    def tick(self, now: float, *, drained: bool) -> None:
        """What the clock and the changed books bring: leases that expire, leases to push, pulls to answer.

        Nobody is called silent while messages still wait to be read (``drained`` false).
        """
        if (away_s := now - self._ticked_at) > _AWAY_S:
            logger.warning("event=buffer_was_away seconds=%.1f reason='its process was stopped, or its machine asleep'", away_s)
            self._holders.postpone(away_s, now)
        self._ticked_at = now
        if drained:
            for pushed in self._holders.expire(now):
                self._push(*pushed)
            self.books.close_late(now)
        if self._stopping_since is None:
            for pushed in self._holders.grant(now):
                self._push(*pushed)
        for answer in self._pulls.answers(now, None if self._stopping_since is None else self._stop_reason):
            if isinstance(answer.message, wire.Refused):
                self._refuse(answer.route, answer.request_id, answer.message.code, answer.message.reason)
            else:
                self._send(*answer)

    def commit(self) -> None:
        """Makes this round durable: blobs, then the log, then the ledger.

        Raises:
            DiskFull: nothing may be answered yet; everything is kept, so that committing again goes on.

        """
        self.books.save_counters()
        self.evaluations.save_counters()
        self.blobs.flush()
        self.log.flush()
        self.amendments.flush()
        self.books.ledger.commit()
        if self._sync_wanted:
            self.blobs.sync()
            self.log.sync()
            self.amendments.sync()
            self.books.ledger.sync()
            self._sync_wanted = False
        self.log.release()
        self.round_bytes = 0

    # --- a full disk ----------------------------------------------------------------------------------------------------------------

    def begin_hold(self, reason: str) -> None:
        """The round cannot be committed: its answers stay here, and until :meth:`end_hold` only what changes nothing is answered."""
        self.hold = Hold(reason, self._outbox)
        self._outbox = []
        self.round_bytes = 0

    def end_hold(self, hold: Hold) -> list[Sequence[zmq.Frame]]:
        """The round is committed: its answers may leave. Gives the messages that were put aside, to be received anew."""
        self.hold = None
        self._ticked_at = time.monotonic()
        self._holders.postpone(hold.held_s, self._ticked_at)
        self._outbox = [*hold.outbox, *self._outbox]
        return list(hold.put_aside.values())

    def answer_waiting(self, now: float) -> None:
        """Tells whoever waits for a batch why there is none."""
        if self.hold is not None:
            for answer in self._pulls.put_off(now, self.hold.reason):
                self._send(*answer)

    def _hold_back(self, hold: Hold, message: wire.ClientMessage, request_id: int, frames: Sequence[zmq.Frame], now: float) -> None:
        route = frames[0].bytes
        peer = self.peers.at(route)
        if peer is not None:
            peer.last_heard = now
        if isinstance(message, wire.Append | wire.Amend | wire.PutBlobs):
            self.round_bytes = 0  # it is neither kept nor answered: the actor sends it again
            return
        if isinstance(message, wire.Heartbeat) and peer is not None:
            peer.counters, peer.gauges, peer.waiting_for = message.counters, message.gauges, message.waiting_for
        else:
            hold.put_aside[route, request_id] = frames
        self._send(route, request_id, wire.Wait(hold.reason))

    def take_outbox(self) -> list[Sequence[Any]]:
        """The answers of the committed round, as multipart messages."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def everybody_left(self, now: float, grace_s: float) -> bool:
        """Whether the supervisor told everybody to stop and nobody but it is left, or the grace is over."""
        if self._stopping_since is None:
            return False
        return all(peer.role == "supervisor" for peer in self.peers) or now - self._stopping_since > grace_s

    def unreachable(self, route: bytes) -> None:
        """The connection behind ``route`` is gone, so its process is: what it holds is offered again at once. If it lives it will say Hello and claim."""
        peer = self.peers.at(route)
        if peer is not None:
            logger.warning("event=peer_unreachable role=%s peer=%s", peer.role, peer.peer_id)
            self._holders.give_back(peer)
            self._pulls.forget(peer.peer_id)
            self.peers.leave(peer)

    def _push(self, route: bytes, message: wire.ServerMessage | None) -> None:
        if message is not None:
            self._send(route, 0, message)

    def _send(self, route: bytes, request_id: int, message: wire.ServerMessage, payload: Sequence[pa.Buffer] = ()) -> None:
        header = _encoder.encode(wire.Envelope(wire.PROTOCOL_VERSION, self._run_id, request_id, message))
        self._outbox.append((route, header, *payload))

    def _refuse(self, route: bytes, request_id: int, code: str, reason: str) -> None:
        if code != "unknown_peer":  # every client says Hello again after a restart: nothing is wrong
            self.count_refusal(code)
            logger.warning("event=refused code=%s reason=%r", code, reason)
        self._send(route, request_id, wire.Refused(msgspec.convert(code, wire.RefusalCode), reason))

    def count_refusal(self, code: str) -> None:
        """Counts what was refused, in all and by its code."""
        self.books.counters["refused"] += 1
        self.books.counters[f"refused_{code}"] += 1

    # --- peers ----------------------------------------------------------------------------------------------------------------------

    def _hello(self, route: bytes, hello: wire.Hello, request_id: int, now: float) -> None:
        if hello.schema_version != SCHEMA_VERSION:
            raise Refused(
                "wrong_schema", f"{hello.peer_id} writes schema version {hello.schema_version}, this buffer {SCHEMA_VERSION}; install the same version"
            )
        if hello.role in ("actor", "evaluator") and self.peers.was_replaced(hello.incarnation):
            raise Refused("replaced", f"another process is {hello.peer_id} by now; this one must end, or start again under a name of its own")
        check_name(hello.peer_id)
        self.books.tasks.announce(hello.tasks)
        if hello.role == "learner" and hello.vocabulary is not None:
            self._vocabulary = hello.vocabulary
            self.books.ledger.set_meta("vocabulary", hello.vocabulary)
        if hello.role == "learner" and hello.version is not None:
            self.books.resume(hello.version, hello.lineage)
        peer = self.peers.hello(route, hello, now)
        if hello.role in ("actor", "evaluator"):
            self._holders.greet(peer, hello.holding, now)
        logger.info("event=hello role=%s peer=%s holding=%d", hello.role, hello.peer_id, len(hello.holding))
        self._send(route, request_id, wire.Welcome(self.books.lineage, self.books.version, self.peers.credit_bytes()))
        self._push(route, self._holders.closed(peer, hello.holding))
        if self._stopping_since is not None and hello.role != "supervisor":
            self._push(route, wire.Stop(self._stop_reason))

    def _credit(self, peer: Peer, message: wire.Credit, request_id: int, payload: Payload, now: float) -> None:
        peer.credit = max(0, message.num_groups - (peer.num_pushed - message.num_received))

    def _heartbeat(self, peer: Peer, message: wire.Heartbeat, request_id: int, payload: Payload, now: float) -> None:
        peer.counters, peer.gauges, peer.waiting_for = message.counters, message.gauges, message.waiting_for
        self._holders.keep(peer, message.holding, now)
        self._send(peer.route, request_id, wire.Acknowledged())
        self._push(peer.route, self._holders.closed(peer, message.holding))

    def _release(self, peer: Peer, message: wire.Release, request_id: int, payload: Payload, now: float) -> None:
        self._holders.give_back(peer, message.group_ids)
        peer.credit = 0
        self._send(peer.route, request_id, wire.Acknowledged())

    def _farewell(self, peer: Peer, message: wire.Farewell, request_id: int, payload: Payload, now: float) -> None:
        self._send(peer.route, request_id, wire.Acknowledged())
        if message.everybody and self._stopping_since is None:
            self._stopping_since = now
            self._stop_reason = f"{peer.peer_id} ends the run"
            logger.info("event=stopping by=%s", peer.peer_id)
            for other in self.peers:
                if other.role != "supervisor":
                    self._push(other.route, wire.Stop(self._stop_reason))
        elif not message.everybody:
            self._holders.give_back(peer)
            self._pulls.forget(peer.peer_id)
            self.peers.leave(peer)

    # --- rows -----------------------------------------------------------------------------------------------------------------------

    def _append(self, peer: Peer, message: wire.Append, request_id: int, payload: Payload, now: float) -> None:
        if len(payload) != 1:
            raise Refused("malformed", f"an append has one record-batch frame, this one {len(payload)}")
        frame = aligned(payload[0].buffer)
        batch = from_frame(frame, message.checksum)
        self.books.counters["bytes_received"] += frame.size
        rows = Rows(batch)
        found = facts(rows, self._temperature, self._vocabulary)
        if len(found) != message.num_trajectories:
            raise Refused("malformed", f"{message.num_trajectories} trajectories announced, {len(found)} found")
        self._check_known(rows, found)
        digests = digests_of(batch)
        self.blobs.check_known(digests)
        verdicts, prefix = self._enter(rows, found)
        stored = [fact for fact, verdict in zip(found, verdicts, strict=True) if verdict == "store"]
        if stored:
            self.blobs.refer(digests, self._next_append_id)
            self._store(stored, frame, batch, message.checksum)
            if not prefix:
                self._pulls.note(rows, found, stored)
        counters = self.books.counters
        counters[f"{prefix}episodes"] += len(found) - verdicts.count("duplicate")
        counters[f"{prefix}duplicates"] += verdicts.count("duplicate")
        counters[f"{prefix}superseded"] += verdicts.count("superseded")
        self._send(peer.route, request_id, wire.Appended(len(stored), verdicts.count("superseded"), self.peers.credit_bytes()))

    def _blobs(self, peer: Peer, message: Any, request_id: int, payload: Payload, now: float) -> None:
        self._send(peer.route, request_id, *self.blobs.answer(message, payload, self._next_append_id))

    def _check_known(self, rows: Rows, found: list[Fact]) -> None:
        """Refuses what nobody was asked for, by the books of its purpose; nothing is changed."""
        if purpose_of(rows) == "eval":
            self.evaluations.check_known(played_of(rows, found))
        else:
            self.books.check_known(found)

    def _enter(self, rows: Rows, found: list[Fact]) -> tuple[list[Verdict], str]:
        """Enters trajectories into the books of their purpose: the verdicts, and what the names of their counters begin with."""
        if purpose_of(rows) == "eval":
            return [self.evaluations.receive(one, self._next_append_id, self.books.version) for one in played_of(rows, found)], "evaluation_"
        return [self.books.receive(fact, self._next_append_id) for fact in found], ""

    def _amend(self, peer: Peer, message: wire.Amend, request_id: int, payload: Payload, now: float) -> None:
        self._send(peer.route, request_id, self.amendments.answer(message, payload, self.books))

    def _store(self, stored: list[Fact], frame: pa.Buffer, batch: pa.RecordBatch, checksum: int) -> None:
        """Writes the frame as it came; where some of its rows were not accepted, a frame of the others."""
        num_rows = sum(fact.num_rows for fact in stored)
        if num_rows < batch.num_rows:
            frame = to_frame(rows_of(batch, [fact.first_row + index for fact in stored for index in range(fact.num_rows)]), self._compression)
            checksum = stated_checksum(frame)
        location = self.log.append(frame, checksum)
        self.books.ledger.put_append(self._next_append_id, location, num_rows, len(stored))
        self._next_append_id += 1
        counters = self.books.counters
        counters["appends"] += 1
        counters["rows_stored"] += num_rows
        counters["trajectories_stored"] += len(stored)
        counters["bytes_stored"] += frame.size

    # --- batches --------------------------------------------------------------------------------------------------------------------

    def _pull(self, peer: Peer, message: wire.PullBatch, request_id: int, payload: Payload, now: float) -> None:
        self._pulls.park(peer, message, request_id, now)

    def _trained(self, peer: Peer, message: wire.Trained, request_id: int, payload: Payload, now: float) -> None:
        self.books.trained(message.version)
        self.evaluations.check()
        self._send(peer.route, request_id, wire.Acknowledged())

    def _published(self, peer: Peer, message: wire.Published, request_id: int, payload: Payload, now: float) -> None:
        self._send(peer.route, request_id, wire.Acknowledged(self.books.published(message.version, message.digest)))

    def _retained(self, peer: Peer, message: wire.Retained, request_id: int, payload: Payload, now: float) -> None:
        self._send(peer.route, request_id, self.evaluations.retained(message))

    def _sync(self, peer: Peer, message: wire.Sync, request_id: int, payload: Payload, now: float) -> None:
        self._sync_wanted = True
        self._send(peer.route, request_id, wire.Acknowledged())

    # --- looking --------------------------------------------------------------------------------------------------------------------

    def _status(self, peer: Peer, message: wire.StatusRequest, request_id: int, payload: Payload, now: float) -> None:
        peers = [other.status(now, self._holders.num_held(other)) for other in self.peers]
        waits_for = self.books.waits_for() if self._pulls and self.hold is None else ""
        holds_for = "" if self.hold is None else self.hold.reason
        self._send(peer.route, request_id, status_of(self.books, self.evaluations, peers, waits_for, holds_for))
