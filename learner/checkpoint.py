"""Checkpoints: everything that makes the next step the same step, on disk or not at all.

    checkpoints/v000050/
        manifest.json    version, lineage, settings, progress; size and xxh3-128 of every other file
        model/           a complete Hugging Face folder: configuration, safetensors, tokenizer
        adapter/         with learner.policy.lora: the adapters; model/ is then their base, in version 0 alone, which the others name with its digest
        training.pt      optimiser and random-number state (tensors and plain values only: read with weights_only)
        shards/          with several ranks: the optimiser's moments instead, a file per rank, for any number of ranks (see :mod:`.dcp`)

A checkpoint is written under ``.v000050.tmp``, flushed to disk file by file, and takes its name by one rename after the buffer flushed log and ledger
too: a folder without a dot is complete, whatever was killed when. The newest ``keep_last`` stay, with ``keep_every`` its multiples too, version 0 only
while it is among the newest or the reference of a KL term.
Leftovers with a dot are cleared at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..errors import CheckpointError, RollstreamError

logger = logging.getLogger(__name__)

FORMAT = 2
FIRST = "v000000"
"""The checkpoint of the starting policy, after its warm-up."""
_LITTLE_SPACE_BYTES = 2**20
_NAME = re.compile(r"v(\d{6,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. ``settings`` are the parts of the configuration that a step depends on, ``progress`` the loop's own counters."""

    folder: Path
    version: int
    lineage: int
    settings: dict[str, Any]
    progress: dict[str, float]

    @property
    def model_folder(self) -> Path:
        """Its Hugging Face folder; of a policy with adapters that of their base."""
        return model_folder_of(self.folder)

    @property
    def adapter_folder(self) -> Path | None:
        """Its adapters; None where the weights themselves were trained."""
        folder = self.folder / "adapter"
        return folder if folder.is_dir() else None


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay: the newest ``last``, positive multiples of ``every``, and with ``first`` version 0."""

    last: int
    first: bool = False
    every: int | None = None


def name_of(version: int) -> str:
    """The folder's name of a version's checkpoint."""
    return f"v{version:06d}"


def temporary_of(checkpoints: Path, version: int) -> Path:
    """Where a version's checkpoint is written before it counts."""
    return checkpoints / f".{name_of(version)}.tmp"


def begin_checkpoint(checkpoints: Path, version: int) -> Path:
    """Makes the folder that a version's content goes to, :func:`temporary_of`.

    Raises :class:`CheckpointError` where the disk refuses.
    """
    temporary = temporary_of(checkpoints, version)
    with refused_by_disk(checkpoints, version):
        checkpoints.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    return temporary


def finish_checkpoint(
    checkpoints: Path, *, version: int, lineage: int, settings: dict[str, Any], progress: dict[str, float], keep: Keep, sync: Callable[[], object]
) -> Path:
    """Makes what was written to :func:`temporary_of` the checkpoint of ``version``; ``sync`` makes log and ledger durable before it counts. Prunes afterwards.

    Raises :class:`CheckpointError` where the disk refuses; what was there before is untouched then.
    """
    temporary, final = temporary_of(checkpoints, version), checkpoints / name_of(version)
    with refused_by_disk(checkpoints, version):
        files = {str(path.relative_to(temporary)): _fingerprint(path) for path in sorted(temporary.rglob("*")) if path.is_file()}
        manifest: dict[str, Any] = {"format": FORMAT, "version": version, "lineage": lineage, "settings": settings, "progress": progress, "files": files}
        if not (temporary / "model").is_dir():
            manifest["base"] = {"checkpoint": FIRST, "xxh3": base_digest(checkpoints / FIRST)}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
        for path in [*temporary.rglob("*"), temporary]:
            _flush(path)
        sync()
        if final.exists():
            final.rename(_aside(final))
        temporary.rename(final)
        _flush(checkpoints)
    for folder in _complete(checkpoints)[: -keep.last]:
        number = int(folder.name[1:])
        if not (keep.first if number == 0 else keep.every is not None and number % keep.every == 0):
            _remove(folder)
    clear_leftovers(checkpoints)
    logger.info("checkpoint=%s", final)
    return final


@contextlib.contextmanager
def refused_by_disk(checkpoints: Path, version: int) -> Generator[None]:
    """Raises :class:`CheckpointError`, naming the last good checkpoint, for what the disk refuses inside; what was written by then makes room.

    Where the disk is full, that error ``waits_for_space``.

    On a full disk torch and safetensors raise errors of their own kinds, which say less.
    """
    try:
        yield
    except Exception as error:
        full = os.strerror(errno.ENOSPC)
        is_full = full in str(error) or shutil.disk_usage(checkpoints).free < _LITTLE_SPACE_BYTES
        if isinstance(error, RollstreamError) or not (isinstance(error, OSError) or is_full):
            raise
        shutil.rmtree(temporary_of(checkpoints, version), ignore_errors=True)
        reason = error if isinstance(error, OSError) else full
        refused = CheckpointError(f"checkpoint {checkpoints / name_of(version)} was not written: {reason}; {_last_good(checkpoints)}")
        refused.waits_for_space = is_full
        raise refused from error


def model_folder_of(folder: Path) -> Path:
    """The Hugging Face folder of the checkpoint in ``folder``: its own, or the base of its adapters."""
    own = folder / "model"
    return own if own.is_dir() else _base_of(folder) / "model"


def _base_of(folder: Path) -> Path:
    """The checkpoint that holds the base of the adapters in ``folder``: beside it, or in the run's own checkpoints where a fork put ``folder`` aside."""
    beside, above = folder.parent / FIRST, folder.parents[2] / FIRST
    return above if not beside.is_dir() and above.is_dir() else beside


def base_digest(folder: Path) -> str:
    """What names the base of adapters: xxh3-128 of the sizes and hashes that the manifest of checkpoint ``folder`` has for its model."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    files = {name: entry for name, entry in manifest["files"].items() if name.startswith("model/")}
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())


def newest_checkpoint(checkpoints: Path) -> Checkpoint | None:
    """The newest checkpoint, every byte of it checked; None where there is none.

    Raises :class:`CheckpointError`, naming the last good one, where it is damaged: going on from an older one is a person's decision.
    """
    folders = _complete(checkpoints)
    return read_checkpoint(folders[-1]) if folders else None


def damaged_checkpoints(checkpoints: Path) -> list[str]:
    """What is wrong with the checkpoints in that folder, every byte of each checked: a line for each that is damaged."""
    found = [(folder, _fault(folder)) for folder in (_complete(checkpoints) if checkpoints.is_dir() else [])]
    return [f"checkpoint {folder.name} is damaged: {fault}" for folder, fault in found if fault and folder.is_dir()]


def newest_of(folders: Iterable[Path], wanted: Callable[[int, int], bool]) -> Checkpoint | None:
    """The newest checkpoint in any of ``folders`` whose (lineage, version) is ``wanted``, every byte of it checked; None where there is none.

    One that a live run removes meanwhile is passed over. Raises :class:`CheckpointError` where it is damaged.
    """
    for path in sorted((path for folder in folders for path in _complete(folder)), key=lambda path: int(path.name[1:]), reverse=True):
        try:
            saved = read_checkpoint(path)
        except CheckpointError:
            if path.exists():
                raise
            continue
        if wanted(saved.lineage, saved.version):
            return saved
    return None


def read_checkpoint(folder: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint in ``folder``, every byte of it checked; not so with ``verify`` False, where another rank did.

    Raises :class:`CheckpointError` where it is missing or damaged, naming the last good one beside it.
    """
    fault = _fault(folder) if verify else ""
    if fault:
        raise CheckpointError(f"checkpoint {folder} is damaged ({fault}); {_last_good(folder.parent, except_for=folder)}")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return Checkpoint(folder, manifest["version"], manifest["lineage"], manifest["settings"], manifest["progress"])


def clear_leftovers(checkpoints: Path) -> None:
    """Removes what a killed process left half-written or half-removed."""
    if checkpoints.is_dir():
        for path in checkpoints.iterdir():
            if path.name.startswith(".v") and path.suffix in (".tmp", ".old"):
                shutil.rmtree(path, ignore_errors=True)


def _complete(checkpoints: Path) -> list[Path]:
    """Folders with a checkpoint's name, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [(int(match[1]), path) for path in checkpoints.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]


def _fault(folder: Path) -> str:
    """What is wrong with ``folder``; empty where nothing is."""
    try:
        manifest: Any = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']}, this version reads {FORMAT}"
        for name, expected in manifest["files"].items():
            found = _fingerprint(folder / name)
            if found != expected:
                return f"{name} has {found['size_bytes']} bytes with xxh3 {found['xxh3']}, its manifest says {expected['size_bytes']} with {expected['xxh3']}"
        if not {"version", "lineage", "settings", "progress"} <= manifest.keys():
            return "manifest.json is incomplete"
        if "base" in manifest:
            base = _base_of(folder)
            if fault := _fault(base):
                return f"its base {base.name} is damaged: {fault}"
            if base_digest(base) != manifest["base"]["xxh3"]:
                return f"its base {base.name} is another model than its adapters were trained on"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be read: {error}"
    return ""


def _last_good(checkpoints: Path, except_for: Path | None = None) -> str:
    for folder in reversed(_complete(checkpoints)):
        if folder != except_for and not _fault(folder):
            damaged = f"move {except_for.name} away to resume from it" if except_for is not None else "it is untouched"
            return f"the last good one is {folder.name}: {damaged}"
    return "there is no other good one: start a new run"


def _fingerprint(path: Path) -> dict[str, Any]:
    hasher = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
            size += len(block)
    return {"size_bytes": size, "xxh3": hasher.hexdigest()}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _aside(folder: Path) -> Path:
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    return aside


def _remove(folder: Path) -> None:
    """By rename first: a kill halfway must not leave something with a checkpoint's name."""
    aside = _aside(folder)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
