"""How the learner and the supervisor speak to the buffer: blocking calls over one DEALER socket per thread.

Each call is a request that the buffer may see twice without harm. A call survives a restart of the buffer: the new one refuses an unknown peer, the client
says Hello again and repeats its request. A buffer that stays silent for ``silent_s`` raises :class:`~rollstream.errors.DeadlineExceeded`.
"""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import msgspec
import pyarrow as pa
import zmq

from ..errors import Corrupt, DeadlineExceeded, DiskFull, Refused, StreamError
from . import wire
from .actor_client import ActorClient
from .amendments import REWARD, WHOLE, Amendment, encode_amendments
from .blobs import BlobCache, digests_in
from .columns import SCHEMA_VERSION, aligned, decode, frame_checksum, from_frame, with_reward
from .curve import ClientKeys, Context, Door
from .gather import committed
from .hold import DISK_FULL
from .log import Location
from .log_files import RunFiles
from .types import Batch, TrajectoryKey

__all__ = ["ActorClient", "LearnerClient", "ScorerClient", "SupervisorClient"]

logger = logging.getLogger(__name__)

_RESEND_S = 2.0
_SLICE_S = 0.1
_SLEPT_S = 2.0  # beyond a slice
_BLOB_CACHE_BYTES = 256 * 2**20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(wire.Envelope[wire.ServerMessage])


class Connection:
    """One DEALER socket and its requests; for one thread. ``hello`` makes the introduction, anew at each Hello; once ``stop`` is set no request waits long."""

    def __init__(
        self, context: Context, endpoint: str, run_id: str, hello: Callable[[], wire.Hello], stop: threading.Event, silent_s: float, keys: ClientKeys | None
    ) -> None:
        self.stop_reason: str | None = None
        self._endpoint = endpoint
        self._run_id = run_id
        self._hello = hello
        self._stop = stop
        self._silent_s = silent_s
        self._request_ids = itertools.count(1)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        self._door = Door(self._socket, endpoint, keys)
        self._socket.connect(endpoint)

    def request(
        self,
        message: wire.ClientMessage,
        *payload: pa.Buffer,
        timeout_s: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[wire.ServerMessage, Sequence[zmq.Frame]] | None:
        """Sends ``message`` until it is answered; gives the answer and its payload, or None once ``cancelled`` says so.

        A buffer that waits for space on its disk is not silent: unless ``timeout_s`` is given, the request waits with it, until the run or this process ends.

        Raises:
            DiskFull: that end came while the buffer waited for space.
            DeadlineExceeded: no answer for ``timeout_s`` (by default the connection's ``silent_s``).
            Refused: the buffer refused it, or this peer's keys.

        """
        patient = timeout_s is None
        timeout_s = self._silent_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        request_id = next(self._request_ids)
        resend_at = time.monotonic()
        while not cancelled():
            if time.monotonic() >= resend_at:
                self._send(request_id, message, *payload)
                resend_at = time.monotonic() + _RESEND_S
            asked = time.monotonic()
            answer = self._receive(min(_SLICE_S, deadline - asked))
            if (slept_s := time.monotonic() - asked - _SLICE_S) > _SLEPT_S:  # this process was stopped: that is no silence of the buffer
                deadline += slept_s
            if answer is None and time.monotonic() >= deadline:
                name, role = type(message).__name__, self._hello().role
                raise DeadlineExceeded(f"the buffer at {self._endpoint} did not answer the {role}'s {name} for {timeout_s:g} s; is its process alive?")
            if answer is None or answer[0].request_id != request_id:
                continue
            reply = answer[0].message
            if isinstance(reply, wire.Refused):
                if reply.code != "unknown_peer":
                    raise Refused(reply.code, reply.reason)
                self.request(self._hello(), timeout_s=None if patient else deadline - time.monotonic(), cancelled=cancelled)
                resend_at = time.monotonic()
            elif isinstance(reply, wire.Wait) and not isinstance(message, wire.PullBatch):
                if self.stop_reason is not None or self._stop.is_set():
                    raise DiskFull(f"this is the end, and the buffer cannot take the {self._hello().role}'s {type(message).__name__}: {reply.reason}")
                deadline = time.monotonic() + timeout_s if patient else deadline
            else:
                return reply, answer[1]
        return None

    def _send(self, request_id: int, message: wire.ClientMessage, *payload: pa.Buffer) -> None:
        header = _encoder.encode(wire.Envelope(wire.PROTOCOL_VERSION, self._run_id, request_id, message))
        try:
            self._socket.send_multipart([header, *payload])
        except zmq.Again:
            logger.debug("event=send_queue_full endpoint=%s", self._endpoint)  # sent again soon

    def _receive(self, timeout_s: float) -> tuple[wire.Envelope[wire.ServerMessage], Sequence[zmq.Frame]] | None:
        while self._door.monitor is not None and self._door.monitor.poll(0):
            self._door.check(self._door.monitor.recv_multipart())
        if not self._socket.poll(max(1, int(timeout_s * 1000))):
            return None
        frames = self._socket.recv_multipart(copy=False)
        envelope = _decoder.decode(frames[0].buffer)
        if isinstance(envelope.message, wire.Stop):
            self.stop_reason = envelope.message.reason
        return envelope, frames[1:]

    def close(self) -> None:
        """Says Farewell and closes the socket."""
        self._send(next(self._request_ids), wire.Farewell())
        self._door.close()
        self._socket.close()


class _Client:
    """A peer with one connection per calling thread; only that of the thread that said Hello speaks for the peer itself."""

    def __init__(self, endpoint: str, run_id: str, role: wire.Role, peer_id: str, silent_s: float, keys: ClientKeys | None, stop: threading.Event) -> None:
        self._endpoint = endpoint
        self._stop = stop
        self._keys = keys
        self._run_id = run_id
        self._role: wire.Role = role
        self._peer_id = peer_id
        self._silent_s = silent_s
        self._incarnation = uuid.uuid4().hex
        self._held: tuple[int | None, int | None, int | None] = (None, None, None)  # version, lineage, vocabulary of its policy
        self._context = zmq.Context()
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leaves; to be called when no other thread uses the client any more."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
        self._context.term()

    @property
    def connection(self) -> Connection:
        """The connection of the calling thread."""
        thread = threading.get_ident()
        with self._lock:
            if thread not in self._connections:
                index = len(self._connections)
                introduce = functools.partial(self._introduction, index)
                self._connections[thread] = Connection(self._context, self._endpoint, self._run_id, introduce, self._stop, self._silent_s, self._keys)
            return self._connections[thread]

    def _introduction(self, index: int) -> wire.Hello:
        if index == 0:
            held = dict(zip(("version", "lineage", "vocabulary"), self._held, strict=True))
            return msgspec.structs.replace(wire.Hello(self._role, self._peer_id, self._incarnation, SCHEMA_VERSION), **held)
        return wire.Hello(self._role, f"{self._peer_id}/{index}", self._incarnation, SCHEMA_VERSION)

    def _ask(self, message: wire.ClientMessage, timeout_s: float | None = None) -> wire.ServerMessage:
        answer = self.connection.request(message, timeout_s=timeout_s)
        assert answer is not None  # nothing cancels it
        return answer[0]


class LearnerClient(_Client):
    """The learner's side of the stream. May be used from several threads; :meth:`hello` comes first and names the main one.

    ``silent_s``: how long the buffer may be silent (dead, restarting) before a call gives up. Rank 0 of ``ranks`` speaks for the learner; the others only
    pull the rows dealt to them. ``files`` are those of a run on this machine (:func:`~.log_files.local_files`): rows and images are read from there, not sent.
    ``keys`` open a buffer that other machines can reach. ``stalled_s`` bounds a :meth:`pull` without progress. Once ``stop`` is set nothing waits for space.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        peer_id: str = "learner",
        *,
        rank: int = 0,
        ranks: int = 1,
        silent_s: float = 30.0,
        stalled_s: float = 1800.0,
        keys: ClientKeys | None = None,
        files: RunFiles | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        super().__init__(endpoint, run_id, "learner", peer_id, silent_s, keys, stop or threading.Event())
        self._files = files
        self._rank, self._ranks = rank, ranks
        self._stalled_s = stalled_s
        self._cache = BlobCache(_BLOB_CACHE_BYTES)

    def hello(self, version: int | None, lineage: int | None = None, vocabulary: int | None = None) -> wire.Welcome:
        """Says that the learner holds ``version`` of ``lineage`` (None: the current one); recorded batches beyond it will be served again.

        A rank other than 0 says no version, which changes nothing. ``vocabulary`` is how many token ids the policy knows; rows with others will be refused.

        Raises:
            DeadlineExceeded: no buffer answered.
            Refused: wrong run, protocol or schema, a version the buffer never saw, or one that a fork abandoned.

        """
        self._held = (version, lineage, vocabulary)
        welcome = self._ask(self._introduction(0))
        assert isinstance(welcome, wire.Welcome)
        return welcome

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
        """The batch that makes ``version``, the same each time, with the rows of this rank; None if ``stop`` was set or the run ends.

        Waits as long as there is progress; ``on_wait`` hears at least every second what for. A buffer whose disk is full is waited for, however long.

        Raises:
            DeadlineExceeded: the buffer itself was silent, or what it waits for did not change for ``stalled_s``; the message names whom.
            Corrupt: the rows do not match their checksums.
            Refused: that version is neither recorded nor next, or its rows are damaged.

        """
        connection, mapped = self.connection, self._files is not None
        waited_for, since = "", time.monotonic()
        while not stop.is_set():
            ask = wire.PullBatch(version, self._rank, self._ranks, mapped)
            answer = connection.request(ask, cancelled=lambda: stop.is_set() or connection.stop_reason is not None)
            if answer is None or isinstance(answer[0], wire.Stop):
                return None
            if isinstance(answer[0], wire.BatchReply):
                try:
                    return self._with_blobs(_assemble(answer[0], list(self._rows(answer[0], answer[1]))))
                except (Corrupt, OSError):
                    if not mapped:
                        raise
                    mapped = False  # the buffer reads it then, and says what is wrong
                    continue
            assert isinstance(answer[0], wire.Wait)
            on_wait(answer[0].reason)
            if answer[0].reason != waited_for or waited_for.startswith(DISK_FULL):
                waited_for, since = answer[0].reason, time.monotonic()
            elif time.monotonic() - since > self._stalled_s:
                raise DeadlineExceeded(f"no progress towards batch {version} for {self._stalled_s:g} s (buffer.stall_timeout_s): {waited_for}")
        return None

    def _rows(self, reply: wire.BatchReply, frames: Sequence[zmq.Frame]) -> Iterator[pa.RecordBatch]:
        """The rows of a reply: those that came with it, and those that this process reads from the log."""
        if len(frames) != len(reply.checksums):
            raise Corrupt(f"batch {reply.version}: {len(reply.checksums)} frames announced, {len(frames)} came")
        for frame, checksum in zip(frames, reply.checksums, strict=True):
            yield from_frame(aligned(frame.buffer), checksum)
        for piece in reply.pieces:
            assert self._files is not None
            rows = self._files.log.read(Location(piece.segment, piece.offset, piece.size_bytes, piece.checksum))
            yield committed(rows, set(piece.keys)) if piece.keys else rows

    def _with_blobs(self, batch: Batch) -> Batch:
        digests = digests_in(batch.trajectories)
        return msgspec.structs.replace(batch, blobs=self._cache.gather(digests, self.blobs)) if digests else batch

    def blobs(self, digests: Sequence[str]) -> dict[str, bytes]:
        """The bytes of these blobs, as the buffer has them. Raises :class:`Refused` where one is not there, or no more."""
        found = {} if self._files is None else self._files.blobs(digests)
        while missing := [digest for digest in digests if digest not in found]:
            answer = self.connection.request(wire.FetchBlobs(missing))
            assert answer is not None  # nothing cancels it
            assert isinstance(answer[0], wire.Blobs)
            found |= {digest: frame.bytes for digest, frame in zip(answer[0].digests, answer[1], strict=True)}
        return found

    def trained(self, version: int) -> None:
        """The learner holds ``version`` now: its groups are trained.

        Raises:
            Refused: a version was left out.

        """
        self._held = (version, None, self._held[2])  # trained here, so of the current lineage
        self._ask(wire.Trained(version))

    def published(self, version: int, digest: str) -> str:
        """Records the digest of a version's weights; gives a note where it differs from the one recorded before a redo."""
        acknowledged = self._ask(wire.Published(version, digest))
        assert isinstance(acknowledged, wire.Acknowledged)
        return acknowledged.note

    def retained(self, statement: wire.Retained) -> wire.Evaluations:
        """Says which versions are kept for evaluations; gives those evaluations that are open, and those closed that were not known.

        Raises:
            Refused: this run evaluates nothing.

        """
        reply = self._ask(statement)
        assert isinstance(reply, wire.Evaluations)
        return reply

    def sync(self) -> None:
        """Returns once log and ledger are on the disk."""
        self._ask(wire.Sync())

    def status(self) -> wire.StatusReply:
        """The buffer's numbers."""
        reply = self._ask(wire.StatusRequest())
        assert isinstance(reply, wire.StatusReply)
        return reply


class SupervisorClient(_Client):
    """The supervisor's side: looks, and ends the run."""

    def __init__(self, endpoint: str, run_id: str, peer_id: str = "supervisor", *, keys: ClientKeys | None = None) -> None:
        super().__init__(endpoint, run_id, "supervisor", peer_id, 5.0, keys, threading.Event())

    def status(self, timeout_s: float) -> wire.StatusReply | None:
        """The buffer's numbers, None when it does not answer in time."""
        try:
            reply = self._ask(wire.StatusRequest(), timeout_s)
        except DeadlineExceeded:
            return None
        assert isinstance(reply, wire.StatusReply)
        return reply

    def stop_everybody(self, timeout_s: float) -> bool:
        """Has the buffer tell all peers to stop, and then stop itself; False when it does not answer in time."""
        try:
            self._ask(wire.Farewell(everybody=True), timeout_s)
        except DeadlineExceeded:
            return False
        return True


class ScorerClient(_Client):
    """Scores trajectories after they were stored: a judge, a reward model, a person."""

    def __init__(self, endpoint: str, run_id: str, peer_id: str = "scorer", *, silent_s: float = 30.0, keys: ClientKeys | None = None) -> None:
        super().__init__(endpoint, run_id, "scorer", peer_id, silent_s, keys, threading.Event())

    def amend(self, amendments: Sequence[Amendment]) -> wire.Amended:
        """Returns once ``amendments`` are durable; all of them, or none. Saying the same again changes nothing.

        Raises:
            DataRefused: they do not fit their columns.
            Refused: a row that is not committed, a value that differs from an earlier one, a reward that nobody awaits (any more).
            DeadlineExceeded: the buffer was silent.

        """
        frame = encode_amendments(amendments)
        answer = self.connection.request(wire.Amend(len(amendments), frame_checksum(frame)), frame)
        assert answer is not None
        assert isinstance(answer[0], wire.Amended)
        return answer[0]

    def score(self, key: TrajectoryKey, reward: float) -> wire.Amended:
        """Gives one trajectory the reward it awaits. Raises as :meth:`amend` does."""
        return self.amend([Amendment(key.lineage, key.group_id, key.member, WHOLE, key.attempt, REWARD, reward, self._peer_id, time.time())])


def _assemble(reply: wire.BatchReply, rows: Sequence[pa.RecordBatch]) -> Batch:
    """The batch in its recorded order, from rows in the order of the log."""
    trajectories = [trajectory for batch in rows for trajectory in decode(batch)]
    if len(trajectories) != reply.num_trajectories:
        raise StreamError(f"batch {reply.version}: {reply.num_trajectories} trajectories announced, {len(trajectories)} came; run `rollstream audit`")
    rewards = {key[:2]: key[2] for key in zip(reply.header.group_ids, reply.header.members, reply.header.rewards, strict=True)}
    trajectories = [with_reward(trajectory, rewards[trajectory.key.group_id, trajectory.key.member]) for trajectory in trajectories]
    place = {group_id: index for index, group_id in enumerate(reply.groups)}
    trajectories.sort(key=lambda trajectory: (place[trajectory.key.group_id], trajectory.key.member))
    return Batch(reply.lineage, reply.version, tuple(reply.groups), tuple(trajectories), frozenset(reply.withheld), reply.recorded, reply.header)
