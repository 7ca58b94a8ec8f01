"""The bytes of every wire message: a change that nobody meant fails here, and says what a meant one needs."""

from __future__ import annotations

import msgspec
import pytest

import wire_goldens as goldens
from rollstream.buffer import wire

NOW, GOLDEN = goldens.found(), goldens.read()
DECODERS = {"client": msgspec.msgpack.Decoder(wire.ClientMessage), "buffer": msgspec.msgpack.Decoder(wire.ServerMessage)}


@pytest.mark.parametrize("name", sorted(NOW.keys() | GOLDEN.keys()))
def test_every_message_has_the_bytes_of_its_golden_file(name: str) -> None:
    wrong = goldens.what_is_wrong(name, NOW.get(name), GOLDEN.get(name))
    assert not wrong, wrong


@pytest.mark.parametrize("name", sorted(GOLDEN.keys() - {"Envelope"}))
def test_golden_bytes_are_understood_and_mean_what_the_file_says(name: str) -> None:
    golden = GOLDEN[name]
    message = DECODERS[golden["said_by"]].decode(bytes.fromhex(golden["msgpack"]))
    assert type(message).__name__ == name
    assert msgspec.json.decode(msgspec.json.encode(message)) == golden["message"]
    assert msgspec.msgpack.encode(message).hex() == golden["msgpack"]


def test_the_envelope_is_read_before_its_message() -> None:
    header = msgspec.msgpack.decode(bytes.fromhex(GOLDEN["Envelope"]["msgpack"]), type=wire.Envelope[msgspec.Raw])
    assert (header.protocol, header.run_id, header.request_id) == (wire.PROTOCOL_VERSION, "run", 7)
    assert msgspec.msgpack.decode(header.message, type=wire.ClientMessage) == wire.Sync()


def test_a_changed_encoding_asks_for_a_new_protocol_version_and_a_new_message_for_its_file() -> None:
    now = NOW["Credit"]
    changed = {**now, "msgpack": now["msgpack"] + "00"}
    assert "raise PROTOCOL_VERSION in buffer/wire.py above" in goldens.what_is_wrong("Credit", changed, now)
    older = {**now, "protocol": wire.PROTOCOL_VERSION - 1}
    assert "changed with the protocol version: run `python tests/golden/wire_goldens.py`" in goldens.what_is_wrong("Credit", changed, older)
    assert "is a new message: write its golden file" in goldens.what_is_wrong("Credit", now, None)
    assert "is no message any more: raise PROTOCOL_VERSION" in goldens.what_is_wrong("Credit", None, now)
