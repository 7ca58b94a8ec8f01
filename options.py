"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped recipe such as quickstart.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="a.b=value", help="Values that replace those of CONFIG, for example learner.versions=50 seed=1.", show_default=False),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/quickstart.", show_default=False)]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the Python trace of an error.")]
IdOption = Annotated[str | None, typer.Option("--id", metavar="NAME", help="Name of this process in logs and to the buffer.", show_default=False)]
EndpointOption = Annotated[str | None, typer.Option(metavar="tcp://HOST:PORT", help="Where the buffer is reached from here.", show_default=False)]
KeysOption = Annotated[Path | None, typer.Option(metavar="FILE", help="A copy of the run's keys/client.json.", show_default=False)]
SupervisedOption = Annotated[bool, typer.Option("--supervised", hidden=True)]
