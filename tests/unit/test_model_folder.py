"""A model folder that is not whole is refused in one line, whatever is wrong with it."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from rollstream.configs.checks import check_config, weights_bytes
from rollstream.configs.loader import load_config
from rollstream.errors import ConfigError
from rollstream.models import check_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    header = json.dumps({"__metadata__": {}, "a": {"shape": [2, 3]}, "b": {"shape": []}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path


def test_a_whole_folder_passes_and_its_weights_are_counted_from_the_header(folder: Path) -> None:
    assert check_model_folder(folder) == folder
    config = load_config("quickstart", [f"model={{kind: folder, path: {folder}}}"])
    check_config(config)
    assert weights_bytes(config) == 4 * (6 + 1)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_what_is_missing_is_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=r"^model\.path: .* has no ") as caught:
        check_model_folder(folder)
    assert missing.split(".")[0].replace("_", " ").removesuffix("model") in str(caught.value).replace("_", " ")


@pytest.mark.parametrize("text", ["[]", "{bad", '{"max_position_embeddings": null}', '{"text_config": 5}', '{"max_position_embeddings": 0}', "\xff"])
def test_a_damaged_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    config = load_config("quickstart", [f"model={{kind: folder, path: {folder}}}"])
    with suppress(ConfigError):
        check_config(config)  # it may find the numbers wrong too; it must not crash
    with pytest.raises(ConfigError, match="copy the model again"):
        check_model_folder(folder)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, struct.pack("<Q", 2**40) + b"{}", struct.pack("<Q", 10) + b'{"a": "b"}'])
def test_damaged_weights_are_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    config = load_config("quickstart", [f"model={{kind: folder, path: {folder}}}"])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        weights_bytes(config)
