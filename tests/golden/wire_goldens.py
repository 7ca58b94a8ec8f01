"""One golden file per wire message: its bytes, and what they mean.

    python tests/golden/wire_goldens.py        writes the file of every new message, and of every changed one whose protocol version was raised

Each file holds the message as JSON with every field set, its MessagePack bytes in hex, and the protocol version that it was written under. The values are
made from the field types, so a new message needs no list here.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from rollstream.buffer import wire

FOLDER = Path(__file__).parent / "wire"
WRITE = "python tests/golden/wire_goldens.py"


def messages() -> dict[str, tuple[str, type[wire.Message]]]:
    """Every message by its tag, with who says it."""
    sides = {"client": wire.ClientMessage, "buffer": wire.ServerMessage}
    return {kind.__name__: (side, kind) for side, union in sides.items() for kind in typing.get_args(union)}


def sample(kind: type[Any]) -> Any:
    """A message in which every field differs from its default and from its neighbours."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], name, place) for place, name in enumerate(kind.__struct_fields__, 1)})


def _value(hint: Any, name: str, place: int) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return arguments[0]
    if origin in (typing.Union, types.UnionType):
        return _value(next(argument for argument in arguments if argument is not type(None)), name, place)
    if origin is tuple:
        return tuple(_value(argument, name, place + index) for index, argument in enumerate(arguments))
    if origin is list:
        return [_value(arguments[0], name, place), _value(arguments[0], name, place + 1)]
    if origin is dict:
        return {name: _value(arguments[1], name, place)}
    if issubclass(hint, msgspec.Struct):
        return sample(hint)
    return {int: 1000 + place, float: place + 0.5, bool: True, str: f"{name} {place}", bytes: name.encode()}[hint]


def envelope() -> wire.Envelope[Any]:
    """The header around every message, with one that has no fields of its own."""
    return wire.Envelope(wire.PROTOCOL_VERSION, "run", 7, wire.Sync())


def content(side: str, message: Any) -> dict[str, Any]:
    """What the golden file of ``message`` holds."""
    encoded = msgspec.msgpack.encode(message)
    return {"protocol": wire.PROTOCOL_VERSION, "said_by": side, "message": msgspec.to_builtins(message), "msgpack": encoded.hex()}


def found() -> dict[str, dict[str, Any]]:
    """What the golden files should hold now."""
    written = {name: content(side, sample(kind)) for name, (side, kind) in messages().items()}
    return {**written, "Envelope": content("both", envelope())}


def what_is_wrong(name: str, now: dict[str, Any] | None, golden: dict[str, Any] | None) -> str:
    """What to do about one message; empty where its golden file holds."""
    if golden is None:
        return f"{name} is a new message: write its golden file with `{WRITE}` and commit it"
    if now is None:
        return f"{name} is no message any more: raise PROTOCOL_VERSION in buffer/wire.py and remove tests/golden/wire/{name}.json"
    if name == "Envelope" and now["message"][0] != golden["message"][0]:
        return f"the protocol version is {wire.PROTOCOL_VERSION} now: run `{WRITE}` and commit what it writes"
    if now["msgpack"] == golden["msgpack"]:
        return ""
    if golden["protocol"] >= wire.PROTOCOL_VERSION:
        return f"the encoding of {name} changed: raise PROTOCOL_VERSION in buffer/wire.py above {golden['protocol']}, then run `{WRITE}`"
    return f"the encoding of {name} changed with the protocol version: run `{WRITE}` and commit what it writes"


def read() -> dict[str, dict[str, Any]]:
    """The golden files."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")}


def main() -> int:
    """Writes what may be written; says what may not."""
    now, goldens = found(), read()
    code = 0
    for name in sorted(now.keys() | goldens.keys()):
        wrong = what_is_wrong(name, now.get(name), goldens.get(name))
        if not wrong:
            continue
        if name in now and (name not in goldens or goldens[name]["protocol"] < wire.PROTOCOL_VERSION):
            (FOLDER / f"{name}.json").write_text(json.dumps(now[name], indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            sys.stdout.write(f"wrote {name}.json\n")
        else:
            sys.stdout.write(f"not written: {wrong}\n")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
