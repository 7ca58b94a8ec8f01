"""What people who start roles themselves need besides the roles: whether a run is live, a name in it, and its end."""

from __future__ import annotations

import dataclasses
import re
import socket
import uuid
from pathlib import Path

from .buffer.client import SupervisorClient
from .buffer.curve import client_keys
from .buffer.wire import StatusReply
from .configs.loader import load_run
from .configs.run_folder import Run
from .errors import ConfigError, Refused, RunFolderError
from .processes import roles_of

ANSWER_S = 5.0
"""How long the buffer of a live run may take to answer."""


def name_to_join(folder: Path, asked: str | None, *, address: str | None = None, keys: Path | None = None) -> str:
    """The name under which one more actor joins the live run in ``folder``: ``asked``, or one that nobody else has.

    ``address`` and ``keys`` are those of :func:`rollstream.roles.run_role`. Raises :class:`RunFolderError` where there is no live run,
    :class:`ConfigError` where the name is taken, or the weights cannot be read from here.
    """
    run = dataclasses.replace(load_run(folder), address=address, keys=keys)
    status = _status(run)
    _check_weights(run, status)
    if asked is None:
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().partition(".")[0])[:32]
        return f"actor-{host}-{uuid.uuid4().hex[:6]}"
    taken = {role.name for role in roles_of(run.config)} | {peer.peer_id for peer in status.peers}
    if asked in taken:
        raise ConfigError(f"--id {asked} is taken in this run ({', '.join(sorted(taken))}); choose another, or leave it out")
    return asked


def stop_run(folder: Path) -> bool:
    """Has everybody in the live run in ``folder`` stop in order, whoever started them. Raises :class:`RunFolderError` where there is no live run."""
    run = load_run(folder)
    _status(run)
    with SupervisorClient(run.endpoint, run.run_id, _own_id("stop"), keys=client_keys(run)) as client:
        return client.stop_everybody(ANSWER_S)


def _status(run: Run) -> StatusReply:
    with SupervisorClient(run.endpoint, run.run_id, _own_id("look"), keys=client_keys(run)) as client:
        try:
            status = client.status(ANSWER_S)
        except Refused as error:
            if error.code != "wrong_run":
                raise
            raise RunFolderError(f"{run.folder}: another run answers at {run.endpoint} ({error}); give the folder of that run") from None
    if status is None:
        remedy = "start it (rollstream train CONFIG --resume, or its roles by hand); on another machine say where its buffer is (--endpoint)"
        raise RunFolderError(f"{run.folder} is not live: no buffer answered at {run.endpoint} within {ANSWER_S:g} s; {remedy}")
    return status


def _check_weights(run: Run, status: StatusReply) -> None:
    """A learner that published and whose weights are not here: they are in the memory of another machine."""
    published = status.version > 0 and any(peer.role == "learner" for peer in status.peers)
    if published and not run.weights_folder.is_dir():
        raise ConfigError(
            f"the weights of this run are not here ({run.weights_folder} is missing): weights.channel {run.config.weights.channel} does not reach this "
            "machine; go on with the run under weights.channel=files, in a folder that both machines share"
        )


def _own_id(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex[:8]}"
