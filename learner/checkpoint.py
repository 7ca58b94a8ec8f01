"""Checkpoints: everything that makes the next step the same step, on disk or not at all.

    checkpoints/v000050/
        manifest.json    version, lineage, settings, progress; size and xxh3-128 of every other file
        model/           a complete Hugging Face folder: configuration, safetensors, tokenizer
        adapter/         with learner.policy.lora: the adapters; model/ is then their base, in version 0 alone, which the others name with its digest
        training.pt      optimiser and random-number state, the value head where there is one (tensors and plain values only: read with weights_only)

A checkpoint is written under ``.v000050.tmp``, flushed to disk file by file, and takes its name by one rename after the buffer flushed log and ledger
too: a folder without a dot is complete, whatever was killed when. The newest ``keep_last`` stay, with ``keep_every`` its multiples too, version 0 only
while it is among the newest or the reference of a KL term.
Leftovers with a dot are cleared at the next start.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from ..errors import CheckpointError
from .lora import save_model
from .value import ValueHead

if TYPE_CHECKING:
    from ..models import PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

FORMAT = 1
FIRST = "v000000"
"""The checkpoint of the starting policy, after its warm-up."""
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


def write_checkpoint(
    checkpoints: Path,
    *,
    version: int,
    lineage: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    value_head: ValueHead | None = None,
    settings: dict[str, Any],
    progress: dict[str, float],
    keep_last: int,
    keep_first: bool,
    keep_every: int | None = None,
    sync: Callable[[], object],
) -> Path:
    """Writes version ``version``; ``sync`` makes log and ledger durable before the checkpoint counts. Prunes afterwards.

    What stays: the newest ``keep_last``, positive multiples of ``keep_every``, and with ``keep_first`` version 0.

    Raises :class:`CheckpointError` where the disk refuses; what was there before is untouched then.
    """
    name = f"v{version:06d}"
    temporary, final = checkpoints / f".{name}.tmp", checkpoints / name
    checkpoints.mkdir(parents=True, exist_ok=True)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_model(model, tokenizer, temporary, base=not (checkpoints / FIRST).is_dir())
        head = {} if value_head is None else {"value_head": value_head.state_dict()}
        torch.save({"optimizer": optimizer.state_dict(), "random": _random_state(), **head}, temporary / "training.pt")
        files = {str(path.relative_to(temporary)): _fingerprint(path) for path in sorted(temporary.rglob("*")) if path.is_file()}
        manifest = {"format": FORMAT, "version": version, "lineage": lineage, "settings": settings, "progress": progress, "files": files}
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
    except OSError as error:
        raise CheckpointError(f"checkpoint {final} was not written: {error}; {_last_good(checkpoints)}") from error
    for folder in _complete(checkpoints)[:-keep_last]:
        number = int(folder.name[1:])
        if not (keep_first if number == 0 else keep_every is not None and number % keep_every == 0):
            _remove(folder)
    clear_leftovers(checkpoints)
    logger.info("checkpoint=%s", final)
    return final


def newest_checkpoint(checkpoints: Path) -> Checkpoint | None:
    """The newest checkpoint, every byte of it checked; None where there is none.

    Raises :class:`CheckpointError`, naming the last good one, where it is damaged: going on from an older one is a person's decision.
    """
    folders = _complete(checkpoints)
    return read_checkpoint(folders[-1]) if folders else None


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


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``, every byte of it checked.

    Raises :class:`CheckpointError` where it is missing or damaged, naming the last good one beside it.
    """
    fault = _fault(folder)
    if fault:
        raise CheckpointError(f"checkpoint {folder} is damaged ({fault}); {_last_good(folder.parent, except_for=folder)}")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return Checkpoint(folder, manifest["version"], manifest["lineage"], manifest["settings"], manifest["progress"])


def restore_training(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, device: torch.device | str, value_head: ValueHead | None = None) -> None:
    """Puts optimiser, random-number state and value head back as they were.

    Raises :class:`CheckpointError` where they belong to another model.
    """
    state = torch.load(checkpoint.folder / "training.pt", map_location=device, weights_only=True)
    asked = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state["optimizer"])
        if value_head is not None:
            value_head.load_state_dict(state["value_head"])
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.folder} holds the optimiser or value head of another model: {error}") from error
    for group, values in zip(optimizer.param_groups, asked, strict=True):
        group.update(values)  # a fork may have changed what the saved state would put back
    torch.set_rng_state(state["random"]["cpu"].cpu())
    if "cuda" in state["random"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random"]["cuda"].cpu())


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


def clear_leftovers(checkpoints: Path) -> None:
    """Removes what a killed process left half-written or half-removed."""
    if checkpoints.is_dir():
        for path in checkpoints.iterdir():
            if path.name.startswith(".v") and path.suffix in (".tmp", ".old"):
                shutil.rmtree(path, ignore_errors=True)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


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
