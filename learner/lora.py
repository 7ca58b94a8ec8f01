"""Low-rank adapters through peft (``learner.policy.lora``; LoRA, arXiv 2106.09685): W x becomes W x + alpha / rank · B A x, and only A and B learn.

The adapters are put into the model itself, so scoring, packing and checkpointed activations are as without them. What leaves the learner is merged: samplers
and exported folders hold W + alpha / rank · B A under W's own name. The base, version 0, is saved once; later checkpoints hold adapters alone, in peft's own
format. With the adapters out of the way the same model is the frozen reference of a KL term. Ranks that share the policy share base and adapters alike.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from ..configs.checks import check_adapters
from ..configs.learner_schema import Lora
from ..errors import CheckpointError, ConfigError, MissingExtra
from .collate import MicroBatch
from .dcp import share_of
from .policy import Policy, Scores
from .value import ValueHead

if TYPE_CHECKING:
    from ..models import PreTrainedModel
    from .checkpoint import Checkpoint

ADAPTER = "default"
WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Puts adapters into ``model``, to be filled by :func:`fill_adapters`, and freezes everything else.

    Raises :class:`ConfigError` where a target matches nothing, or only what cannot be adapted; :class:`MissingExtra` without peft.
    """
    check_adapters(lora)
    from peft import LoraConfig, inject_adapter_in_model

    targets = _targets(model, lora.target_modules)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, bias="none")  # pyright: ignore[reportArgumentType] - a float will do
    with torch.random.fork_rng(devices=[]):
        _inject(inject_adapter_in_model, config, model)
    if (odd := set(targets) ^ set(adapted(model))) or (odd := {name for name, layer in adapted(model).items() if layer.r[ADAPTER] != lora.rank}):
        raise ConfigError(f"learner.policy.lora: peft does not adapt {sorted(odd)[0]} of {type(model).__name__} as asked; choose other target_modules")
    for layer in adapted(model).values():
        if lora.dropout:
            layer.lora_dropout[ADAPTER] = _GradientDropout(lora.dropout)
    model.eval()
    _let_learn(model, adapters=True)


def _let_learn(model: PreTrainedModel, *, adapters: bool) -> None:
    """Lets the adapters learn and nothing else, or everything but them."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((".lora_" in name) == adapters)


@torch.no_grad()
def fill_adapters(model: PreTrainedModel, seed: int, saved: Path | None) -> None:
    """Gives the adapters of ``model`` their values, each process its share: those of the folder ``saved``, or fresh ones.

    Fresh: B is zero, so the model computes what it did, and A follows from ``seed``, drawn as the weights of a linear layer are.
    """
    values = _saved_tensors(model, saved) if saved is not None else _fresh_tensors(model, seed)
    for name, layer in adapted(model).items():
        for kind in ("lora_A", "lora_B"):
            matrix = getattr(layer, kind)[ADAPTER]
            share = share_of(matrix.weight, values[_file_name(name, kind)])
            if matrix.weight.is_meta:
                matrix.weight = torch.nn.Parameter(share, requires_grad=matrix.weight.requires_grad)
            else:
                matrix.weight.copy_(share)


def _fresh_tensors(model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, layer in adapted(model).items():
        a, b = (getattr(layer, kind)[ADAPTER].weight for kind in ("lora_A", "lora_B"))
        drawn = torch.empty(a.shape)
        torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        found |= {_file_name(name, "lora_A"): drawn.to(a.dtype), _file_name(name, "lora_B"): torch.zeros(b.shape, dtype=b.dtype)}
    return found


def _saved_tensors(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    own, saved = adapter_tensors(model), load_file(folder / WEIGHTS)
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in saved.items()}:
        differing = sorted(own.keys() ^ saved.keys()) or [name for name in own if own[name].shape != saved[name].shape]
        raise CheckpointError(f"{folder} holds other adapters than learner.policy.lora asks for: {differing[0]} differs")
    return saved


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
def base_alone(model: PreTrainedModel) -> Generator[None]:
    """Inside, the base learns and the adapters are out of the way: the warm-up, which makes the policy that adapters start from."""
    if not adapted(model):
        yield
        return
    _let_learn(model, adapters=False)
    with without_adapters(model):
        yield
    _let_learn(model, adapters=True)


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
    return merged(layer, layer.base_layer.weight.detach(), *(getattr(layer, kind)[ADAPTER].weight.detach() for kind in ("lora_A", "lora_B")))


def merged(layer: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """W + alpha / rank · B A, of the tensors that ``layer`` has in the end, all of them whole."""
    delta = b @ a
    return weight + (delta.T if layer.fan_in_fan_out else delta) * layer.scaling[ADAPTER]


def base_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's own tensors by the names of a plain one, without its adapters."""
    with without_adapters(model):
        return model.state_dict()


def plain_state(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """The tensors of the merged model by the names of a plain one, and what brings them up to date with the adapters; base tensors are the model's own."""
    layers, state = adapted(model), base_state(model)
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


def save_adapters(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes ``tensors``, those of :func:`adapter_tensors` whole, as a folder that peft loads."""
    folder.mkdir()
    config: Any = model.peft_config[ADAPTER]  # pyright: ignore[reportAttributeAccessIssue] - peft's injection leaves it there
    config.save_pretrained(folder)
    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})


def check_saved(lora: Lora | None, saved: Checkpoint | None) -> None:
    """Raises :class:`ConfigError` where ``saved`` was trained with adapters and ``lora`` asks for none, or the other way."""
    held = None if saved is None else saved.adapter_folder
    if saved is not None and (held is None) != (lora is None):
        trained, now = ("without", "set") if held is None else ("with", "null")
        raise ConfigError(
            f"checkpoint {saved.folder.name} was trained {trained} adapters and learner.policy.lora is {now}: go on as it was, or export it "
            "(rollstream models export) and start a new run from that folder"
        )


def adapt_as_saved(model: PreTrainedModel, folder: Path) -> None:
    """Puts the adapters of ``folder`` into a plain ``model``, as its own configuration says."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise MissingExtra(f"{folder} holds adapters, which need peft, not installed here: pip install 'rollstream[lora]'") from None
    _inject(inject_adapter_in_model, LoraConfig.from_pretrained(str(folder)), model)
    fill_adapters(model, 0, folder)


def adapter_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A and B of every layer, by the names peft's files have; the model's own tensors."""
    return {_file_name(name, kind): getattr(layer, kind)[ADAPTER].weight.detach() for name, layer in adapted(model).items() for kind in ("lora_A", "lora_B")}


def _file_name(layer: str, kind: str) -> str:
    return f"{_PEFT_PREFIX}{layer}.{kind}.weight"
