"""Where in a user's code something went wrong, and what it said, in one line each."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from .messages import named

_MAX_TEXT = 300


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks and not endless."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def name_and_text(error: BaseException) -> str:
    """``KeyError: 'answer'``; the name alone where the error says nothing."""
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def user_line(error: BaseException) -> str:
    """`` (file.py, line n)`` of the innermost frame that is the user's: not ours, the standard library's or an installed package's; empty without one.

    A syntax error names the line that cannot be read.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}, line {error.lineno})"
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        module = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if module != "rollstream" and module not in sys.stdlib_module_names and "site-packages" not in code.co_filename and code.co_filename[:1] != "<":
            found = f" ({Path(code.co_filename).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found


def number_needed(value: object) -> str:
    """Says of what stands in the place of a number that it is none; of a tensor or an array, how to make it one."""
    if value is None or isinstance(value, float | np.floating):
        return f"{value!r}; it must be a finite number"
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else f'{text[:60]}…'}, {named(value).lower()}; give {'float(…)' if hasattr(value, '__float__') else 'a finite number'}"
