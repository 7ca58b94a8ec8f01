"""The composition root: checks a run, makes or reopens its folder, hands it to the supervisor. It loads no torch: the roles do the work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from .configs.checks import check_config, check_machine
from .configs.claim import locked, try_folder, wait_for_roles
from .configs.loader import create_run, load_run
from .configs.run_folder import Run
from .configs.schema import Config, FolderModel
from .configs.schema import LocalLauncher as LocalSettings
from .envs import registry
from .envs.trial import try_out
from .errors import ConfigError
from .forks import check_length, make_way, plan_fork
from .models import check_model_folder
from .processes import Launcher, LocalLauncher
from .supervisor import Outcome, Supervisor
from .watch import View

PROBE_TIMEOUT_S = 120.0
REFUSED = 2
"""Exit code where the input has to change."""


def train(config: Config, *, resume: bool, view: View, fork: bool = False, from_version: int | None = None) -> Outcome:
    """Runs ``config`` to its last version; with ``fork`` in a new lineage that begins after ``from_version``, by default the newest checkpoint.

    Everything is checked first, and a refused run leaves nothing on disk. Raises :class:`ConfigError`, :class:`RunFolderError`,
    :class:`UnknownEnv` and the like; what goes wrong later is in the outcome.
    """
    folder = check(config, resume=resume, fork=fork)
    with locked(folder):
        if resume:
            wait_for_roles(load_run(folder).stream_folder)
        run = create_run(config, resume=resume, fork=plan_fork(folder, config, from_version) if fork else None)
        if resume:
            make_way(run)
        outcome = Supervisor(run, launcher_of(run), view).supervise()
        if outcome.exit_code == REFUSED and not resume and not any(run.checkpoints_folder.iterdir()):
            _forget(run)
        return outcome


def prepare(config: Config) -> Run:
    """Makes the folder of a run whose roles are started by hand. Checks and raises as :func:`train` does, and leaves nothing of a refused run."""
    folder = check(config)
    check_learner(config)
    with locked(folder):
        return create_run(config, resume=False)


def launcher_of(run: Run) -> Launcher:
    """What ``launcher.kind`` names. Raises :class:`MissingExtra` where it needs a library that is not installed."""
    settings = run.config.launcher
    if isinstance(settings, LocalSettings):
        return LocalLauncher(run)
    from .ray_launcher import RayLauncher

    return RayLauncher(run, settings)


def _forget(run: Run) -> None:
    """Empties the folder of a run that a role refused before there was anything to train from, so that the corrected one finds its name free."""
    for entry in run.folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != ".lock":
            entry.unlink()


def check(config: Config, *, resume: bool = False, fork: bool = False) -> Path:
    """Everything that can be known without torch, the run's folder first. Leaves nothing behind.

    Returns the folder. Raises the :class:`RollstreamError` of the first thing that is wrong.
    """
    folder = try_folder(config, resume=resume)
    check_but_folder(config, resume=resume and not fork)
    return folder


def check_but_folder(config: Config, *, resume: bool = False) -> list[str]:
    """Contradictions, the environment, the model, this machine, as :func:`check`; whether the run's folder is free is not asked.

    Returns notices: what is worth a look although it can run.
    """
    folder = (Path(config.folder) / config.name).resolve()
    check_config(config)
    if resume:
        check_length(folder, config)
    if not isinstance(config.launcher, LocalSettings):
        from .ray_launcher import load_ray

        load_ray()
    if isinstance(config.model, FolderModel):
        check_model_folder(config.model.path)
    notices = check_env(config)
    check_machine(Run(folder=folder, config=config, run_id="0" * 32))
    return notices


def check_env(config: Config) -> list[str]:
    """Makes each environment and tries it out: a plain turn, a call of each tool. Returns notices.

    Raises :class:`UnknownEnv`, or :class:`ConfigError` for whatever its code does wrong, arguments it does not take, a warm-up nobody can demonstrate.
    """
    registry.load_imports(config.imports)
    notices: list[str] = []
    several = len(config.envs) > 1
    for env in config.envs:
        notices += try_out(env.id, env.kwargs, demonstrates=config.warmup is not None and not several)
    if config.warmup is not None and several:
        silent = [env.id for env in config.envs if not registry.demonstrates(env.id, **env.kwargs)]
        if len(silent) == len(config.envs):
            raise ConfigError(f"warmup: none of {', '.join(silent)} has demonstrations; write demonstrate(self, correct) in one of them, or leave warmup out")
        notices += [f"{env_id}: has no demonstrations; the warm-up goes on the others alone" for env_id in silent]
    trained = {env.id: env.kwargs for env in config.envs}
    for env_id, kwargs in config.evaluated_envs().items():
        if trained.get(env_id) != kwargs:
            notices += [f"evaluation: {notice}" for notice in try_out(env_id, kwargs)]
    return notices


def check_learner(config: Config) -> None:
    """What torch alone can tell: the objective and the devices, in a process of its own. In a run the learner's process does this first.

    Raises :class:`ConfigError`.
    """
    command = [sys.executable, "-P", "-m", "rollstream", "probe"]
    done = subprocess.run(command, input=config.model_dump_json(), capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT_S)
    if done.returncode != 0:
        line = (done.stderr.strip().splitlines() or [f"the check of the learner ended with exit code {done.returncode}"])[-1]
        raise ConfigError(line.removeprefix("error: "))
