"""The composition root: checks a run, makes or reopens its folder, hands it to the supervisor. It loads no torch: the roles do the work."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .configs.checks import check_config, check_machine
from .configs.loader import create_run, load_run
from .configs.run_folder import Run
from .configs.schema import Config, FolderModel
from .envs import registry
from .envs.trial import try_out
from .errors import ConfigError, RunFolderError
from .models import check_model_folder
from .processes import LocalLauncher
from .supervisor import Outcome, Supervisor
from .watch import View

PROBE_TIMEOUT_S = 120.0
REFUSED = 2
"""Exit code where the input has to change."""


def train(config: Config, *, resume: bool, view: View) -> Outcome:
    """Runs ``config`` to its last version.

    Everything is checked first, and a refused run leaves nothing on disk. Raises :class:`ConfigError`, :class:`RunFolderError`,
    :class:`UnknownEnv` and the like; what goes wrong later is in the outcome.
    """
    folder = run_folder(config, resume=resume)
    check(config)
    with locked(folder):
        run = create_run(config, resume=resume)
        outcome = Supervisor(run, LocalLauncher(run), view).supervise()
        if outcome.exit_code == REFUSED and not resume and not any(run.checkpoints_folder.iterdir()):
            _forget(run)
        return outcome


def _forget(run: Run) -> None:
    """Empties the folder of a run that a role refused before there was anything to train from, so that the corrected one finds its name free."""
    for entry in run.folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != ".lock":
            entry.unlink()


def check(config: Config) -> list[str]:
    """Everything that can be known without torch: contradictions, the environment, the model, this machine. Writes nothing.

    Returns notices: what is worth a look although it can run. Raises the :class:`RollstreamError` of the first thing that is wrong.
    """
    check_config(config)
    if isinstance(config.model, FolderModel):
        check_model_folder(config.model.path)
    notices = check_env(config)
    folder = (Path(config.folder) / config.name).resolve()
    check_machine(Run(folder=folder, config=config, run_id="0" * 32))
    return notices


def check_env(config: Config) -> list[str]:
    """Makes the environment and tries it out: a plain turn, a call of each tool. Returns notices.

    Raises :class:`UnknownEnv`, or :class:`ConfigError` for whatever its code does wrong, arguments it does not take, a warm-up it cannot demonstrate.
    """
    registry.load_imports(config.imports)
    return try_out(config.env.id, config.env.kwargs, demonstrates=config.warmup is not None)


def check_learner(config: Config) -> None:
    """What torch alone can tell: the objective and the devices, in a process of its own. In a run the learner's process does this first.

    Raises :class:`ConfigError`.
    """
    command = [sys.executable, "-P", "-m", "rollstream", "probe"]
    done = subprocess.run(command, input=config.model_dump_json(), capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT_S)
    if done.returncode != 0:
        line = (done.stderr.strip().splitlines() or [f"the check of the learner ended with exit code {done.returncode}"])[-1]
        raise ConfigError(line.removeprefix("error: "))


def run_folder(config: Config, *, resume: bool) -> Path:
    """Folder of the run, found fit for it. Raises :class:`RunFolderError` where it holds another run, or none to resume, or cannot be made."""
    folder = (Path(config.folder) / config.name).resolve()
    if resume:
        load_run(folder)
        return folder
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; choose another name (name=NEW) or remove it")
    if folder.is_dir() and any(entry.name != ".lock" for entry in folder.iterdir()):
        with locked(folder):
            raise RunFolderError(f"{folder} already holds a run; go on with --resume, choose another name (name=NEW), or remove the folder")
    above = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise RunFolderError(f"{folder} cannot be made: {above} is not a folder this user may write to; choose another folder (folder=PATH)")
    return folder


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Holds ``folder`` for this process. Raises :class:`RunFolderError` where another live process holds it.

    The lock goes with the process, however it ends. A folder that stayed empty is removed again.
    """
    above = not folder.parent.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{str(folder)[:120]} cannot be made: {(error.strerror or str(error)).lower()}; choose another folder (folder=PATH)") from None
    path = folder / ".lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise RunFolderError(f"{folder} is in use by a live rollstream train (process {owner}); wait for it, stop it, or choose another name") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            if not any(entry.name != ".lock" for entry in folder.iterdir()):
                path.unlink()
                folder.rmdir()
                if above:
                    folder.parent.rmdir()
