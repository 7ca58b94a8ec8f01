"""What the roles say to the buffer, and what it answers.

Actors, learner and monitor hold a ZeroMQ DEALER socket, the buffer one ROUTER. A message is one msgspec header frame (:class:`Envelope` around one of the
structs below, MessagePack) followed by Arrow IPC record-batch frames where the struct says so. Nothing is ever unpickled. Every request carries a
``request_id``; its answer repeats it, so a client resends after a deadline without harm: each request is idempotent.

    client                          buffer
    Hello            ->             Welcome | Refused            once per connection and after every buffer restart
    Credit           ->             Leases*                      "I can take this many more groups": leases are pushed as admission allows
    Append + frames  ->             Appended | Refused           only after the rows are in the log
    AskBlobs         ->             LackedBlobs                  which of these digests must be sent
    PutBlobs + frames ->            Acknowledged | Refused       the bytes of these digests, before the rows that name them
    FetchBlobs       ->             Blobs + frames | Refused     the bytes of the first of these digests, as many as fit
    Amend + frame    ->             Amended | Refused            only after the amendments are in their log
    Heartbeat        ->             Acknowledged, Closed*        keeps leases; carries the actor's counters and what it waits for
    Release          ->             Acknowledged                 an actor that stops gives its leases back
    PullBatch        ->             BatchReply + frames | Wait   the header and a rank's rows, the same every time; Stop when the run ends
    Trained          ->             Acknowledged                 the learner now holds this version
    Published        ->             Acknowledged                 digest of a version's weights
    Retained         ->             Evaluations                  which versions are kept for evaluations; which still are wanted, what came out
    Sync             ->             Acknowledged                 log and ledger are on disk: a checkpoint may count as complete
    StatusRequest    ->             StatusReply                  what the terminal view shows
    Farewell         ->             Acknowledged                 a peer leaves; from the supervisor: everybody stops

What is marked * is pushed, under request id 0.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

from .types import Header
from .wire_parts import Evaluation as Evaluation
from .wire_parts import FinishedMember as FinishedMember
from .wire_parts import Lease as Lease
from .wire_parts import Number
from .wire_parts import PeerStatus as PeerStatus
from .wire_parts import RetainedVersion as RetainedVersion
from .wire_parts import Role as Role
from .wire_parts import SkippedVersion as SkippedVersion

PROTOCOL_VERSION = 12

MAX_FRAME_BYTES = 64 * 2**20
"""Of one frame to the buffer. A peer that sends a longer one loses its connection."""

LOCAL_SOCKET_BYTES = 4 * 2**20
"""What the kernel may hold of a Unix socket on its way, as far as it allows: some appends, so that sender and receiver need not take turns."""

RefusalCode = Literal[
    "unknown_peer",
    "replaced",
    "wrong_run",
    "wrong_protocol",
    "wrong_schema",
    "malformed",
    "corrupt",
    "unknown_group",
    "not_leased",
    "wrong_tasks",
    "unknown_blob",
    "already_amended",
    "not_awaited",
    "too_late",
]


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of every message; the tag is the class name."""


# --- what clients say -------------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Introduces a peer. ``incarnation`` differs at every process start; ``holding`` lists the groups this very process still plays.

    The learner gives the ``version`` of ``lineage`` it holds: batches after it that were recorded are served again (redo). None leaves the books as they are.
    An actor says in ``tasks`` how many tasks its environments have, where their number is finite. The learner says in ``vocabulary`` how many token ids its
    policy knows: rows with others could never train and are refused from then on.
    """

    role: Role
    peer_id: str
    incarnation: str
    schema_version: Number
    holding: list[Number] = []
    version: Number | None = None
    tasks: dict[str, Number] = {}
    lineage: Number | None = None
    vocabulary: Number | None = None


class Credit(Message, frozen=True):
    """An actor's free capacity, as an absolute statement: ``num_groups`` more groups. Replaces the actor's earlier credit.

    ``num_received`` counts the leases that had reached it since its Hello, so that those still on their way are not granted twice over.
    """

    num_groups: Number
    num_received: Number = 0


class Append(Message, frozen=True):
    """Finished trajectories, as one Arrow record-batch frame. ``checksum`` is the xxh3-64 of that frame (see ``columns``)."""

    num_trajectories: Number
    checksum: int


class AskBlobs(Message, frozen=True):
    """Asks which of these blobs the buffer does not have."""

    digests: list[str]


class PutBlobs(Message, frozen=True):
    """The bytes of these blobs follow, a frame each; all are taken, or none. Trajectories that name them come after they are acknowledged."""

    digests: list[str]


class FetchBlobs(Message, frozen=True):
    """Asks for the bytes of these blobs."""

    digests: list[str]


class Amend(Message, frozen=True):
    """Scores and other numbers that come after the rows they are about, as one Arrow record-batch frame (see ``amendments``) with its ``checksum``."""

    num_amendments: Number
    checksum: int


class Heartbeat(Message, frozen=True):
    """Still alive.

    ``counters`` only ever grow (``tokens``, ``episodes``, ``invalid_episodes``), ``gauges`` are levels (``running``, ``version``), ``waiting_for`` is a word
    for people.
    """

    holding: list[Number]
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    waiting_for: str = ""


class Release(Message, frozen=True):
    """Gives leases back unfinished; members already appended stay."""

    group_ids: list[Number]


class PullBatch(Message, frozen=True):
    """Asks for the batch that makes ``version``: its header, and the rows dealt to ``rank`` of ``ranks``.

    A rank that reads the files of the log itself asks with ``mapped`` where its rows lie.
    """

    version: Number
    rank: Number = 0
    ranks: Number = 1
    mapped: bool = False


class Trained(Message, frozen=True):
    """The learner holds ``version`` now. A hint: the checkpoint is authoritative."""

    version: Number


class Published(Message, frozen=True):
    """Digest of the weights of ``version``, recorded the first time and compared on redo."""

    version: Number
    digest: str


class Retained(Message, frozen=True):
    """All versions that the learner keeps for evaluations now, an absolute statement, and those it could not keep since the last one.

    ``written`` is (lineage, version) of the newest weights it wrote, None before the first: what is older and not kept cannot be evaluated any more.
    ``num_known`` counts the closed evaluations that it has heard of.
    """

    retained: list[RetainedVersion]
    skipped: list[SkippedVersion] = []
    written: tuple[Number, Number] | None = None
    num_known: Number = 0


class Sync(Message, frozen=True):
    """Asks the buffer to make log and ledger durable against power loss."""


class StatusRequest(Message, frozen=True):
    """Asks for the numbers the terminal view shows."""


class Farewell(Message, frozen=True):
    """The sender leaves. ``everybody`` asks the buffer to tell all peers to stop, then to stop itself."""

    everybody: bool = False


# --- what the buffer answers ------------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The peer is known now. ``lineage`` and ``version`` are the learner's as the buffer knows them; an actor may have ``credit_bytes`` unacknowledged."""

    lineage: Number
    version: Number
    credit_bytes: Number = 0


class Leases(Message, frozen=True):
    """Leases pushed to an actor against its credit."""

    leases: list[Lease]


class Closed(Message, frozen=True):
    """Pushed: these groups that an actor said it holds wait for no member any more. What it still plays of them is of no use; what it has sent does no harm."""

    groups: list[Number]


class Appended(Message, frozen=True):
    """The rows are in the log. ``superseded`` counts trajectories whose member had been committed by an earlier attempt.

    ``credit_bytes`` is what the actor may have unacknowledged from now on, rows and blobs together.
    """

    num_stored: Number
    num_superseded: Number
    credit_bytes: Number = 0


class LackedBlobs(Message, frozen=True):
    """Of the blobs that were asked about, those the buffer does not have."""

    digests: list[str]


class Blobs(Message, frozen=True):
    """The bytes of these blobs follow, a frame each; the first of those that were asked for, at least one."""

    digests: list[str]


class Amended(Message, frozen=True):
    """The amendments are in their log. ``num_known`` of them had been made before, with the same value."""

    num_stored: Number
    num_known: Number


class Piece(msgspec.Struct, frozen=True):
    """Rows of a batch in a file of the log: one append of ``segment``, and the (group, member, attempt) wanted of it; none named means all of it."""

    segment: Number
    offset: Number
    size_bytes: Number
    checksum: int
    keys: list[tuple[Number, Number, Number]]


class BatchReply(Message, frozen=True):
    """A recorded batch: ``header`` describes all of it, the rows of the trajectories dealt to the asking rank follow as record-batch frames.

    ``groups`` are in their recorded order, the frames in the order of the log. A rank that asked with ``mapped`` is given ``pieces`` and no frames.

    ``withheld`` lists (group, member) pairs whose tokens must not train. ``recorded`` says that it had been served before.
    ``checksums`` hold the xxh3-64 of each frame. Frames may hold rows of a trajectory in any order of groups; ``num_trajectories`` says how many there are.
    """

    lineage: Number
    version: Number
    groups: list[Number]
    withheld: list[tuple[Number, Number]]
    recorded: bool
    checksums: list[int]
    num_trajectories: Number
    header: Header
    pieces: list[Piece] = []


class Wait(Message, frozen=True):
    """Not yet: no batch can be formed, and ``reason`` says which group the window waits for and who plays it; or, answering anything, the disk is full."""

    reason: str


class Acknowledged(Message, frozen=True):
    """Done. ``note`` is non-empty where a person should know (a digest that differs on redo)."""

    note: str = ""


class Refused(Message, frozen=True):
    """Not done, and nothing stored."""

    code: RefusalCode
    reason: str


class Stop(Message, frozen=True):
    """Pushed: the run ends; finish what takes a moment and leave."""

    reason: str


class Evaluations(Message, frozen=True):
    """Answers :class:`Retained`: evaluations that are ``open``, and those ``closed`` beyond the ones the learner knew, in the order they closed."""

    open: list[Evaluation]
    closed: list[Evaluation]


class StatusReply(Message, frozen=True):
    """State of the stream.

    ``groups`` counts train groups per state over the whole run; ``learner_waits_for`` is empty while it trains; ``holds_for`` says why the buffer takes
    nothing in (disk full), and is empty while it does. ``evaluations`` are those open and, last, the one that closed last.
    """

    lineage: Number
    version: Number
    groups: dict[str, Number]
    counters: dict[str, float]
    peers: list[PeerStatus]
    learner_waits_for: str
    holds_for: str = ""
    evaluations: list[Evaluation] = []


ClientMessage = (
    Hello | Credit | Append | Amend | AskBlobs | PutBlobs | FetchBlobs | Heartbeat
    | Release | PullBatch | Trained | Published | Retained | Sync | StatusRequest | Farewell
)  # fmt: skip
ServerMessage = (
    Welcome | Leases | Closed | Appended | Amended | LackedBlobs | Blobs | BatchReply
    | Wait | Acknowledged | Refused | Stop | StatusReply | Evaluations
)  # fmt: skip


M = TypeVar("M")


class Envelope(msgspec.Struct, Generic[M], frozen=True, array_like=True):
    """What every header frame holds. ``run_id`` keeps runs apart that share a host; ``request_id`` 0 marks a push."""

    protocol: Number
    run_id: str
    request_id: Number
    message: M
