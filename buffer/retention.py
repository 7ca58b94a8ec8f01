"""Versions that the learner keeps for evaluations after they are no longer the newest, in whichever weights channel.

    FOLDER/retained-LINEAGE-VERSION   manifest of a version that is kept; gone once the learner lets go of it

At most ``room`` of them hold a slot of the channel at once, one that was let go of and is still being read among them: so evaluators that read old versions
never leave the writer without a slot. A version that finds no room is not kept, and the learner reports its evaluation as skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from ..errors import WeightsError
from .manifest import Manifest


class Retention:
    """What one writer keeps. ``is_read`` says whether a slot is still read by somebody; used by the thread that writes, but for :meth:`want`."""

    def __init__(self, folder: Path, room: int, is_read: Callable[[int], bool]) -> None:
        self.room = room
        self._folder = folder
        self._is_read = is_read
        self._kept: dict[tuple[int, int], int] = {}
        self._let_go: set[int] = set()
        self._wanted: Collection[tuple[int, int]] | None = None

    @property
    def slots(self) -> Collection[int]:
        """Slots that must not be written."""
        return self._kept.values()

    @property
    def full(self) -> str:
        """What takes up the room, for people."""
        versions = ", ".join(str(version) for _, version in sorted(self._kept)) or "none"
        return f"evaluation.retain {self.room}: kept for evaluations that go on are versions {versions}; raise it, or evaluate less often (evaluation.every)"

    def want(self, wanted: Collection[tuple[int, int]]) -> None:
        """Says which (lineage, version) are still needed; what is not is let go of before the next version is written. From any thread."""
        self._wanted = wanted

    def let_go(self) -> None:
        """Lets go of what is needed no more; called by the writer before it takes a slot."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            for key in [key for key in self._kept if key not in wanted]:
                _path(self._folder, *key).unlink(missing_ok=True)
                self._let_go.add(self._kept.pop(key))

    def written(self, slot: int) -> None:
        """The slot holds another version now."""
        self._let_go.discard(slot)

    def keep(self, manifest: Manifest, *, last: bool = False) -> bool:
        """Keeps the version written last. False where there is no room; ``last`` says that nothing will be written after it, which then needs none."""
        self._let_go = {slot for slot in self._let_go if self._is_read(slot)}
        if len(self._kept) + len(self._let_go) >= self.room and not last:
            return False
        temporary = self._folder / "retained.tmp"
        temporary.write_bytes(msgspec.json.encode(manifest))
        temporary.rename(_path(self._folder, manifest.lineage, manifest.version))
        self._kept[manifest.lineage, manifest.version] = manifest.slot
        return True


def find_retained(folder: Path, lineage: int, version: int) -> Manifest | None:
    """The manifest of a version that is kept in the channel at ``folder``; None where it is not.

    Raises :class:`WeightsError` where the manifest cannot be read.
    """
    path = _path(folder, lineage, version)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise WeightsError(f"manifest {path} cannot be read: {error}") from error


def _path(folder: Path, lineage: int, version: int) -> Path:
    return folder / f"retained-{lineage}-{version}"
