"""Whole tensors from their shares: what leaves a policy that several ranks hold (publishing, saving) passes through rank 0, bucket by bucket.

No rank ever holds a second whole copy of the weights for it: rank 0 has one bucket at a time, the others give their share of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..buffer.channels import Publishing
from ..buffer.manifest import Manifest, WeightTensor
from ..buffer.wire import SkippedVersion
from .lora import ADAPTER, adapted, base_state, merged
from .publisher import bytes_of, published_tensors
from .ranks import Ranks

if TYPE_CHECKING:
    from ..models import PreTrainedModel

logger = logging.getLogger(__name__)

BUCKET_BYTES = 64 << 20
"""Gathered at a time; a larger tensor is a bucket of its own."""


def gathered(tensors: Mapping[str, torch.Tensor], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each of ``tensors`` whole, on the CPU, in their order: on rank 0; None on the others, which have to go through all of it too.

    A tensor that is sharded lies along its first dimension over all ranks, as FSDP2 cuts it (``torch.chunk``); any other is whole on every rank.
    """
    bucket: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for name, tensor in tensors.items():
        other = next(iter(bucket.values()), tensor)
        if bucket and (size_bytes + tensor.nbytes > bucket_bytes or other.dtype != tensor.dtype):
            yield from _whole(bucket, ranks)
            bucket, size_bytes = {}, 0
        bucket[name] = tensor
        size_bytes += tensor.nbytes
    if bucket:
        yield from _whole(bucket, ranks)


def _whole(bucket: dict[str, Any], ranks: Ranks) -> Iterator[tuple[str, torch.Tensor | None]]:
    sharded = {name: tensor.detach() for name, tensor in bucket.items() if hasattr(tensor, "to_local")}
    lengths = {name: math.ceil(tensor.shape[0] / ranks.num) * math.prod(tensor.shape[1:]) for name, tensor in sharded.items()}
    parts: list[torch.Tensor] | None = None
    if sharded:
        shares = {name: tensor.to_local().reshape(-1) for name, tensor in sharded.items()}
        flat = torch.cat([torch.nn.functional.pad(share, (0, lengths[name] - share.numel())) for name, share in shares.items()])
        parts = [torch.empty_like(flat) for _ in range(ranks.num)] if ranks.leads else None
        if ranks.num > 1:
            dist.gather(flat, parts, dst=0)
        else:
            parts = [flat]
    begin = 0
    for name, tensor in bucket.items():
        if name not in sharded:
            yield name, tensor.detach().cpu() if ranks.leads else None
            continue
        end = begin + lengths[name]
        if parts is None:
            yield name, None
        else:
            yield name, torch.cat([part[begin:end] for part in parts])[: tensor.numel()].reshape(tensor.shape).cpu()
        begin = end


class _Outgoing:
    """What is published of a policy, as this rank holds it: ``tensors``, those of adapted layers followed by their adapters, which rank 0 merges."""

    def __init__(self, model: PreTrainedModel, saved: Path, ranks: Ranks) -> None:
        self.tensors = published_tensors(model, saved, base_state(model))
        self._layers = {f"{name}.weight": layer for name, layer in adapted(model).items()}
        self._ranks = ranks
        self._held: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            self._held[name] = tensor
            if name in self._layers:
                self._held |= {f"{name} {kind}": getattr(self._layers[name], kind)[ADAPTER].weight.detach() for kind in ("lora_A", "lora_B")}

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        """Each of :attr:`tensors` whole, as :func:`gathered` gives it."""
        stream = (whole for _, whole in gathered(self._held, self._ranks))
        for name in self.tensors:
            whole = next(stream)
            if name in self._layers:
                a, b = next(stream), next(stream)
                if whole is not None and a is not None and b is not None:
                    whole = merged(self._layers[name], whole, a, b)
            yield whole


class GatheringPublisher:
    """Publishes what several ranks hold together, on the main thread, since gathering needs all of them; a :class:`.publisher.Publisher` to its users.

    ``writer`` is rank 0's end of the weights channel, None on the others. ``saved`` is a folder ``model.save_pretrained`` wrote.
    """

    def __init__(self, writer: Publishing | None, model: PreTrainedModel, saved: Path, ranks: Ranks) -> None:
        self._writer, self._ranks = writer, ranks
        self._outgoing = _Outgoing(model, saved, ranks)
        self._written: list[Manifest] = []
        self._due: list[Manifest | SkippedVersion] = []
        self.newest: tuple[int, int] | None = None
        """Lineage and version of what was written last."""
        self.num_dropped = 0
        self.copy_s = 0.0
        """Seconds the last one took: the learner stood still for them."""

    def publish(self, lineage: int, version: int, *, due: bool = False, last: bool = False) -> None:
        """Writes the weights as they are; every rank calls it. A version that readers leave no slot for is dropped and counted.

        ``due`` and ``last`` are as of a :class:`.publisher.Publisher`, on rank 0.

        Raises :class:`WeightsError` on every rank where the channel refuses.
        """
        began = time.perf_counter()
        with self._ranks.together():
            if self._writer is None:
                if self._ranks.exchange(b"")[0]:
                    for _ in self._outgoing:
                        pass
            else:
                self._write(self._writer, lineage, version, due=due, last=last)
        self.copy_s = time.perf_counter() - began

    def _write(self, writer: Publishing, lineage: int, version: int, *, due: bool, last: bool) -> None:
        """Rank 0's part: the others gather once the channel asks for the first tensor, and not where it has no slot."""
        stream: Iterator[torch.Tensor | None] | None = None

        def content() -> memoryview:
            nonlocal stream
            if stream is None:
                self._ranks.exchange(b"go")
                stream = iter(self._outgoing)
            tensor = next(stream)
            assert tensor is not None
            return bytes_of(tensor)

        try:
            manifest = writer.write(lineage, version, _described(self._outgoing.tensors, content))
        finally:
            if stream is None:
                self._ranks.exchange(b"")
            else:
                for _ in stream:  # where the channel failed half-way the others still gather
                    pass
        if manifest is None:
            self.num_dropped += 1
            logger.warning("version=%d published=false reason=%s dropped=%d", version, "readers hold every slot", self.num_dropped)
            if due:
                self._due.append(SkippedVersion(lineage, version, "it was never published: readers held every slot of the weights channel"))
            return
        self._written.append(manifest)
        if due:
            retention = writer.retention
            self._due.append(manifest if retention.keep(manifest, last=last) else SkippedVersion(lineage, version, retention.full))
        self.newest = (lineage, version)

    def fence(self) -> None:
        """Nothing is copied in the background: the weights may always change."""

    def written(self) -> list[Manifest]:
        """Versions written since the last call."""
        done, self._written = self._written, []
        return done

    def due(self) -> list[Manifest | SkippedVersion]:
        """Versions to be evaluated that were kept, or could not be, since the last call."""
        done, self._due = self._due, []
        return done

    def want(self, versions: Collection[tuple[int, int]]) -> None:
        """Which kept (lineage, version) are still needed; the others go before the next is written."""
        if self._writer is not None:
            self._writer.retention.want(versions)

    def expect(self, num_readers: int) -> None:
        """How many actors read what is published from now on."""
        if self._writer is not None:
            self._writer.expect(num_readers)

    def close(self) -> None:
        """Removes the channel."""
        if self._writer is not None:
            self._writer.close()


def _described(tensors: Mapping[str, torch.Tensor], content: Callable[[], memoryview]) -> list[WeightTensor]:
    return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content) for name, tensor in tensors.items()]
