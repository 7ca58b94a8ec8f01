"""Pushed weights into a live model, and the proof that they are in it.

The fingerprint reads the live parameters back, in the manifest's order and with its zero padding, so it equals the manifest's digest only if every byte arrived
where the model computes with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from ..errors import WeightsError

if TYPE_CHECKING:
    from ..buffer.manifest import Manifest

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def match(model: torch.nn.Module, manifest: Manifest) -> list[torch.Tensor]:
    """The live tensor of every entry of the manifest, in its order.

    Tied weights may come under one of their names only. Raises :class:`WeightsError` where a name, a shape or a dtype differs, or where a parameter of the
    model is not in the manifest at all.
    """
    live: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    tensors: list[torch.Tensor] = []
    for spec in manifest.tensors:
        tensor = live.get(spec.name)
        if tensor is None:
            raise WeightsError(f"version {manifest.version} has a tensor {spec.name} that the sampler's model lacks; both must load the same model folder")
        found, given = (_dtype_name(tensor), tuple(tensor.shape)), (spec.dtype, tuple(spec.shape))
        if found != given:
            raise WeightsError(
                f"version {manifest.version}: {spec.name} is {found[0]} {found[1]} in the sampler's model, {given[0]} {given[1]} in the manifest"
            )
        if spec.size_bytes != tensor.nbytes:
            raise WeightsError(f"version {manifest.version}: {spec.name} is {tensor.nbytes} bytes in the sampler's model, {spec.size_bytes} in the manifest")
        tensors.append(tensor)
    covered = {tensor.data_ptr() for tensor in tensors}
    missing = [name for name, tensor in model.named_parameters() if tensor.data_ptr() not in covered]
    if missing:
        raise WeightsError(f"version {manifest.version} lacks {len(missing)} parameters of the sampler's model, among them {missing[0]}")
    return tensors


def copy_in(tensors: list[torch.Tensor], manifest: Manifest, view: memoryview) -> None:
    """Copies the bytes of ``view`` into the live ``tensors``.

    Raises :class:`WeightsError` where ``view`` is shorter than the manifest says.
    """
    if view.nbytes < manifest.size_bytes:
        raise WeightsError(f"version {manifest.version} has {view.nbytes} bytes, its manifest says {manifest.size_bytes}")
    source = np.frombuffer(view, np.uint8)
    for tensor, spec in zip(tensors, manifest.tensors, strict=True):
        part = source[spec.offset : spec.offset + spec.size_bytes]
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            _bytes(tensor)[:] = part
        else:
            staged = torch.empty(tensor.shape, dtype=tensor.dtype)
            _bytes(staged)[:] = part
            tensor.copy_(staged)


def fingerprint(tensors: list[torch.Tensor], manifest: Manifest) -> str:
    """xxh3-128 of the live ``tensors``, laid out as the manifest lays them out."""
    hasher = xxhash.xxh3_128()
    position = 0
    for tensor, spec in zip(tensors, manifest.tensors, strict=True):
        hasher.update(bytes(spec.offset - position))
        hasher.update(_bytes(tensor.detach().cpu().contiguous()).data)
        position = spec.offset + spec.size_bytes
    hasher.update(bytes(manifest.size_bytes - position))
    return hasher.hexdigest()


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
