"""One role on a Ray cluster, as the supervisor holds it: placed, started, watched, placed again where its node is gone.

consumes    what its keeper answers: one call is always open, and its answer is the next event
waits for   nothing: every method looks and returns
released by the end of the role's process, the death of its keeper or node, a place that cannot be had
produces    the role's death, once, for the supervisor; news for people
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import Any, Literal

from .errors import describe
from .processes import Death, Role
from .ray_keeper import Place, Started
from .ray_places import Places

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_KILL_S = 5.0
"""How long a process that was ended by force may take to be told; its node does not answer then."""
_PATIENCE_S = 15.0
"""After so long without a place people are told what is missing."""


class RayProcess:
    """A role in the bundle ``index``."""

    def __init__(self, places: Places, role: Role, index: int) -> None:
        self.role = role
        self.num_starts = 0
        self.cpu_s = 0.0
        self.where = ""
        """Address of the node it was placed on last."""
        self._places, self._index = places, index
        self._keeper: Any = None
        self._node_id = ""
        self._answer: Any = None
        self._stage: Literal["placing", "starting", "running"] = "placing"
        self._started: Started | None = None
        self._since = 0.0
        self._told = False
        self._cut_off = False
        self._asked_to_end = False
        self._killed_at: float | None = None

    @property
    def alive(self) -> bool:
        """True from the start until its end was told."""
        return self._answer is not None

    @property
    def doing(self) -> str:
        """``placing`` while no node has room for it, ``cut off`` while its node does not answer and Ray has not given it up."""
        if not self.alive:
            return ""
        return "placing" if self._stage == "placing" else "cut off" if self._cut_off else ""

    def start(self) -> None:
        """Starts it where its keeper is, or has a keeper placed first."""
        self.num_starts += 1
        self._since, self._told, self._asked_to_end, self._killed_at = time.monotonic(), False, False, None
        if self._keeper is None:
            self._stage, self._node_id, self._keeper = "placing", "", self._places.keeper(self._index)
        else:
            self._stage = "starting"
        self._ask()

    def _ask(self) -> None:
        """Has the keeper do what the stage says. It may be asked again: the second time it tells what it did the first."""
        if self._stage == "placing":
            self._answer = self._keeper.place.remote()
        elif self._stage == "starting":
            address = self._places.address if self.role.kind != "buffer" else None
            meet = self._places.meeting() if self.role.kind == "learner" else None
            self._answer = self._keeper.start.remote(self.num_starts, address, meet, self._started)
        else:
            self._answer = self._keeper.wait.remote()

    def poll(self) -> Death | None:
        """How it ended, once; None while it runs, or is being placed, and after that."""
        if self._answer is None:
            return None
        if self._stage == "placing" and self._asked_to_end:
            self._let_go()
            return self._death(0, "ended before it had a place")
        ray = self._places.ray
        if not ray.wait([self._answer], timeout=0)[0]:
            return self._overdue()
        try:
            found: Any = ray.get(self._answer)
        except ray.exceptions.RayTaskError as error:
            self._answer = None
            return self._death(1, describe(error.cause))
        except ray.exceptions.ActorUnavailableError:  # cut off for now: it comes back, or is told dead
            self._cut_off = True
            self._ask()
            return self._overdue()
        except ray.exceptions.RayError as error:
            return self._lost(error)
        self._cut_off = False
        return self._take(found)

    def _take(self, found: Any) -> Death | None:
        if isinstance(found, Place):
            return self._take_place(found)
        if isinstance(found, Started):
            self._started, self._stage = found, "running"
            self._ask()
            return None
        if found is None:  # another call waits in its stead
            self._ask()
            return None
        death, cpu_s = found
        self._answer = self._started = None
        self.cpu_s += cpu_s
        return death

    def _take_place(self, place: Place) -> Death | None:
        refusal = self._places.refusal(self.role, place)
        if refusal is None:
            self._node_id, self.where = self._places.node_of(self._index)
            refusal = self._places.placed(self.role, self.where, place)
        if refusal is not None:
            self._let_go()
            return self._death(2, refusal)
        if not self._places.ready_for(self.role):
            self._ask()
            return None
        if self.num_starts > 1:
            self._places.tell(f"{self.role.name} has a place again, on node {self.where}")
        self._stage = "starting"
        self._ask()
        return None

    def terminate(self) -> None:
        """Asks it to stop in order."""
        self._asked_to_end = True
        if self.alive and self._stage != "placing":
            self._keeper.terminate.remote()

    def abort(self, reason: str) -> None:
        """Ends it, stuck as it is, with a trace of where it was."""
        if self.alive and self._stage != "placing":
            self._keeper.abort.remote(reason)

    def kill(self) -> None:
        """Ends it and everything it started, at once."""
        self._asked_to_end = True
        if self.alive and self._killed_at is None:
            self._killed_at = time.monotonic()
            self._keeper.kill.remote()

    def close(self) -> None:
        """Gives its place back, and ends what outlived its keeper."""
        if self._keeper is None and self._started is not None:
            self._places.end(self._node_id, self._started)
        self._let_go()

    def _overdue(self) -> Death | None:
        """What a wait that is too long means: no room in the cluster, or a node that does not answer."""
        now, bound_s = time.monotonic(), self._places.settings.placement_timeout_s
        if self._killed_at is not None and now - self._killed_at > _KILL_S:
            self._let_go()
            return self._death(1, f"its node {self.where} did not answer")
        if self._stage != "placing" or now - self._since < min(_PATIENCE_S, bound_s):
            return None
        patient = self.role.kind in ("actor", "evaluator") and self.where != ""  # the others go on without it, and nodes come back
        late = not patient and now - self._since >= bound_s
        if self._told and not late:
            return None
        node_id, address = self._places.node_of(self._index)
        has_place = self._places.lives(node_id)  # and Ray is starting the keeper there
        if late:
            self._let_go()
            if has_place:
                return self._death(1, f"its keeper did not start on node {address} within launcher.placement_timeout_s {bound_s:g}")
            return self._death(2, f"no room in the cluster within launcher.placement_timeout_s {bound_s:g}; {self._places.no_room()}")
        first_of_all = self.where == "" and self._index == 0  # at the start all have a place or none
        self._told = True
        if not has_place and (self.where or first_of_all):
            who = "the roles wait" if first_of_all else f"{self.role.name} waits"
            until = "" if patient else f" up to launcher.placement_timeout_s {bound_s:g}"
            self._places.tell(f"{who} for room in the cluster{until}; {self._places.no_room()}")
        return None

    def _lost(self, error: Exception) -> Death:
        """The keeper is gone: with its node, alone, or it could not even be made."""
        lines = _COLOUR.sub("", str(error)).split("\n")
        text = " ".join(" ".join(lines).split())
        self._answer = self._keeper = None
        self._cut_off = False
        if "creation task" in text:  # the code it is made of is not there, or is another
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            return self._death(2, f"its node cannot make a keeper ({last[:200]}): install the same rollstream on every node (pip install the wheel)")
        if "all references to the actor were removed" in text:  # by nobody: so Ray takes a driver whose answers it refuses
            remedy = "set RAY_AUTH_MODE as the cluster was started: disabled for one without a token, token for one with"
            return self._death(2, f"Ray dropped its keeper, it does not take this process for one of its own: {remedy}")
        if "node has died" in text or (self._node_id and not self._places.lives(self._node_id)):
            self._started = None
            return self._death(1, f"its node {self.where} is gone".replace("  ", " "))
        if not self._node_id:
            return self._death(1, f"its keeper could not be made: {text[:300]}")
        return self._death(1, f"its keeper on node {self.where} died: {text[:300]}")

    def _let_go(self) -> None:
        keeper, self._keeper, self._answer = self._keeper, None, None
        if keeper is not None:
            with suppress(Exception):  # it may be gone, and the cluster with it
                self._places.ray.kill(keeper, no_restart=True)

    def _death(self, exit_code: int, message: str) -> Death:
        return Death(self.role.name, exit_code, message, time.monotonic() - self._since, exit_code=exit_code or 1)
