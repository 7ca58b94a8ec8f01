"""Training state that several ranks hold together, as PyTorch's distributed checkpoints (DCP): every rank writes its share, any number of ranks reads it.

The files are safetensors, one per rank, whose headers say where each share lies in the whole; nothing of it is a pickle. A tensor is named by the place of
its parameter in the optimiser, which follows from the model alone, so a process that holds everything reads the same files.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import describe

FOLDER = "shards"


def save_shards(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Writes this rank's share of the optimiser's moments to ``folder``; every rank calls it. The steps taken are in :func:`steps_of`.

    Raises :class:`OSError` on every rank where any cannot write.
    """
    state = _moments(optimizer)
    if state:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        with _failing_as_files_do():
            save(state, storage_writer=writer, no_dist=not dist.is_initialized())


def load_shards(optimizer: torch.optim.Optimizer, folder: Path, steps: list[float]) -> None:
    """Fills the optimiser's moments from ``folder``, whoever wrote it; every rank calls it, before the first step.

    Raises :class:`ValueError` where they belong to another model.
    """
    parameters = _parameters(optimizer)
    if len(steps) != len(parameters):
        raise ValueError(f"it has moments of {len(steps)} parameters, the model has {len(parameters)}")
    for parameter, step in zip(parameters, steps, strict=True):
        if step:
            moments = {name: torch.zeros_like(parameter) for name in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(step, dtype=torch.float32, device=_step_device(parameter)), **moments}
    state = _moments(optimizer)
    if not state:
        return
    reader = HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata
    for name, tensor in state.items():
        size = getattr(found.get(name), "size", None)
        if size != tensor.shape:
            raise ValueError(f"{name} has shape {None if size is None else tuple(size)} there and {tuple(tensor.shape)} in the model")
    with warnings.catch_warnings(), _failing_as_files_do():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads what several wrote
        load(state, storage_reader=reader, no_dist=not dist.is_initialized())


def share_out(optimizer: torch.optim.Optimizer, whole: dict[int, dict[str, torch.Tensor]]) -> None:
    """Fills the optimiser's moments from the state that one process held, ``whole``, by the place of each parameter; every rank keeps its share."""
    for place, parameter in enumerate(_parameters(optimizer)):
        if place in whole:
            moments = {name: share_of(parameter, whole[place][name]) for name in _MOMENTS}
            optimizer.state[parameter] = {"step": whole[place]["step"].to(_step_device(parameter)), **moments}


def share_of(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``whole``, which every rank has, as ``parameter`` holds it: this rank's share of it, or all of it."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole.to(parameter.device_mesh.device_type), parameter.device_mesh, parameter.placements, src_data_rank=None)
    return whole.to(parameter.device)


def steps_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Updates each parameter has had, in the optimiser's order."""
    return [float(optimizer.state[parameter]["step"]) if parameter in optimizer.state else 0.0 for parameter in _parameters(optimizer)]


@contextlib.contextmanager
def _failing_as_files_do() -> Generator[None]:
    """Raises :class:`OSError` on every rank where any could not read or write: what torch raises for it is no :class:`Exception`."""
    try:
        yield
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        raise OSError(f"rank {rank}: {describe(error) if isinstance(error, Exception) else error!r}") from error


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters = enumerate(_parameters(optimizer))
    return {f"{place:06d}.{name}": optimizer.state[parameter][name] for place, parameter in parameters if parameter in optimizer.state for name in _MOMENTS}


def _step_device(parameter: Any) -> torch.device:
    """Fused AdamW keeps the step beside its parameter."""
    return parameter.device
