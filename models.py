"""The one door to transformers: building, checking and loading policies and their tokenizers.

Actors and learner load the same Hugging Face folder: configuration, safetensors, tokenizer, chat template. The tiny policy is such a folder too,
built on the spot, so nothing downstream knows the difference.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterable
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

_PART_BYTES = 2 << 30
"""Of a safetensors file of a saved policy."""
_LAYER = re.compile(r".*?\.\d+\.")

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


def sketch_policy(folder: str | Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of ``folder`` as :func:`load_policy` gives it, with parameters that take no memory: they lie on the meta device until :func:`fill_policy`.

    Buffers are real, since those that no file holds (rotary frequencies, scales of embeddings) are computed where the model is built.

    Raises :class:`ConfigError` for quantised weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    def on_meta(_module: Any, _name: str, parameter: Any) -> Any:
        return None if parameter is None else torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.path: {folder} holds quantised weights, which cannot be trained sharded; give the folder of the model before it was quantised"
        )
    config.name_or_path = str(folder)
    hook = torch.nn.modules.module.register_module_parameter_registration_hook(on_meta)
    try:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32, attn_implementation="sdpa")
    finally:
        hook.remove()
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


def fill_policy(model: PreTrainedModel, folder: str | Path, *, device: str) -> None:
    """Reads the weights of ``folder`` into a sharded ``model`` of :func:`sketch_policy`: of each tensor no more than this process holds of it.

    Names and layouts that differ between files and model (experts saved one by one) are transformers' business, as when it loads a model itself.

    Raises :class:`ConfigError` where a file cannot be read, lacks a tensor of the model, or has another shape for it.
    """
    from safetensors import SafetensorError, safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    module: Any = model
    with contextlib.ExitStack() as stack:
        shares: dict[str, Any] = {}
        try:
            for path in _weight_files(Path(folder)):
                file: Any = stack.enter_context(safe_open(path, framework="pt"))
                shares |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model.path: {folder} has weights that cannot be read ({error}); copy the model again") from error
        shapes = {name: share.get_shape() for name, share in shares.items()}
        mapping: Any = get_model_conversion_mapping(model)
        settings = LoadStateDictConfig(device_map={"": device}, dtype=module.dtype, weight_mapping=mapping)
        found, _ = convert_and_load_state_dict_in_model(model, shares, settings)
    _fill_empty_shares(module)
    module.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
    if found.mismatched_keys:
        name, held, wanted = sorted(found.mismatched_keys)[0]
        if name in shapes:  # what is compared are shares
            held, wanted = shapes[name], module.get_parameter_or_buffer(name).shape
        raise ConfigError(f"model.path: {folder} has {name} with shape {list(held)}, its config.json asks for {list(wanted)}; copy the model again")
    if missing := sorted(name for name, parameter in module.named_parameters() if parameter.is_meta):
        more = f", nor {len(missing) - 1} more tensors of {type(model).__name__}" if missing[1:] else ""
        reasons = [str(text).splitlines()[-1].strip() for text in found.conversion_errors.values()]
        raise ConfigError(f"model.path: {folder} has no {missing[0]}{more}{f' ({reasons[0]})' if reasons else ''}; copy the model again")


def _fill_empty_shares(model: Any) -> None:
    """A rank that holds nothing of a tensor (of four experts cut in three) has nothing to read for it."""
    import torch
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor) and parameter.is_meta and not parameter.to_local().numel():
                local = torch.empty_like(parameter.to_local(), device=parameter.device_mesh.device_type)
                share = DTensor.from_local(local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride())
                setattr(module, name, torch.nn.Parameter(share, requires_grad=parameter.requires_grad))


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model of ``folder``: those its index names, or the one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def saved_state(model: PreTrainedModel) -> dict[str, Any]:
    """The tensors of ``model`` that a folder of it holds, by the model's own names: tied ones once, in the order in which :func:`save_policy` takes them."""
    module: Any = model
    left_out = {*module.all_tied_weights_keys, *(module._keys_to_ignore_on_save or ())}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in left_out}


def save_policy(model: PreTrainedModel, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, part_bytes: int = _PART_BYTES) -> None:
    """Writes ``model`` as ``model.save_pretrained`` does, from a stream of ``tensors``, those of :func:`saved_state`; a file's worth of them is held at a time.

    A file ends between two layers, so that whatever goes together into the layout of the makers' files (experts one by one) is at hand together.
    """
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    module: Any = model
    folder.mkdir(parents=True)
    module.config.architectures = [type(model).__name__]
    module.config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
    parts: list[list[str]] = []
    part: dict[str, torch.Tensor] = {}

    def write() -> None:
        state = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, part).items()}
        save_file(state, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(sorted(state))
        part.clear()

    total, num_bytes, layer = 0, 0, ""
    for name, tensor in tensors:
        now = found[0] if (found := _LAYER.match(name)) else name
        if part and num_bytes + tensor.nbytes > part_bytes and now != layer:
            write()
            num_bytes = 0
        part[name], layer = tensor, now
        num_bytes += tensor.nbytes
        total += tensor.nbytes
    write()
    names = [f"model-{place:05d}-of-{len(parts):05d}.safetensors" for place in range(1, len(parts) + 1)] if parts[1:] else ["model.safetensors"]
    for place, name in enumerate(names):
        (folder / f"part-{place}").rename(folder / name)
    if parts[1:]:
        weight_map = {name: file for file, held in zip(names, parts, strict=True) for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


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
