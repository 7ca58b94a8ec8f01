"""Deaths at exact instants: each failpoint replaces one function of the process it is armed in by one that kills it there.

Nothing of this exists outside the tests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rollstream.buffer import server, wire
from rollstream.buffer.books import Books
from rollstream.buffer.client import LearnerClient
from rollstream.buffer.handlers import Handlers
from rollstream.buffer.ledger import Ledger

_answer = msgspec.msgpack.Decoder(wire.Envelope[wire.ServerMessage])


def die(*_: Any, **__: Any) -> NoReturn:
    """SIGKILL, from the process itself."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process went on")


def _before_answer(wanted: Callable[[wire.ServerMessage], bool]) -> None:
    """Everything of the round is committed; its answers are not yet sent, and such a one is among them."""
    send = server._send

    def dies(socket: Any, handlers: Handlers) -> None:
        if any(wanted(_answer.decode(parts[1]).message) for parts in handlers._outbox):
            die()
        send(socket, handlers)

    server._send = dies  # type: ignore[assignment]


def _before_commit_of_rows() -> None:
    commit = Ledger.commit

    def dies(self: Ledger) -> None:
        if any(statement.startswith("INSERT INTO appends") for statement, _ in self._round):
            die()
        commit(self)

    Ledger.commit = dies  # type: ignore[method-assign]


def _after_commit_of_trained() -> None:
    trained, told = Books.trained, []

    def notes(self: Books, version: int) -> None:
        trained(self, version)
        told.append(version)

    Books.trained = notes  # type: ignore[method-assign]
    _before_answer(lambda message: bool(told))


def _after_trained_was_said() -> None:
    trained = LearnerClient.trained

    def dies(self: LearnerClient, version: int) -> None:
        trained(self, version)
        die()

    LearnerClient.trained = dies  # type: ignore[method-assign]


def _in_place_of(owner: Any, name: str) -> Callable[[], None]:
    return lambda: setattr(owner, name, die)


def _before_checkpoint_has_its_name() -> None:
    rename, replace = Path.rename, Path.replace

    def dies(self: Path, target: Path) -> Path:
        return die() if Path(target).name.startswith("v0") else rename(self, target)

    def dies_too(self: Path, target: Path) -> Path:
        return die() if Path(target).name.startswith("v0") else replace(self, target)

    Path.rename, Path.replace = dies, dies_too  # type: ignore[method-assign]


WINDOWS: dict[str, tuple[str, Callable[[], None]]] = {
    "rows are in the log, the ledger does not know them": ("buffer", _before_commit_of_rows),
    "rows are stored, their actor was not told": ("buffer", lambda: _before_answer(lambda message: isinstance(message, wire.Appended))),
    "a lease is recorded, nobody has it": ("buffer", lambda: _before_answer(lambda message: isinstance(message, wire.Leases))),
    "a batch is recorded, the learner has not got it": ("buffer", lambda: _before_answer(lambda message: isinstance(message, wire.BatchReply))),
    "the ledger knows what was trained, the learner was not told": ("buffer", _after_commit_of_trained),
    "the optimiser has stepped, the buffer was not told": ("learner", _in_place_of(LearnerClient, "trained")),
    "trained was said, nothing was published": ("learner", _after_trained_was_said),
    "a version was published, its digest was not recorded": ("learner", _in_place_of(LearnerClient, "published")),
    "a checkpoint is written, log and ledger are not flushed": ("learner", _in_place_of(LearnerClient, "sync")),
    "a checkpoint is written, it is not complete": ("learner", _before_checkpoint_has_its_name),
}
"""Each window by what has happened and what has not, with the role that dies in it. (A batch given to rank 0 and not to rank 1: see the tests of ranks.)"""
