"""Low-rank adapters through peft (``learner.policy.lora``; LoRA, arXiv 2106.09685): W x becomes W x + alpha / rank · B A x, and only A and B learn.

The adapters are put into the model itself, so scoring, packing and checkpointed activations are as without them. What leaves the learner is merged: samplers
and exported folders hold W + alpha / rank · B A under W's own name. The base, version 0, is saved once; later checkpoints hold adapters alone, in peft's own
format. With the adapters out of the way the same model is the frozen reference of a KL term.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from ..configs.learner_schema import Lora
from ..errors import CheckpointError, ConfigError, MissingExtra
from .collate import MicroBatch
from .policy import Policy, Scores
from .value import ValueHead

if TYPE_CHECKING:
    from ..models import PreTrainedModel, PreTrainedTokenizerFast
    from .checkpoint import Checkpoint

ADAPTER = "default"
WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def add_adapters(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Puts fresh adapters into ``model`` and freezes everything else. B is zero: the model computes what it did. A follows from ``seed``.

    Raises :class:`ConfigError` where a target matches nothing, or only what cannot be adapted; :class:`MissingExtra` without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise MissingExtra("learner.policy.lora needs peft, not installed here: pip install 'rollstream[lora]'") from None
    targets = _targets(model, lora.target_modules)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, bias="none")  # pyright: ignore[reportArgumentType] - a float will do
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(inject_adapter_in_model, config, model)
    if (odd := set(targets) ^ set(adapted(model))) or (odd := {name for name, layer in adapted(model).items() if layer.r[ADAPTER] != lora.rank}):
        raise ConfigError(f"learner.policy.lora: peft does not adapt {sorted(odd)[0]} of {type(model).__name__} as asked; choose other target_modules")
    for layer in adapted(model).values():
        if lora.dropout:
            layer.lora_dropout[ADAPTER] = _GradientDropout(lora.dropout)
    model.eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _inject(inject: Callable[..., Any], config: Any, model: PreTrainedModel) -> None:
    """Puts the adapters of ``config``, which names its targets in full, into ``model``.

    peft rewrites the targets of some transformers models (fused experts); inside a module that is none of them it takes the names as they are.
    """
    names = sorted(config.target_modules)
    shell = torch.nn.Module()
    shell.add_module("shell", model)
    config.target_modules = {f"shell.{name}" for name in names}
    inject(config, shell, ADAPTER)
    config.target_modules = set(names)
    model.peft_config = {ADAPTER: config}


class _GradientDropout(torch.nn.Module):
    """Dropout where a gradient is computed and nowhere else: proximal and reference scores are those of the whole model."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, self.share, training=torch.is_grad_enabled())


def adapted(model: PreTrainedModel) -> dict[str, Any]:
    """The layers of ``model`` with an adapter, by name; empty where there are none."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")}


def _targets(model: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    """Full names of the linear layers to adapt: those whose name ends with one of ``wanted``, all but the output's where nothing is named."""
    head: Any = model.get_output_embeddings()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"}
    usable = [name for name, module in layers.items() if module is not head]
    found = [name for name in usable if not wanted or any(f".{name}".endswith(f".{end}") for end in wanted)]
    unmatched = [end for end in wanted if not any(f".{name}".endswith(f".{end}") for name in usable)]
    if unmatched or not found:
        ends = sorted({name.rpartition(".")[2] for name in usable})
        raise ConfigError(
            f"learner.policy.lora.target_modules: {', '.join(unmatched) or 'nothing'} matches no linear layer of {type(model).__name__} before its output; "
            f"there are {', '.join(ends) or 'none'}"
        )
    return found


@contextlib.contextmanager
def without_adapters(model: PreTrainedModel) -> Generator[None]:
    """Inside, ``model`` is the base alone, its layers under their own names."""
    layers = adapted(model)
    for name, layer in layers.items():
        model.set_submodule(name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)


def merge(model: PreTrainedModel) -> None:
    """Adds the adapters to their layers for good: ``model`` is a plain one afterwards."""
    layers = adapted(model)
    with torch.no_grad():
        for name, layer in layers.items():
            layer.base_layer.weight.copy_(_merged(layer))
            model.set_submodule(name, layer.base_layer)


def _merged(layer: Any) -> torch.Tensor:
    """W + alpha / rank · B A."""
    return layer.base_layer.weight.detach() + layer.get_delta_weight(ADAPTER).detach()


def plain_state(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """The tensors of the merged model by the names of a plain one, and what brings them up to date with the adapters; base tensors are the model's own."""
    layers = adapted(model)
    with without_adapters(model):
        state: dict[str, torch.Tensor] = model.state_dict()
    if not layers:
        return state, lambda: None
    for name, layer in layers.items():
        state[f"{name}.weight"] = _merged(layer)
    return state, functools.partial(_refresh, state, layers)


@torch.no_grad()
def _refresh(state: dict[str, torch.Tensor], layers: dict[str, Any]) -> None:
    for name, layer in layers.items():
        state[f"{name}.weight"].copy_(_merged(layer))


class AdaptersOff:
    """The base of a policy with adapters, in the place of a frozen reference: no second copy of the model."""

    value_head: ValueHead | None = None

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`Policy.logprobs`, without gradients."""
        with without_adapters(self._policy.model):
            return self._policy.logprobs(batch, temperature)

    def score(self, batch: MicroBatch, temperature: float, *, values_alone: bool = False) -> Scores:
        """As :meth:`Policy.score`, without gradients or values."""
        del values_alone
        return Scores(*self.logprobs(batch, temperature))


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, *, base: bool) -> None:
    """Writes ``model`` under ``folder``: as ``model/``, a complete Hugging Face folder; one with adapters as ``adapter/``, and with ``base`` its base too."""
    layers = adapted(model)
    if base or not layers:
        with without_adapters(model):
            model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    if layers:
        save_adapters(model, folder / "adapter")


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Writes the adapters as a folder that peft loads."""
    folder.mkdir()
    config: Any = model.peft_config[ADAPTER]  # pyright: ignore[reportAttributeAccessIssue] - peft's injection leaves it there
    config.save_pretrained(folder)
    save_file(_adapter_tensors(model), folder / WEIGHTS, metadata={"format": "pt"})


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Fills the adapters of ``model`` from a folder of :func:`save_adapters`.

    Raises :class:`CheckpointError` where they are those of another model or of other settings.
    """
    own, saved = _adapter_tensors(model), load_file(folder / WEIGHTS)
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in saved.items()}:
        differing = sorted(own.keys() ^ saved.keys()) or [name for name in own if own[name].shape != saved[name].shape]
        raise CheckpointError(f"{folder} holds other adapters than learner.policy.lora asks for: {differing[0]} differs")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def adapt(model: PreTrainedModel, lora: Lora | None, seed: int, saved: Checkpoint | None) -> None:
    """Gives ``model`` the adapters its settings ask for, fresh ones or those of ``saved``; nothing where they ask for none.

    Raises :class:`ConfigError` where ``saved`` was trained the other way, and as :func:`add_adapters` and :func:`load_adapters`.
    """
    held = None if saved is None else saved.adapter_folder
    if saved is not None and (held is None) != (lora is None):
        trained, now = ("without", "set") if held is None else ("with", "null")
        raise ConfigError(
            f"checkpoint {saved.folder.name} was trained {trained} adapters and learner.policy.lora is {now}: go on as it was, or export it "
            "(rollstream models export) and start a new run from that folder"
        )
    if lora is not None:
        add_adapters(model, lora, seed)
        if held is not None:
            load_adapters(model, held)


def adapt_as_saved(model: PreTrainedModel, folder: Path) -> None:
    """Puts the adapters of ``folder`` into a plain ``model``, as its own configuration says."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise MissingExtra(f"{folder} holds adapters, which need peft, not installed here: pip install 'rollstream[lora]'") from None
    _inject(inject_adapter_in_model, LoraConfig.from_pretrained(str(folder)), model)
    load_adapters(model, folder)


def _adapter_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A and B of every layer, by the names peft's files have; the model's own tensors."""
    found: dict[str, torch.Tensor] = {}
    for name, layer in adapted(model).items():
        for kind in ("lora_A", "lora_B"):
            found[f"{_PEFT_PREFIX}{name}.{kind}.weight"] = getattr(layer, kind)[ADAPTER].weight.detach()
    return found
