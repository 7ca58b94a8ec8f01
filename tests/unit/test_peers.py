"""Who may say what to the buffer, and under which name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from framed import Buffer
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
