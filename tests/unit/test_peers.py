"""Who may say what to the buffer, and under which name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq

from framed import RUN_ID, Buffer
from rollstream.buffer import wire
from rollstream.buffer.wire import Role

ONLY: dict[tuple[Role, ...], list[Any]] = {
    ("supervisor",): [wire.Farewell(everybody=True)],
    ("learner",): [wire.PullBatch(1), wire.Trained(1), wire.Published(0, "aa"), wire.Retained([], []), wire.Sync(), wire.FetchBlobs(["ab" * 32])],
    ("actor", "evaluator"): [wire.Credit(1, 0), wire.Release([]), wire.Append(1, 0), wire.AskBlobs(["ab" * 32])],
    ("actor", "evaluator", "scorer"): [wire.Amend(1, 0)],
}
SAID = [(roles, message) for roles, messages in ONLY.items() for message in messages]


def spoken(folder: Path, role: Role, message: Any) -> list[Any]:
    buffer = Buffer(folder)
    try:
        assert isinstance(buffer.tell(wire.Hello(role, "someone", "one", 1))[0], wire.Welcome)
        return buffer.tell(message)
    finally:
        buffer.close()


@pytest.mark.parametrize(("roles", "message"), SAID, ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else "")
@pytest.mark.parametrize("role", get_args(Role))
def test_only_the_role_it_is_for_may_say_it(tmp_path: Path, role: Role, roles: tuple[Role, ...], message: Any) -> None:
    refused = [said for said in spoken(tmp_path, role, message) if isinstance(said, wire.Refused) and "to say, not for the" in said.reason]
    assert bool(refused) == (role not in roles)
    if refused:
        assert refused[0].reason == f"{type(message).__name__} is for {' and '.join(roles)} to say, not for the {role}"


@pytest.mark.parametrize("role", get_args(Role))
def test_anybody_may_look_beat_and_leave(tmp_path: Path, role: Role) -> None:
    for place, message in enumerate((wire.StatusRequest(), wire.Heartbeat([], {}, {}, ""), wire.Farewell())):
        folder = tmp_path / str(place)
        folder.mkdir()
        assert not any(isinstance(said, wire.Refused) for said in spoken(folder, role, message))


@pytest.mark.parametrize("name", ["", "a" * 201, "two\nlines", "\x1b[31m", "tab\t"])
def test_a_name_that_no_log_could_show_is_refused(tmp_path: Path, name: str) -> None:
    buffer = Buffer(tmp_path)
    (said,) = buffer.tell(wire.Hello("actor", name, "one", 1))
    buffer.close()
    assert isinstance(said, wire.Refused)
    assert said.reason.startswith("a peer's name has 1 to 200 printable characters")


@pytest.mark.parametrize(("greedy", "modest", "shares"), [(10_000, 2, (4, 2)), (10_000, 3, (3, 3)), (1, 100, (1, 5)), (100, 100, (3, 3))])
def test_who_asks_for_more_than_there_is_takes_no_other_ones_share(tmp_path: Path, greedy: int, modest: int, shares: tuple[int, int]) -> None:
    buffer = Buffer(tmp_path, depth=5, max_lag=5)  # six groups may be leased
    asked = dict(zip((b"\x00greedy", b"\x00modest"), (greedy, modest), strict=True))
    for route in asked:
        hello = wire.Hello("actor", route[1:].decode(), "one", 1)
        buffer.say(msgspec.msgpack.encode(wire.Envelope(wire.PROTOCOL_VERSION, RUN_ID, 1, hello)), route=route)
    for route, num_groups in asked.items():
        credit = msgspec.msgpack.encode(wire.Envelope(wire.PROTOCOL_VERSION, RUN_ID, 2, wire.Credit(num_groups)))
        buffer.handlers.receive([zmq.Frame(route), zmq.Frame(credit)], buffer.now)
    buffer.handlers.tick(buffer.now, drained=True)
    held = tuple(len(buffer.handlers.books.held(route[1:].decode())) for route in asked)
    assert held == shares
    buffer.close()
