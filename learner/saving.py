"""What a checkpoint of the learner holds beside its manifest: the model's folder, the optimiser, random numbers; written by one process or by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckpointError
from .checkpoint import FIRST, Checkpoint, Keep, begin_checkpoint, finish_checkpoint, name_of, refused_by_disk, temporary_of
from .dcp import FOLDER, load_shards, save_shards, share_of, share_out, steps_of
from .gathered import gathered
from .lora import save_model
from .policy import Policy
from .publisher import identities

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
    if not policy.sharded:
        save_model(policy.model, tokenizer, folder, base=not (folder.parent / FIRST).is_dir())
        head = {} if policy.value_head is None else {"value_head": policy.value_head.state_dict()}
        torch.save({"optimizer": optimizer.state_dict(), "random": _random_state(), **head}, folder / "training.pt")
        return
    policy.settle()
    whole = _whole_state(policy)
    head = {} if policy.value_head is None else {"value_head": dict(gathered(policy.value_head.state_dict(), policy.ranks))}
    with policy.ranks.together():
        if policy.ranks.leads:
            policy.model.save_pretrained(folder / "model", state_dict=whole)
            tokenizer.save_pretrained(folder / "model")
            (folder / FOLDER).mkdir()
            torch.save({"steps": steps_of(optimizer), "random": _random_state(), **head}, folder / "training.pt")
    del whole
    with policy.ranks.together():
        save_shards(optimizer, folder / FOLDER)


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
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.folder} holds the optimiser or value head of another model: {error}") from error
    torch.set_rng_state(state["random"]["cpu"].cpu())
    if "cuda" in state["random"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random"]["cuda"].cpu())


@torch.no_grad()
def _fill(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Puts whole tensors into ``module``, which may hold a share of each."""
    for name, parameter in module.named_parameters():
        parameter.copy_(share_of(parameter, state[name]))


def _whole_state(policy: Policy) -> dict[str, Any]:
    """The model's state, whole, on rank 0; tied tensors are one, as they are in the model."""
    state, same = policy.model.state_dict(), identities(policy.model)
    first: dict[int, str] = {}
    for name in state:
        first.setdefault(same[name], name)
    found = dict(gathered({name: state[name] for name in first.values()}, policy.ranks))
    return {name: found[first[same[name]]] for name in state} if policy.ranks.leads else {}


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
