"""A checkpoint that the disk has no room for: one error that names it and the last good one, whichever library hit the limit, and its room given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollstream.errors import CheckpointError
from rollstream.learner.checkpoint import begin_checkpoint, refused_by_disk


def _write(tensors: dict[str, Any], path: Path) -> None:
    path.write_bytes(b"".join(tensor.numpy().tobytes() for tensor in tensors.values()))


@pytest.mark.parametrize("save", [torch.save, save_file, _write])
def test_a_full_disk_is_named_with_the_last_good_checkpoint_and_the_half_written_one_goes(save: Callable[..., None], small_disk: Path) -> None:
    temporary = begin_checkpoint(small_disk, 3)
    with pytest.raises(CheckpointError, match=r"v000003 was not written: .*No space left on device"), refused_by_disk(small_disk, 3):
        save({"weights": torch.zeros(8 * 2**20)}, temporary / "file")
    assert list(small_disk.iterdir()) == []
