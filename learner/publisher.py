"""Publishing: each version goes out while the next one is computed.

The weights do not change between two optimiser steps, so a thread copies version v into the weights channel during the next wait, forward and backward;
:meth:`Publisher.fence` ends that time, right before the optimiser writes. The learner stops for a copy only where everything else was faster than the
copy, and never for a reader: while readers hold every slot the thread keeps asking until the fence, then that version is dropped and counted; the next
one goes out instead.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..buffer.weights import Manifest, WeightsWriter, WeightTensor
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..models import PreTrainedModel

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.002


class Publisher:
    """Publishes the weights of ``model``: the tensors of ``saved``, a folder ``model.save_pretrained`` wrote, by those names; tied ones once.

    Raises :class:`ConfigError` where the model saves tensors that are not its own (fused or converted ones).
    """

    def __init__(self, writer: WeightsWriter, model: PreTrainedModel, saved: Path) -> None:
        self._writer = writer
        state: dict[str, torch.Tensor] = model.state_dict()
        names = saved_names(saved)
        foreign = [name for name in names if name not in state]
        if foreign:
            raise ConfigError(
                f"{type(model).__name__} saves {foreign[0]} and {len(foreign) - 1} others it does not hold by that name: they cannot be published"
            )
        self._tensors = {name: state[name] for name in names}
        self._fixed = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in self._tensors.values())
        self._views = self._describe() if self._fixed else []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._running: Future[None] | None = None
        self._fencing = threading.Event()
        self._written: list[Manifest] = []
        self.num_dropped = 0
        self.copy_s = 0.0
        """Seconds the last copy took, in its thread."""

    def publish(self, lineage: int, version: int) -> None:
        """Starts copying the weights as they are now. They must not change before :meth:`fence`."""
        self.fence()
        self._running = self._thread.submit(self._copy, lineage, version)

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

    def close(self) -> None:
        """Waits for a copy that runs, and removes the channel."""
        self._fencing.set()
        self._thread.shutdown(wait=True)
        self._writer.close()

    def _copy(self, lineage: int, version: int) -> None:
        started = time.perf_counter()
        views = self._views if self._fixed else self._describe()
        while True:
            manifest = self._writer.write(lineage, version, views)
            if manifest is not None:
                break
            if self._fencing.wait(_ASK_AGAIN_S):
                self.num_dropped += 1
                logger.warning("version=%d published=false reason=%s dropped=%d", version, "readers hold every slot", self.num_dropped)
                return
        self.copy_s = time.perf_counter() - started
        self._written.append(manifest)

    def _describe(self) -> list[WeightTensor]:
        return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes_of(tensor)) for name, tensor in self._tensors.items()]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory on CPU, a copy from elsewhere. Bytes, since NumPy has no bfloat16."""
    content: Any = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def saved_names(folder: Path) -> list[str]:
    """Names of the tensors in the safetensors files of ``folder``, sorted, read from their headers."""
    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        names += [name for name in header if name != "__metadata__"]
    return sorted(names)
