"""What a registered function gave, checked before anything trains on it: a number too few or an axis too many would broadcast into another loss, silently."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError, RollstreamError, describe

Kind = TypeVar("Kind")


@contextlib.contextmanager
def calling(key: str, name: str) -> Generator[None]:
    """Raises :class:`ConfigError`, naming the function as the configuration does (``key`` is ``name``), for whatever a function fails with inside."""
    try:
        yield
    except (RollstreamError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"{key} {name} failed: {describe(error)}") from error


def of_kind(given: object, kind: type[Kind], key: str, name: str) -> Kind:
    """``given``, which is a ``kind``. Raises :class:`ConfigError`."""
    if not isinstance(given, kind):
        raise ConfigError(f"{key} {name} gave a {type(given).__name__}: it has to give a {kind.__name__}")
    return given


def tensor_like(given: object, like: torch.Tensor, what: str, key: str, name: str) -> torch.Tensor:
    """``given``, which has one number for each of ``like``. Raises :class:`ConfigError`; ``what`` of the function's result it is."""
    found = of_kind(given, torch.Tensor, key, name)
    if found.shape != like.shape:
        raise ConfigError(f"{key} {name} gave {what} of shape {tuple(found.shape)} for {len(like)} tokens: it has to be {tuple(like.shape)}")
    return found


def array_like(given: object, shape: tuple[int, ...], what: str, key: str, name: str) -> npt.NDArray[np.float64]:
    """``given`` as float64, in that ``shape``. Raises :class:`ConfigError`; ``what`` of the function's result it is."""
    found = np.asarray(of_kind(given, np.ndarray, key, name), np.float64)
    if found.shape != shape:
        raise ConfigError(f"{key} {name} gave {what} of shape {found.shape}: it has to be {shape}")
    return found
