"""Publishing while the next step is computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollstream.buffer.weights import Manifest, WeightsReader, WeightsWriter
from rollstream.errors import ConfigError, WeightsError
from rollstream.learner.publisher import Publisher, saved_names

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def build(dtype: torch.dtype = torch.float32, tied: bool = True) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied)).to(dtype)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[WeightsWriter]:
    writer = WeightsWriter(tmp_path / "weights", 1)
    yield writer
    writer.close()


def publisher_of(model: Any, writer: WeightsWriter, tmp_path: Path) -> Publisher:
    model.save_pretrained(tmp_path / "saved")
    return Publisher(writer, model, tmp_path / "saved")


def read(writer: WeightsWriter, reader: WeightsReader) -> tuple[Manifest, dict[str, torch.Tensor]]:
    manifest = reader.poll()
    assert manifest is not None
    with reader.open(manifest) as view:
        content = np.frombuffer(view, np.uint8).copy()
    tensors = {
        spec.name: torch.from_numpy(content[spec.offset : spec.offset + spec.size_bytes]).view(getattr(torch, spec.dtype)).reshape(spec.shape)
        for spec in manifest.tensors
    }
    return manifest, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_what_arrives_is_what_the_model_holds(writer: WeightsWriter, tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    model, reader = build(dtype, tied), WeightsReader(writer.folder)
    publisher = publisher_of(model, writer, tmp_path)
    publisher.publish(0, 1)
    publisher.fence()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    publisher.publish(0, 2)
    publisher.fence()
    manifest, tensors = read(writer, reader)
    assert manifest.version == 2
    assert [written.version for written in publisher.written()] == [1, 2]
    assert set(tensors) == set(saved_names(tmp_path / "saved"))
    assert ("lm_head.weight" in tensors) is not tied
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in tensors.items())
    reader.close()
    publisher.close()


def test_a_version_without_a_free_slot_goes_out_as_soon_as_one_frees(writer: WeightsWriter, tmp_path: Path) -> None:
    publisher = publisher_of(build(), writer, tmp_path)
    readers = hold_every_slot(publisher, writer)
    publisher.publish(0, 4)
    time.sleep(0.05)
    assert publisher.written() == [], "it waits, and nobody waits for it"
    readers[0].close()
    deadline = time.monotonic() + 5
    while not (written := publisher.written()) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert [manifest.version for manifest in written] == [4]
    assert publisher.num_dropped == 0
    close(publisher, readers)


def test_the_fence_drops_a_version_rather_than_wait_for_readers(writer: WeightsWriter, tmp_path: Path) -> None:
    publisher = publisher_of(build(), writer, tmp_path)
    readers = hold_every_slot(publisher, writer)
    publisher.publish(0, 4)
    began = time.perf_counter()
    publisher.fence()
    assert time.perf_counter() - began < 1.0
    assert publisher.num_dropped == 1
    readers[0].close()
    publisher.publish(0, 5)
    publisher.fence()
    assert [manifest.version for manifest in publisher.written()] == [5]
    close(publisher, readers)


def hold_every_slot(publisher: Publisher, writer: WeightsWriter) -> list[WeightsReader]:
    readers: list[WeightsReader] = []
    for version in (1, 2, 3):
        publisher.publish(0, version)
        publisher.fence()
        readers.append(WeightsReader(writer.folder))
        readers[-1].poll()
    assert [manifest.version for manifest in publisher.written()] == [1, 2, 3]
    return readers


def close(publisher: Publisher, readers: list[WeightsReader]) -> None:
    for reader in readers:
        reader.close()
    publisher.close()


def test_what_the_thread_raised_is_raised_at_the_fence(writer: WeightsWriter, tmp_path: Path) -> None:
    writer.write(0, 0, [("another", "uint8", (1,), memoryview(b"x"))])
    publisher = publisher_of(build(), writer, tmp_path)
    publisher.publish(0, 1)
    with pytest.raises(WeightsError, match="other tensors"):
        publisher.fence()
    publisher.close()


def test_saved_tensors_the_model_does_not_hold_are_refused(writer: WeightsWriter, tmp_path: Path) -> None:
    build(tied=False).save_pretrained(tmp_path / "saved")
    smaller: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"Linear holds 6 numbers, .*saved has \d+ \(among them lm_head\.weight\)"):
        Publisher(writer, smaller, tmp_path / "saved")


def test_closing_ends_the_thread(writer: WeightsWriter, tmp_path: Path) -> None:
    publisher = publisher_of(build(), writer, tmp_path)
    publisher.publish(0, 1)
    publisher.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("publisher")]
    assert not writer.folder.exists()
