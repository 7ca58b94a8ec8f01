"""The commands for people who start the roles of a run themselves: one role each, and what goes before and after."""

# ruff: noqa: D301 - the backspace in a docstring is what keeps its examples unwrapped

from __future__ import annotations

import os
import socket
from typing import Annotated

import typer

from .options import ConfigArgument, DebugOption, EndpointOption, IdOption, KeysOption, OverridesArgument, RunArgument, SupervisedOption

app = typer.Typer()


@app.command()
def buffer(run: RunArgument, name: IdOption = None, supervised: SupervisedOption = False, debug: DebugOption = False) -> int:
    """Run the buffer of a run by hand."""
    from .roles import run_role

    del debug
    return run_role("buffer", run, name or "buffer", supervised=supervised)


@app.command()
def learner(
    run: RunArgument,
    rank: Annotated[int, typer.Option("--rank", metavar="R", min=0, help="Which of the learner.policy.ranks this process is, counted from 0.")] = 0,
    meet: Annotated[
        str | None,
        typer.Option("--meet", metavar="HOST:PORT", help="Where rank 0 listens for the others, if they are on several machines.", show_default=False),
    ] = None,
    name: IdOption = None,
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
    supervised: SupervisedOption = False,
    debug: DebugOption = False,
) -> int:
    """Run the learner of a run by hand: one process per rank.

    \b
    Examples:
      rollstream learner runs/NAME --rank 0 & rollstream learner runs/NAME --rank 1
      rollstream learner /shared/mine --rank 1 --meet 10.0.0.5:5700 --endpoint tcp://10.0.0.5:5600
    """
    from .roles import run_role

    del debug
    name = name or (f"learner-{rank}" if rank else "learner")
    return run_role("learner", run, name, supervised=supervised, rank=rank, meet=meet, address=endpoint, keys=keys)


@app.command()
def actor(
    run: RunArgument,
    join: Annotated[bool, typer.Option("--join", help="Join a live run; refused at once where there is none.")] = False,
    name: IdOption = None,
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
    supervised: SupervisedOption = False,
    debug: DebugOption = False,
) -> int:
    """Run one more actor of a run by hand.

    With --join it gets a name of its own, takes part at once, and ends by itself with the run; Ctrl-C makes it give back what it plays and leave.

    On another machine, RUN is the run's folder or a copy of it; --endpoint and --keys say how the buffer is reached from there.

    \b
    Examples:
      rollstream actor --join runs/quickstart
      rollstream actor --join runs/NAME --endpoint tcp://10.0.0.5:5600 --keys client.json
    """
    from .by_hand import name_to_join
    from .roles import run_role

    del debug
    name = name_to_join(run, name, address=endpoint, keys=keys) if join else name or f"actor-{socket.gethostname().partition('.')[0]}-{os.getpid()}"
    return run_role("actor", run, name, supervised=supervised, address=endpoint, keys=keys)


@app.command()
def prepare(config: ConfigArgument, overrides: OverridesArgument = None, debug: DebugOption = False) -> int:
    """Make the folder of a run whose roles you start yourself.

    Checks everything that train checks, writes the folder, and prints it; then start buffer, learner and actors with it, anywhere it can be seen.

    \b
    Example:
      rollstream prepare quickstart name=mine && rollstream buffer runs/mine
    """
    from .configs.loader import load_config
    from .run import prepare as prepare_run

    del debug
    typer.echo(os.path.relpath(prepare_run(load_config(config, overrides or ())).folder))
    return 0


@app.command()
def stop(run: RunArgument, debug: DebugOption = False) -> int:
    """Stop a live run in order, however it was started.

    The learner writes a checkpoint; nothing is lost, and --resume goes on.

    \b
    Example:
      rollstream stop runs/quickstart
    """
    from .by_hand import stop_run

    del debug
    return 0 if stop_run(run) else 1


@app.command()
def evaluator(
    run: RunArgument,
    name: IdOption = None,
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
    supervised: SupervisedOption = False,
    debug: DebugOption = False,
) -> int:
    """Run one more evaluator of a run by hand; as for an actor, also on another machine.

    \b
    Example:
      rollstream evaluator runs/quickstart --id evaluator-extra
    """
    from .roles import run_role

    del debug
    name = name or f"evaluator-{socket.gethostname().partition('.')[0]}-{os.getpid()}"
    return run_role("evaluator", run, name, supervised=supervised, address=endpoint, keys=keys)


@app.command(hidden=True)
def scorer(run: RunArgument, name: IdOption = None, supervised: SupervisedOption = False, debug: DebugOption = False) -> int:
    """Publish the checkpoint that a run of ``rollstream evaluate`` scores."""
    from .roles import run_role

    del debug
    return run_role("scorer", run, name or "scorer", supervised=supervised)
