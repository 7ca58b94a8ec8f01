"""What the tests of the ledger are given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.buffer.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger, closed after the test."""
    made = Ledger(tmp_path / "ledger.sqlite", "run-a")
    yield made
    made.close()
