"""What every benchmark script shares: its two options, its rows, and how it prints them."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One figure: ``value`` in ``unit``, and ``ratio`` to the named ``yardstick`` measured in the same run.

    ``spread`` is (max − min) / median over the repeats.
    """

    name: str
    value: float
    unit: str
    yardstick: str
    ratio: float | None
    spread: float


def options(description: str | None) -> argparse.Namespace:
    """``--quick`` (under a minute) and ``--json PATH``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a run of under a minute; its figures are rough")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there")
    return parser.parse_args()


def row(name: str, values: Sequence[float], unit: str, *, yardstick: str = "", over: float | None = None) -> Row:
    """Median of ``values``; ``over`` is the yardstick's value in the same unit."""
    middle = statistics.median(values)
    return Row(name, middle, unit, yardstick, middle / over if over else None, (max(values) - min(values)) / middle if middle else 0.0)


def report(rows: Sequence[Row], path: Path | None) -> None:
    """Print the rows and the load average; write them to ``path`` where one is given."""
    print(f"load average {' '.join(f'{load:.2f}' for load in os.getloadavg())}, {os.cpu_count()} cores")
    width = max(len(entry.name) for entry in rows)
    for entry in rows:
        ratio = f"  {entry.ratio:.2f} × {entry.yardstick}" if entry.ratio is not None else ""
        print(f"{entry.name:<{width}}  {entry.value:>10.4g} {entry.unit:<12} spread {entry.spread:.0%}{ratio}")
    if path is not None:
        path.write_text(json.dumps([asdict(entry) for entry in rows], indent=2) + "\n")
