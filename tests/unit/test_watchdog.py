"""Actors that have gone silent are told from those that never spoke, and from a buffer that was away; a trace tells where they were."""

from __future__ import annotations

from rollstream.buffer.wire import PeerStatus, StatusReply
from rollstream.processes import where_it_was
from rollstream.watchdog import MARGIN_S, Watchdog

ACTORS = ("actor-0", "actor-1")

TRACE = """
Fatal Python error: Aborted

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 622 in wait

Current thread 0x00007f2 (most recent call first):
  File "/home/ann/helpers.py", line 7 in spin
  File "/home/ann/safe.py", line 31 in count
  File "/home/ann/safe.py", line 12 in try_code
  File "/site-packages/rollstream/envs/chat.py", line 301 in _ask
  File "/site-packages/rollstream/envs/chat.py", line 240 in _carry_out
"""


def status(**silent_s: float) -> StatusReply:
    peers = [PeerStatus("actor", name.replace("_", "-"), seconds, {}, {}, "", 1) for name, seconds in silent_s.items()]
    return StatusReply(0, 0, {}, {}, peers, "")


def test_an_actor_that_has_spoken_is_silent_once_its_leases_have_expired_also_when_the_buffer_has_forgotten_it() -> None:
    watchdog = Watchdog(10.0)
    assert watchdog.silent(status(actor_0=0.5, actor_1=0.5), ACTORS, 0.0) == []
    for second in range(1, 12):
        peers = {"actor_1": 0.2} if second > 10 else {"actor_0": second + 0.5, "actor_1": 0.2}
        assert watchdog.silent(status(**peers), ACTORS, float(second)) == []
    assert watchdog.silent(status(actor_1=0.2), ACTORS, 10.0 + MARGIN_S) == ["actor-0"]
    watchdog.forget("actor-0")
    assert watchdog.silent(status(actor_1=0.2), ACTORS, 13.5) == [], "the next one has not spoken yet: it may be loading its model"


def test_time_in_which_the_buffer_did_not_answer_is_not_the_actors_silence() -> None:
    watchdog = Watchdog(10.0)
    watchdog.silent(status(actor_0=0.5), ACTORS, 0.0)
    assert watchdog.silent(status(), ACTORS, 60.0) == []
    assert watchdog.silent(status(), ACTORS, 61.0) == []


def test_actors_of_other_machines_are_not_the_supervisors_to_end() -> None:
    watchdog = Watchdog(10.0)
    watchdog.silent(status(actor_0=0.0, by_hand=0.0), ACTORS, 0.0)
    for second in range(1, 30):
        found = watchdog.silent(status(actor_0=0.0, by_hand=float(second)), ACTORS, float(second))
    assert found == []


def test_the_trace_of_a_stuck_actor_names_the_method_of_the_environment_and_the_innermost_line_in_its_file() -> None:
    assert where_it_was(TRACE).startswith("; it was in try_code (safe.py, line 31): a method that takes long has to be async")
    assert where_it_was("ordinary log\nnothing fatal") == ""
    assert where_it_was(TRACE.replace("_ask", "_other")) == ""
