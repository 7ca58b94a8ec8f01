"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/quickstart.", show_default=False)]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the Python trace of an error.")]
