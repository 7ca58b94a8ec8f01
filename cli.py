"""The command line. Each command imports what it needs when it runs, so that ``rollstream --help`` loads nothing heavy.

Exit codes: 0 the job did what was asked · 1 it failed · 2 the input has to change · 130 ended by Ctrl-C. An error is one line on standard error;
``--debug`` adds the trace.
"""

# ruff: noqa: D301 - the backspace in a docstring is what keeps its examples unwrapped

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from . import role_commands
from .errors import RollstreamError, describe
from .models_command import models_app
from .options import ConfigArgument, DebugOption, OverridesArgument, RunArgument

app = typer.Typer(
    name="rollstream",
    help="Rollstream: asynchronous actor-learner reinforcement learning of language models.",
    epilog="First steps:  rollstream train quickstart  (under three minutes on a laptop), then  rollstream audit runs/quickstart",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
envs_app = typer.Typer(help="Registered environments.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(envs_app, name="envs")
app.add_typer(models_app, name="models")


def _version(value: bool) -> None:
    if value:
        from . import __version__

        typer.echo(f"rollstream {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False) -> None:
    pass


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in this folder from its last checkpoint.")] = False,
    fork: Annotated[bool, typer.Option("--fork", help="With --resume: go on in a new lineage, with other settings or from an older version.")] = False,
    from_version: Annotated[
        int | None, typer.Option("--from-version", metavar="N", min=0, help="With --fork: from this checkpoint.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No view while it runs; the summary still comes.")] = False,
    debug: DebugOption = False,
) -> int:
    """Train a policy on this machine, with a live view.

    Starts the buffer, the learner and the actors, each as a process, and shows how they fare.

    Ctrl-C stops cleanly with a checkpoint; a second Ctrl-C at once. Everything is kept in runs/NAME.

    With --resume, whatever gives the recorded batches their meaning (seed, model, environment, loss, optimizer, depth, max_lag) stays as recorded,
    and the batches after the last checkpoint are trained again as they were. With --fork they are undone instead: their groups are trained anew,
    under a new loss, optimizer, depth or max_lag. What was beyond the checkpoint is kept aside.

    \b
    Examples:
      rollstream train quickstart
      rollstream train quickstart name=short learner.versions=50
      rollstream train my.yaml buffer.depth=0
      rollstream train quickstart --resume
      rollstream train quickstart --resume --fork --from-version 100 learner.loss.kind=gspo
    """
    from .configs.loader import load_config, load_resumed
    from .configs.resume import kept_as_recorded
    from .errors import ConfigError
    from .run import train as run_training
    from .summary import Ending, print_summary
    from .watch import Screen, View

    del debug
    screen = Screen(highlight=False)
    if (fork and not resume) or (from_version is not None and not fork):
        raise ConfigError("--fork needs --resume and --from-version needs --fork: together they go on with a run in another lineage")
    loaded = load_resumed(config, overrides or (), fork=fork) if resume else load_config(config, overrides or ())
    if resume and (kept := kept_as_recorded(load_config(config, overrides or ()), loaded)):
        typer.echo(f"notice: {kept}", err=True)
    outcome = run_training(loaded, resume=resume, view=View(screen, quiet=quiet), fork=fork, from_version=from_version)
    if outcome.error is not None:
        logs = f"; see {os.path.relpath(outcome.run.logs_folder)}" if outcome.run.logs_folder.is_dir() else ""
        typer.echo(f"error: {outcome.error}{logs}", err=True)
    arguments = ("train", config, *(overrides or ()))
    print_summary(outcome.run, Ending(outcome.exit_code, outcome.wall_s, outcome.cpu_s, outcome.num_restarts, arguments, resume), screen)
    return outcome.exit_code


@app.command()
def check(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[bool, typer.Option("--resume", help="Check what train --resume would do.")] = False,
    debug: DebugOption = False,
) -> int:
    """Check a configuration without running it.

    Keys, bounds, contradictions, the environment, the model, ports and memory of this machine, last the run folder. Leaves nothing behind.
    The environment is played: one plain turn, one call of each tool, with a warm-up its demonstrations, each after a fresh reset; what its tools do, they do.

    \b
    Examples:
      rollstream check quickstart
      rollstream check my.yaml buffer.max_lag=2
    """
    from .configs.claim import try_folder
    from .configs.loader import load_config, load_resumed
    from .configs.resume import kept_as_recorded
    from .errors import RunFolderError
    from .run import check_but_folder, check_learner

    del debug
    loaded = load_resumed(config, overrides or ()) if resume else load_config(config, overrides or ())
    kept = kept_as_recorded(load_config(config, overrides or ()), loaded) if resume else ""
    for notice in filter(None, [kept, *check_but_folder(loaded, resume=resume)]):
        typer.echo(f"notice: {notice}", err=True)
    check_learner(loaded)
    try:
        try_folder(loaded, resume=resume)
    except RunFolderError as error:
        raise RunFolderError(f"all is fine but the folder: {error}") from None
    command = shlex.join(["rollstream", "train", config, *(overrides or ()), *(["--resume"] if resume else [])])
    typer.echo(f"{config}: fine; {command} would {'go on in' if resume else 'write'} {os.path.join(loaded.folder, loaded.name)}")
    return 0


@app.command("show-config")
def show_config(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    explain: Annotated[bool, typer.Option("--explain", help="Add the meaning of each key as a comment.")] = False,
    debug: DebugOption = False,
) -> int:
    """Print the complete, resolved configuration.

    Defaults, then the preset, then CONFIG, then the overrides. A mapping as an override is merged: keys of CONFIG that it does not name stay.

    \b
    Examples:
      rollstream show-config quickstart learner.preset=grpo
      rollstream show-config quickstart --explain
    """
    from .configs.explain import explained
    from .configs.loader import dump_config, load_config

    del debug
    loaded = load_config(config, overrides or ())
    typer.echo(explained(loaded) if explain else dump_config(loaded), nl=False)
    return 0


@app.command()
def audit(run: RunArgument, debug: DebugOption = False) -> int:
    """Close the books of a run.

    Groups per state, lag trained, drops, duplicates, every byte of the log and of the checkpoints; exit code 1 where anything is wrong.
    Reads only; also while the run goes on.

    \b
    Example:
      rollstream audit runs/quickstart
    """
    from .buffer.audit import audit as audit_run
    from .buffer.audit_report import note
    from .configs.loader import load_run
    from .learner.checkpoint import damaged_checkpoints
    from .summary import audit_lines

    del debug
    opened = load_run(run)
    report = audit_run(opened.folder)
    note(report, damaged_checkpoints(opened.checkpoints_folder))
    for line in audit_lines(report):
        typer.echo(line)
    return 0 if report.closes and not report.problems else 1


@app.command()
def log(
    run: RunArgument,
    group: Annotated[str | None, typer.Option(help="Only of this group: 12, or e3 for one of an evaluation.", show_default=False)] = None,
    version: Annotated[int | None, typer.Option(min=0, help="Only what was trained in this version's batch, or evaluated of it.", show_default=False)] = None,
    purpose: Annotated[str, typer.Option(metavar="train|eval", help="What was played to train, or to evaluate.")] = "train",
    status: Annotated[str | None, typer.Option(help="Only terminated, truncated or failed ones.", show_default=False)] = None,
    env: Annotated[str | None, typer.Option(metavar="ID", help="Only of this environment.", show_default=False)] = None,
    reward_below: Annotated[float | None, typer.Option(help="Only rewards below this.", show_default=False)] = None,
    reward_above: Annotated[float | None, typer.Option(help="Only rewards above this.", show_default=False)] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed ones: short for --status failed.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="At most the newest this many; 50 on the screen, all in an export.", show_default=False)] = None,
    show: Annotated[str | None, typer.Option(metavar="GROUP/MEMBER", help="One trajectory, turn by turn.", show_default=False)] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="With --show: every token with its version, log-probability and mask.")] = False,
    export: Annotated[Path | None, typer.Option(metavar="PATH", help="Write to PATH.parquet or PATH.jsonl.", show_default=False)] = None,
    sql: Annotated[
        str | None, typer.Option(help="Ask DuckDB: views trajectories, members, groups, batches, evaluations, amendments.", show_default=False)
    ] = None,
    debug: DebugOption = False,
) -> int:
    """Look at the trajectories of a run.

    Lists them, filtered; shows one; exports them; answers SQL. Reads only; also while the run goes on.
    What columns a view has, --sql "DESCRIBE members" says.

    \b
    Examples:
      rollstream log runs/quickstart --version 12 --reward-below 0.5
      rollstream log runs/quickstart --show 31/0 --tokens
      rollstream log runs/quickstart --purpose eval --version 40
      rollstream log runs/quickstart --export failed.jsonl --failed
      rollstream log runs/quickstart --sql "SELECT lag, count(*), avg(reward) FROM members GROUP BY lag ORDER BY lag"
    """
    from .buffer.inspect import Filter
    from .configs.loader import load_run
    from .errors import ConfigError
    from .log_command import group_of, log_lines

    del debug
    if failed and status not in (None, "failed"):
        raise ConfigError(f"--failed and --status {status} contradict each other; give one of them")
    if purpose not in ("train", "eval"):
        raise ConfigError(f"--purpose {purpose} is neither train nor eval")
    group_id = None if group is None else group_of(group, "--group")
    meant = None if group_id is not None else "eval" if purpose == "eval" else "train"
    chosen = Filter(group_id, version, "failed" if failed else status, env, reward_below, reward_above, meant, limit)
    for line in log_lines(load_run(run), chosen, show=show, tokens=tokens, export=export, sql=sql):
        typer.echo(line)
    return 0


@app.command()
def replay(
    run: RunArgument,
    version: Annotated[int, typer.Option(metavar="N", min=1, help="The version whose step is computed again.", show_default=False)],
    lineage: Annotated[
        int | None, typer.Option(metavar="L", min=0, help="In the history of this lineage; default the current one.", show_default=False)
    ] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(metavar="a.b=value", help="Score the same batch under another loss or advantage.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: DebugOption = False,
) -> int:
    """Compute a step again and compare.

    Rebuilds the batch from the log and the weights from the checkpoint before it, takes the step, and says which figure differs from the recorded one.

    Exit code 0 where all agree, 1 where one differs. Writes nothing; also while the run goes on. With --what-if it shows both side by side.

    \b
    Examples:
      rollstream replay runs/quickstart --version 120
      rollstream replay runs/quickstart --version 120 --what-if learner.loss.kind=gspo --what-if learner.loss.agg=seq_mean_token_mean
    """
    from .configs.loader import load_run
    from .replay_command import replay_lines

    del debug
    lines, agree = replay_lines(load_run(run), version, lineage, what_if=what_if or (), as_json=as_json)
    for line in lines:
        typer.echo(line)
    return 0 if agree else 1


@app.command()
def evaluate(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="evaluation.x=value", help="Settings of the evaluation in place of the run's.", show_default=False)
    ] = None,
    version: Annotated[str, typer.Option(metavar="N|last", help="A version whose checkpoint was kept.")] = "last",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: DebugOption = False,
) -> int:
    """Score a checkpoint of a run.

    The same evaluators, tasks and random numbers as while training; reads only the run's checkpoint, so it may still be training.

    \b
    Examples:
      rollstream evaluate runs/quickstart
      rollstream evaluate runs/quickstart --version 100 evaluation.tasks=256 evaluation.samples=8 'evaluation.k=[1, 8]'
      rollstream evaluate runs/quickstart evaluation.sampling.temperature=0
    """
    from .configs.loader import load_run
    from .evaluate_command import lines, score
    from .watch import Screen, View

    del debug
    scored = score(load_run(run), version, overrides or (), View(Screen(highlight=False), quiet=True))
    if scored.error is not None:
        raise scored.error
    for line in [json.dumps(row) for row in scored.rows] if as_json else lines(scored):
        typer.echo(line)
    return scored.exit_code


@envs_app.command("list")
def envs_list(
    imports: Annotated[list[str] | None, typer.Argument(metavar="MODULE", help="Modules or files that register more.", show_default=False)] = None,
    debug: DebugOption = False,
) -> int:
    """List every registered environment.

    \b
    Examples:
      rollstream envs list
      rollstream envs list my_envs.py
    """
    from .envs import registry

    del debug
    registry.load_imports(tuple(imports or ()))
    for env_id in registry.registered_ids():
        typer.echo(env_id)
    return 0


app.registered_commands += role_commands.app.registered_commands


@app.command(hidden=True)
def probe() -> int:
    """Check what only torch can tell of a configuration, given as JSON on standard input."""
    from .configs.schema import Config
    from .envs.registry import load_imports
    from .roles import probe as probe_config

    config = Config.model_validate_json(sys.stdin.read())
    load_imports(config.imports)
    probe_config(config)
    return 0


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of ``rollstream``: runs a command and exits with its code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    try:
        code = app(args=arguments, prog_name="rollstream", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - the last place that can turn a failure into one line
        if debug:
            traceback.print_exception(error)
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(str(error), err=True)
            sys.exit(2)
        line, code = _in_one_line(error, debug=debug)
        typer.echo(f"error: {line}", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def _in_one_line(error: Exception, *, debug: bool) -> tuple[str, int]:
    """The error for a person, and the exit code."""
    if isinstance(error, RollstreamError):
        return str(error), error.exit_code
    usage = getattr(error, "format_message", None)
    if callable(usage):
        context = getattr(error, "ctx", None)
        said = " ".join(str(usage()).split()).rstrip(".")
        return f"{said}; see {context.command_path if context else 'rollstream'} --help", 2
    if type(error).__module__ == "sqlite3":
        return describe(error), 2
    return f"{describe(error)}{'' if debug else '; run with --debug for the trace'}", 1
