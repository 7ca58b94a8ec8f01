"""The one door to transformers: building, checking and loading policies and their tokenizers.

Actors and learner load the same Hugging Face folder: configuration, safetensors, tokenizer, chat template. The tiny policy is such a folder too,
built on the spot, so nothing downstream knows the difference.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .configs.checks import missing_folder_remedy
from .configs.run_folder import Run
from .configs.schema import FolderModel, TinyModel
from .errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

TINY_SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>")

TINY_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.tool_calls -%}
{{- '<|assistant|>' + (message.content or '') -}}
{%- for call in message.tool_calls -%}
{{- '<|call|>' + call.function.name + '(' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- key + '=' + (value | tojson) + (', ' if not loop.last else '') -}}
{%- endfor -%}
{{- ')' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- else -%}
{{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""One special token per role and no separators: a byte-level policy pays for every character. Tools are not rendered; warm-up teaches them."""

HEAD_DIM = 32
"""Of the tiny policy: the smallest that vLLM's CPU attention accepts."""


def prepare_model(run: Run) -> Path:
    """The folder of the starting policy: built once for ``kind: tiny``, checked for ``kind: folder``. Atomic, so two processes may both ask.

    Raises :class:`ConfigError` where a given folder is not a complete model.
    """
    model = run.config.model
    if isinstance(model, FolderModel):
        return check_model_folder(model.path)
    if not (run.model_folder / "config.json").is_file():
        temporary = run.model_folder.with_name(f".model-{os.getpid()}.tmp")
        _build_tiny(model, run.config.seed, temporary)
        try:
            temporary.rename(run.model_folder)
        except OSError:
            shutil.rmtree(temporary)
            if not (run.model_folder / "config.json").is_file():
                raise
    return run.model_folder


def check_model_folder(path: str | Path) -> Path:
    """Checks that ``path`` holds a causal language model with tokenizer and chat template; loads no weights.

    Raises :class:`ConfigError` naming what is missing.
    """
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"model.path: {path} is not a folder; {missing_folder_remedy(str(path))}")
    present = {entry.name for entry in folder.iterdir()}
    if "config.json" not in present:
        raise ConfigError(f"model.path: {folder} has no config.json, so it is not a Hugging Face model folder")
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config", config)
    positions = text_config.get("max_position_embeddings", 1) if isinstance(text_config, dict) else None
    if not isinstance(positions, int) or positions < 1:
        raise ConfigError(f"model.path: {folder / 'config.json'} is damaged: max_position_embeddings must be a number of at least 1; copy the model again")
    if not any(name.endswith(".safetensors") for name in present):
        raise ConfigError(f"model.path: {folder} has no .safetensors weights; convert them with save_pretrained(..., safe_serialization=True)")
    if not present & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        raise ConfigError(f"model.path: {folder} has no tokenizer; save it there with tokenizer.save_pretrained")
    if "chat_template.jinja" not in present and "chat_template" not in _read_json(folder / "tokenizer_config.json"):
        raise ConfigError(f"model.path: {folder} has no chat template (chat_template.jinja or tokenizer_config.json); environments speak in messages")
    return folder


def max_positions(folder: Path) -> int:
    """Longest sequence the model of ``folder`` takes, in tokens."""
    config = _read_json(folder / "config.json")
    config = config.get("text_config", config)
    return int(config.get("max_position_embeddings", 2**31 - 1))


def load_policy(folder: str | Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Loads the model of ``folder`` for sampling or training (float32 unless ``dtype`` says otherwise), attention through SDPA."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, attn_implementation="sdpa", local_files_only=True)
    return model.to(device)


def checkpointable_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of ``model`` between which activations may be dropped and computed again: its decoder layers. Empty where it names none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of ``folder`` with its chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def check_gguf_libraries() -> None:
    """Raises :class:`MissingExtra` where transformers cannot read GGUF files for want of libraries."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f"reading a GGUF file needs {' and '.join(missing)}, not installed here: pip install 'rollstream[gguf]'")


def convert_gguf(path: Path, folder: Path) -> None:
    """Writes the model, tokenizer and chat template of a GGUF file as a Hugging Face folder in float32.

    A model loaded from GGUF refuses to be saved, so its weights go into a fresh one of the same configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = type(loaded.config)(**{key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"})
    fresh: Any = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.tie_weights()
    fresh.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(folder)


def build_tiny_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: 256 byte symbols, no merges, one special token per role."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TINY_SPECIAL_TOKENS])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", model_max_length=max_length, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TINY_CHAT_TEMPLATE
    return tokenizer


def _build_tiny(config: TinyModel, seed: int, folder: Path) -> None:
    """A Qwen3-architecture model with random weights from ``seed``.

    ``initializer_range`` is 0.1: at this width the usual 0.02 leaves the residual stream so quiet that the policy barely learns.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer: Any = build_tiny_tokenizer(config.max_positions)
    architecture = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=config.hidden_size,
        intermediate_size=config.hidden_size * 2,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(architecture)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} is not readable JSON ({error}); copy the model again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"model.path: {path} holds {type(values).__name__}, not an object; copy the model again")
    return values
