"""The order of the tests (files of whole runs first, so that several processes that share the files end at about the same time), and what many of them need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by file, those with slow tests first."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread while the test runs."""
    import torch  # most tests load none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
