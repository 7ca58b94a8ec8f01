"""The buffer without its socket and on a clock of the test's own: frames in, answers out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq

from rollstream.buffer import wire
from rollstream.buffer.amendments import Amendments
from rollstream.buffer.books import Books
from rollstream.buffer.handlers import Handlers
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.log import Log
from rollstream.buffer.window import Rules
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config

RUN_ID = "run-a"
ROUTE = b"\x00actor"


class Buffer:
    """The buffer without its socket: frames in, answers out."""

    def __init__(self, folder: Path, **buffer: Any) -> None:
        learner = {"versions": 9, "batch_groups": 1, "group_size": 2}
        config = Config.model_validate({"name": "frames", "env": {"id": "Acme/Calculator-v0"}, "learner": learner, "buffer": buffer})
        self.ledger = Ledger(folder / "ledger.sqlite", RUN_ID)
        self.log = Log(folder / "stream", segment_bytes=2**20)
        self.amendments = Amendments(folder / "amendments", self.ledger, segment_bytes=2**20)
        self.handlers = Handlers(Run(folder, config, RUN_ID), Books(self.ledger, Rules.of(config)), self.log, self.amendments)
        self.now = 0.0

    def say(self, *frames: bytes, route: bytes = ROUTE) -> list[Any]:
        self.now += 0.01
        self.handlers.receive([zmq.Frame(frame) for frame in (route, *frames)], self.now)
        self.handlers.tick(self.now, drained=True)
        self.handlers.commit()
        decoder = msgspec.msgpack.Decoder(wire.Envelope[wire.ServerMessage])
        return [decoder.decode(parts[1]).message for parts in self.handlers.take_outbox()]

    def tell(self, message: wire.ClientMessage, *payload: bytes, run_id: str = RUN_ID, protocol: int = wire.PROTOCOL_VERSION) -> list[Any]:
        return self.say(msgspec.msgpack.encode(wire.Envelope(protocol, run_id, 1, message)), *payload)

    def close(self) -> None:
        self.ledger.close()
        self.log.close()
        self.amendments.close()

    def hello(self) -> None:
        assert isinstance(self.tell(wire.Hello("actor", "actor-0", "one", 1))[0], wire.Welcome)

    def stored(self) -> float:
        return self.handlers.books.counters["rows_stored"]
