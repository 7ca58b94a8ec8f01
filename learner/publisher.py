"""Publishing: each version goes out while the next one is computed.

The weights do not change between two optimiser steps, so a thread copies version v into the weights channel during the next wait, forward and backward;
:meth:`Publisher.fence` ends that time, right before the optimiser writes. The learner stops for a copy only where everything else was faster than the
copy, and never for a reader: while readers hold every slot the thread keeps asking until the fence, then that version is dropped and counted; the next
one goes out instead.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from ..buffer.channels import Publishing
from ..buffer.manifest import ALIGNMENT, Manifest, WeightTensor
from ..buffer.wire import SkippedVersion
from ..errors import ConfigError
from .lora import plain_state

if TYPE_CHECKING:
    from ..models import PreTrainedModel

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.002


class Publisher:
    """Publishes the weights of ``model``, by the names of :func:`published_tensors`; adapters are merged into them first.

    ``saved`` is a folder ``model.save_pretrained`` wrote.
    """

    def __init__(self, writer: Publishing, model: PreTrainedModel, saved: Path) -> None:
        self._writer = writer
        state, self._refresh = plain_state(model)
        self._tensors = published_tensors(model, saved, state)
        self._fixed = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in self._tensors.values())
        self._views = self._describe() if self._fixed else []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._running: Future[None] | None = None
        self._fencing = threading.Event()
        self._written: list[Manifest] = []
        self._due: list[Manifest | SkippedVersion] = []
        self.newest: tuple[int, int] | None = None
        """Lineage and version of what was written last."""
        self.num_dropped = 0
        self.copy_s = 0.0
        """Seconds the last copy took, in its thread."""

    def publish(self, lineage: int, version: int, *, due: bool = False, last: bool = False) -> None:
        """Starts copying the weights as they are now. They must not change before :meth:`fence`.

        ``due`` says that this version is to be evaluated, so it is kept where there is room; ``last`` that no version comes after it.
        """
        self.fence()
        self._running = self._thread.submit(self._copy, lineage, version, due, last)

    def fence(self) -> None:
        """Returns once no copy runs: the weights may change.

        Raises what the copy raised.
        """
        if self._running is not None:
            self._fencing.set()
            try:
                self._running.result()
            finally:
                self._running = None
                self._fencing.clear()

    def written(self) -> list[Manifest]:
        """Versions written since the last call. Raises what the copy raised."""
        if self._running is not None and self._running.done():
            self.fence()
        done, self._written = self._written, []
        return done

    def due(self) -> list[Manifest | SkippedVersion]:
        """Versions to be evaluated that were kept, or could not be, since the last call."""
        done, self._due = self._due, []
        return done

    def want(self, versions: Collection[tuple[int, int]]) -> None:
        """Which kept (lineage, version) are still needed; the others go before the next is written."""
        self._writer.retention.want(versions)

    def expect(self, num_readers: int) -> None:
        """How many actors read what is published from now on."""
        self._writer.expect(num_readers)

    def close(self) -> None:
        """Waits for a copy that runs, and removes the channel."""
        self._fencing.set()
        self._thread.shutdown(wait=True)
        self._writer.close()

    def _copy(self, lineage: int, version: int, due: bool, last: bool) -> None:
        started = time.perf_counter()
        self._refresh()
        views = self._views if self._fixed else self._describe()
        while True:
            manifest = self._writer.write(lineage, version, views)
            if manifest is not None:
                break
            if self._fencing.wait(_ASK_AGAIN_S):
                self.num_dropped += 1
                logger.warning("version=%d published=false reason=%s dropped=%d", version, "readers hold every slot", self.num_dropped)
                if due:
                    self._due.append(SkippedVersion(lineage, version, "it was never published: readers held every slot of the weights channel"))
                return
        self.copy_s = time.perf_counter() - started
        self._written.append(manifest)
        if due:
            retention = self._writer.retention
            self._due.append(manifest if retention.keep(manifest, last=last) else SkippedVersion(lineage, version, retention.full))
        self.newest = (lineage, version)

    def _describe(self) -> list[WeightTensor]:
        return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bytes_of(tensor)) for name, tensor in self._tensors.items()]


def digest_of(model: PreTrainedModel, saved: Path) -> str:
    """The digest that the weights channel gives the weights of ``model`` as they are: xxh3-128 of their bytes, each tensor padded to the alignment."""
    hasher = xxhash.xxh3_128()
    for tensor in published_tensors(model, saved, plain_state(model)[0]).values():
        content = bytes_of(tensor)
        hasher.update(content)
        hasher.update(bytes(-content.nbytes % ALIGNMENT))
    return hasher.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory on CPU, a copy from elsewhere. Bytes, since NumPy has no bfloat16."""
    content: Any = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def published_tensors(model: PreTrainedModel, saved: Path, state: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """What is published: the tensors ``model`` computes with, under the names it holds them by, sorted; tied ones once, by the name ``saved`` has.

    ``state`` are the tensors to look among, default those of ``model``: with adapters those of the merged model (:func:`.lora.plain_state`).

    Those are the names of the safetensors files wherever a model saves what it holds. A mixture of experts holds its experts fused and saves them one by
    one; it is published fused, and a sampler that loads the same folder through transformers holds it under the same names.

    Raises :class:`ConfigError` where ``saved`` does not hold as many numbers as the model: it is another model's folder.
    """
    state = model.state_dict() if state is None else state
    sizes = _saved_sizes(saved)
    same = identities(model)
    held = {name: state[name] for name in sizes if name in state}
    sent = {same.get(name, id(tensor)) for name, tensor in held.items()}
    for name, tensor in state.items():
        if same.get(name, id(tensor)) not in sent:
            held[name] = tensor
            sent.add(same.get(name, id(tensor)))
    num_held, num_saved = sum(tensor.numel() for tensor in held.values()), sum(sizes.values())
    if num_held != num_saved:
        foreign = next((name for name in sizes if name not in state), "no other name")
        raise ConfigError(
            f"{type(model).__name__} holds {num_held} numbers, {saved} has {num_saved} (among them {foreign}): it cannot be published by that folder's names"
        )
    return dict(sorted(held.items()))


def identities(model: PreTrainedModel) -> dict[str, int]:
    """A number for each name of the model's state, the same for tied tensors."""
    module: Any = model
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: id(tensor) for name, tensor in named}


def saved_names(folder: Path) -> list[str]:
    """Names of the tensors in the safetensors files of ``folder``, sorted, read from their headers."""
    return sorted(_saved_sizes(folder))


def _saved_sizes(folder: Path) -> dict[str, int]:
    """How many numbers each tensor in the safetensors files of ``folder`` has, from their headers."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        sizes |= {name: math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
    return sizes
