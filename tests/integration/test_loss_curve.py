"""Training from a recorded stream gives the recorded loss curve: bit for bit twice on one machine, and to 1e-5 the one that is committed.

``tests/golden/loss_curve`` holds the stream (Arrow) and the curves; ``tests/golden/loss_curve_goldens.py`` recorded both.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loss_curve_goldens import FOLDER, SETTINGS, curve, trained

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", SETTINGS)
def test_the_recorded_stream_gives_the_recorded_curve(name: str, tmp_path: Path) -> None:
    rows, _ = trained(tmp_path, name)
    expected = json.loads((FOLDER / "curves.json").read_text(encoding="utf-8"))[name]
    found = curve(rows)
    assert len(found) == len(expected) == 8
    for version, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
        assert one.keys() == other.keys(), f"version {version}"
        wrong = {key: (one[key], other[key]) for key in one if one[key] != pytest.approx(other[key], rel=TOLERANCE, abs=TOLERANCE)}
        assert wrong == {}, f"version {version}"
    assert len({row["loss/total"] for row in found}) == 8, "it learns something"


@pytest.mark.parametrize("name", ["async", "grpo"])
def test_training_twice_from_the_stream_is_bit_identical(name: str, tmp_path: Path) -> None:
    (first, digests), (second, again) = (trained(tmp_path / part, name) for part in ("first", "second"))
    assert curve(first) == curve(second)
    assert digests == again
    assert len(set(digests.values())) == 9


def test_the_recording_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 400_000
