"""What a published version of the policy is, whichever channel carries it: its identity, its digest, and where each tensor lies in its bytes. No torch."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..errors import WeightsError

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes."""
BLOCK_BYTES = 1 << 20
"""Copied and hashed at a time: the hash then reads what the copy left in the cache."""

WeightTensor = tuple[str, str, tuple[int, ...], memoryview | Callable[[], memoryview]]
"""Name, dtype, shape, contiguous bytes; or what gives the bytes, called once, in the order of the tensors, when they are about to be copied."""

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1}


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor lies in the bytes of a version. ``dtype`` is the framework's name without its prefix: ``float32``, ``bfloat16``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """One published version: what it is, in which slot of its channel it lies, and the xxh3-128 of its ``size_bytes`` bytes.

    The bytes are the tensors in order, each padded with zeros to a multiple of 64 bytes: the same in every channel, so the digest is too.
    """

    lineage: int
    version: int
    digest: str
    slot: int
    size_bytes: int
    tensors: list[TensorSpec]


def round_up(size: int, multiple: int) -> int:
    """``size``, or the next larger multiple."""
    return -(-size // multiple) * multiple


def layout_of(tensors: Sequence[WeightTensor]) -> list[TensorSpec]:
    """Where each tensor lies."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, dtype, shape, content in tensors:
        size_bytes = math.prod(shape) * _ITEM_BYTES[dtype] if callable(content) else content.nbytes
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, size_bytes))
        offset += round_up(size_bytes, ALIGNMENT)
    return specs


def content_of(tensor: WeightTensor) -> memoryview:
    """The bytes of a tensor."""
    return tensor[3]() if callable(tensor[3]) else tensor[3]


def size_of(layout: Sequence[TensorSpec]) -> int:
    """Bytes of a whole version."""
    return layout[-1].offset + round_up(layout[-1].size_bytes, ALIGNMENT) if layout else 0


def check_layout(layout: Sequence[TensorSpec], first: Sequence[TensorSpec], version: int) -> None:
    """Raises :class:`WeightsError` where a version has other tensors than the ``first`` one written."""
    if layout != first:
        changed = next((new.name for new, old in zip(layout, first, strict=False) if new != old), "their number")
        raise WeightsError(f"version {version} has other tensors than the first one written ({changed}): publish the same model, or open a new writer")


def check_owner(folder: Path) -> None:
    """Raises :class:`WeightsError` where ``folder`` is not a folder of this user."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise WeightsError(f"weights folder {folder} is not a folder of user {os.getuid()}: remove it, somebody else made it")


def lock_writer(folder: Path) -> int:
    """The lock of the one writer of ``folder``, held until the returned handle is closed. Raises :class:`WeightsError` where another writer lives."""
    handle = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # some shared file systems are mounted without locks
            logger.warning("event=no_locks folder=%s reason=%r", folder, f"{error.strerror}: a second learner of this run would not be noticed")
            return handle
        os.close(handle)
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise WeightsError(f"weights folder {folder} has a writer already: stop the other learner of this run first") from None
    return handle


def replace_current(folder: Path, manifest: Manifest) -> None:
    """Makes ``manifest`` what readers of ``folder`` find from now on, in one step."""
    temporary = folder / "current.tmp"
    temporary.write_bytes(msgspec.json.encode(manifest))
    temporary.rename(folder / "current")


def read_current(folder: Path | str) -> Manifest | None:
    """The newest version in ``folder``; None where there is none. Raises :class:`WeightsError` where its manifest cannot be read."""
    path = os.path.join(folder, "current")
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise WeightsError(f"manifest {path} cannot be read: {error}") from error
