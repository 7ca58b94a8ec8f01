"""Runs golden cases through the functions that training uses: ``python -m rollstream.learner.golden CASES.json [--dtype float64|float32]``.

A file holds ``{"cases": [{"id", "kind", "inputs", "hyper", "expect", "traps"?}]}`` (algorithms, section 13). Every case gets a line, ``pass`` or ``FAIL`` with
the first outputs that differ and the trap, if any, whose numbers came out instead; the last line counts. Exit code 1 if one failed, 2 if the file cannot
be read.

Tolerance: float64 1e-9 relative with 1e-12 absolute (numbers that are 0 but for rounding); float32 2e-5 relative plus 1e-6 absolute.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, DataRefused
from .golden_kinds import KINDS, Case, number

TOLERANCE = {"float64": (1e-9, 1e-12), "float32": (2e-5, 1e-6)}
"""Relative and absolute, by dtype."""
BEYOND_THE_PAGE = ("drift_mu_k1", "drift_mu_k3", "drift_mu_ess", "entropy")
"""Metrics a run reports on top of those of section 9: no case expects them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one case came out; ``problem`` is empty when it passed."""

    id: str
    problem: str

    @property
    def passed(self) -> bool:
        """Whether the case passed."""
        return not self.problem


def check_case(case: Case, dtype: str) -> Verdict:
    """Runs one case and compares every output it expects, ``dtype`` float64 or float32."""
    name = str(case.get("id", "?"))
    expect = case["expect"]
    must_refuse = isinstance(expect, dict) and expect.get("error") == "rejected"
    runner = KINDS.get(case["kind"])
    if runner is None:
        return Verdict(name, f"kind {case['kind']!r} is unknown, known are {', '.join(KINDS)}")
    try:
        got = runner(case, dtype)
    except (DataRefused, ConfigError) as error:
        return Verdict(name, "" if must_refuse else f"refused: {error}")
    except Exception as error:  # noqa: BLE001 - one broken case is that case's verdict, the others still run
        return Verdict(name, f"{type(error).__name__}: {error}")
    if must_refuse:
        return Verdict(name, f"not refused, though it must be ({expect.get('why', 'no reason given')})")
    differences = list(_differences(expect, got, dtype))
    if not differences:
        return Verdict(name, "")
    shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
    return Verdict(name, shown + _trap(case, got, dtype))


def run(cases: list[Case], dtype: str) -> list[Verdict]:
    """The verdict of every case, in order."""
    return [check_case(case, dtype) for case in cases]


def _differences(expect: Case, got: Case, dtype: str) -> Iterator[str]:
    """Where ``got`` differs from ``expect``: output by output, the first number of each."""
    for output, wanted in expect.items():
        if output == "why":
            continue
        if output not in got:
            yield f"{output}: expected, and not computed"
            continue
        found = got[output]
        if isinstance(wanted, dict):
            surplus = sorted(set(found) - set(wanted) - set(BEYOND_THE_PAGE))
            if surplus:
                yield f"{output}: {', '.join(surplus)} not expected"
            yield from _differences_of_parts(output, wanted, found, dtype)
        else:
            yield from _first_difference(output, wanted, found, dtype)


def _differences_of_parts(output: str, wanted: Case, found: Case, dtype: str) -> Iterator[str]:
    for part, value in wanted.items():
        if part not in found:
            yield f"{output}.{part}: expected, and not computed"
        else:
            yield from _first_difference(f"{output}.{part}", value, found[part], dtype)


def _first_difference(name: str, wanted: object, found: object, dtype: str) -> Iterator[str]:
    """At most one difference inside nested lists."""
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            yield f"{name}: expected a list of {len(wanted)}, got {len(found) if isinstance(found, list) else found}"
            return
        for index, (each, other) in enumerate(zip(wanted, found, strict=True)):
            inner = list(_first_difference(f"{name}[{index}]", each, other, dtype))
            if inner:
                yield inner[0]
                return
    elif not _close(wanted, found, dtype):
        yield f"{name}: expected {wanted}, got {found}"


def _close(wanted: object, found: object, dtype: str) -> bool:
    if isinstance(wanted, bool) or isinstance(found, bool):
        return bool(wanted) == bool(found)
    if isinstance(found, list | dict) or wanted is None or found is None:
        return wanted == found
    expected, got = number(wanted), number(found)
    if math.isnan(expected) or math.isinf(expected) or not math.isfinite(got):
        return expected == got or (math.isnan(expected) and math.isnan(got))
    relative, absolute = TOLERANCE[dtype]
    return abs(expected - got) <= relative * abs(expected) + absolute


def _trap(case: Case, got: Case, dtype: str) -> str:
    """Names the trap whose numbers all came out."""
    for name, values in case.get("traps", {}).items():
        if isinstance(values, dict) and values and not any(_differences(values, got, dtype)):
            return f"; this is the trap {name}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rollstream.learner.golden", description="Run golden cases through the functions that training uses.")
    parser.add_argument("cases", type=Path, help="JSON file of cases")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float64")
    options = parser.parse_args(arguments)
    try:
        cases = json.loads(options.cases.read_text())["cases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"{options.cases} holds no cases: {type(error).__name__}: {error}\n")
        return 2
    verdicts = run(cases, options.dtype)
    for verdict in verdicts:
        sys.stdout.write(f"pass {verdict.id}\n" if verdict.passed else f"FAIL {verdict.id}: {verdict.problem}\n")
    failed = sum(not verdict.passed for verdict in verdicts)
    sys.stdout.write(f"{len(verdicts) - failed} passed, {failed} failed\n")
    return 1 if failed or not verdicts else 0


if __name__ == "__main__":
    raise SystemExit(main())
