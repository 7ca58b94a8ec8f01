"""``python -m rollstream``, and what the command starts from: so little is loaded here that Ctrl-C while the rest loads ends in silence."""

from __future__ import annotations

import sys


def start() -> None:
    """Entry point of ``rollstream``."""
    try:
        from .cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    start()
