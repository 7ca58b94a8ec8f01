"""What a checkpoint of the learner holds beside its manifest: the model's folder, the optimiser, random numbers; written by one process or by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from .. import models
from ..errors import CheckpointError
from .checkpoint import FIRST, Checkpoint, Keep, begin_checkpoint, finish_checkpoint, name_of, refused_by_disk, temporary_of
from .dcp import FOLDER, load_shards, save_shards, share_of, share_out, steps_of
from .gathered import gathered
from .lora import adapter_tensors, save_adapters, without_adapters
from .policy import Policy
from .ranks import Ranks

if TYPE_CHECKING:
    from ..models import PreTrainedTokenizerFast


def write_checkpoint(
    checkpoints: Path,
    *,
    version: int,
    lineage: int,
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    progress: dict[str, float],
    keep: Keep,
    sync: Callable[[], object],
) -> Path:
    """Writes version ``version``, all ranks together; ``sync`` makes log and ledger durable before it counts. Prunes afterwards.

    Raises :class:`CheckpointError` where the disk refuses, on every rank where any fails; what was there before is untouched then.
    """
    ranks = policy.ranks
    with ranks.together():
        if ranks.leads:
            begin_checkpoint(checkpoints, version)
    with refused_by_disk(checkpoints, version):
        _save_training(temporary_of(checkpoints, version), policy, tokenizer, optimizer)
    with ranks.together():
        if ranks.leads:
            finish_checkpoint(checkpoints, version=version, lineage=lineage, settings=settings, progress=progress, keep=keep, sync=sync)
    return checkpoints / name_of(version)


def _save_training(folder: Path, policy: Policy, tokenizer: PreTrainedTokenizerFast, optimizer: torch.optim.Optimizer) -> None:
    """Writes everything into ``folder``, which rank 0 made; every rank calls it. Raises on every rank where any cannot write."""
    policy.settle()
    _save_model(folder, policy, tokenizer)
    head = {} if policy.value_head is None else {"value_head": dict(gathered(policy.value_head.state_dict(), policy.ranks))}
    rest = {"random": _random_states(policy.ranks), **head}
    with policy.ranks.together():
        if policy.ranks.leads:
            held = {"steps": steps_of(optimizer)} if policy.sharded else {"optimizer": optimizer.state_dict()}
            torch.save({**held, **rest}, folder / "training.pt")
            if policy.sharded:
                (folder / FOLDER).mkdir()
    if policy.sharded:
        with policy.ranks.together():
            save_shards(optimizer, folder / FOLDER)


def _save_model(folder: Path, policy: Policy, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes the model as ``model/``, a complete Hugging Face folder; one with adapters as ``adapter/``, and its base too where no checkpoint has it yet."""
    model, ranks = policy.model, policy.ranks
    adapters = dict(gathered(adapter_tensors(model), ranks))
    if not adapters or not (folder.parent / FIRST).is_dir():
        with without_adapters(model), ranks.together():
            stream = gathered(models.saved_state(model), ranks)
            try:
                if ranks.leads:
                    models.save_policy(model, ((name, whole) for name, whole in stream if whole is not None), folder / "model")
                    tokenizer.save_pretrained(folder / "model")
            finally:
                for _ in stream:  # the others give their shares whatever the disk says
                    pass
    if adapters:
        with ranks.together():
            if ranks.leads:
                save_adapters(model, {name: whole for name, whole in adapters.items() if whole is not None}, folder / "adapter")


def restore_training(checkpoint: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Puts optimiser, value head and random-number state back as they were, however many ranks wrote them.

    Raises :class:`CheckpointError` where they belong to another model.
    """
    state = torch.load(checkpoint.folder / "training.pt", map_location=policy.device, weights_only=True)
    try:
        if "steps" in state:
            load_shards(optimizer, checkpoint.folder / FOLDER, state["steps"])
        elif policy.sharded:
            share_out(optimizer, state["optimizer"]["state"])
        else:
            asked = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in optimizer.param_groups]
            optimizer.load_state_dict(state["optimizer"])
            for group, values in zip(optimizer.param_groups, asked, strict=True):
                group.update(values)  # a fork may have changed what the saved state would put back
        if policy.value_head is not None:
            _fill(policy.value_head, state["value_head"])
    except OSError as error:
        raise CheckpointError(f"checkpoint {checkpoint.folder} cannot be read: {error}") from error
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.folder} holds the optimiser or value head of another model: {error}") from error
    _set_random_state(state["random"], policy.ranks)


@torch.no_grad()
def _fill(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Puts whole tensors into ``module``, which may hold a share of each."""
    for name, parameter in module.named_parameters():
        parameter.copy_(share_of(parameter, state[name]))


def _random_states(ranks: Ranks) -> list[dict[str, torch.Tensor]]:
    """The state of the random numbers of every rank: those that drop inputs of adapters draw as many as they have rows."""
    mine = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        mine["cuda"] = torch.cuda.get_rng_state()
    given = ranks.exchange(msgspec.msgpack.encode({name: state.numpy().tobytes() for name, state in mine.items()}))
    states = [msgspec.msgpack.decode(data, type=dict[str, bytes]) for data in given]
    return [{name: torch.frombuffer(bytearray(state), dtype=torch.uint8) for name, state in one.items()} for one in states]


def _set_random_state(states: list[dict[str, torch.Tensor]], ranks: Ranks) -> None:
    """Where other ranks wrote ``states`` there is nothing exact to go on from, and any of them will do."""
    state = states[ranks.rank % len(states)]
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
