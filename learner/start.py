"""What the learner starts from: the newest checkpoint, or the starting policy after its warm-up; alike on every rank."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import models
from ..configs.learner_schema import FsdpPolicy, SinglePolicy
from ..configs.run_folder import Run
from ..errors import ConfigError
from .checkpoint import FIRST, Checkpoint, clear_leftovers, newest_checkpoint, read_checkpoint
from .lora import AdaptersOff, add_adapters, base_alone, check_saved, fill_adapters, without_adapters
from .optimizer import optimizer_of
from .policy import Policy, head_of
from .ranks import Ranks
from .saving import restore_training
from .warmup import warm_up

if TYPE_CHECKING:
    from ..models import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_LAYOUT = {"ranks", "start_timeout_s", "reshard_after_forward", "reduce"}
"""How a policy is spread over processes: its steps are the same within rounding, so a resume may change it."""


@dataclass(slots=True)
class Held:
    """What the learner holds: ``version`` of the history of ``lineage``, steps skipped before it (in a row and in all), and its newest checkpoint ``saved``."""

    policy: Policy
    tokenizer: PreTrainedTokenizerFast
    optimizer: torch.optim.Optimizer
    version: int
    lineage: int
    skipped_in_a_row: int
    skipped: int
    saved: Path | None


def start(run: Run, stop: threading.Event, ranks: Ranks | None = None) -> Held:
    """The newest checkpoint; where there is none, the starting policy, warmed up, with ``saved`` None: version 0 is to be written.

    Raises :class:`CheckpointError` where the newest is damaged, :class:`ConfigError` where a setting that a step depends on has changed since.
    """
    ranks = ranks or Ranks()
    saved = _newest(run, ranks)
    config = run.config.learner
    with ranks.together():
        if saved is None and ranks.leads:
            models.prepare_model(run)  # the others find it made
    folder = saved.model_folder if saved is not None else models.prepare_model(run)
    with ranks.together():
        tokenizer = models.load_tokenizer(folder)
    policy = load(folder, run, ranks, saved=saved)
    if saved is None and run.config.warmup is not None:
        with base_alone(policy.model):
            warm_up(policy, tokenizer, run.config, stop)
    policy.settle()
    optimizer = optimizer_of(policy, config)
    held = Held(policy, tokenizer, optimizer, version=0, lineage=0, skipped_in_a_row=0, skipped=0, saved=None)
    if saved is None:
        torch.manual_seed(run.config.seed)
    else:
        _restore(run, held, saved)
    return held


def _newest(run: Run, ranks: Ranks) -> Checkpoint | None:
    """The checkpoint to start from: rank 0 checks every byte of it, the others take its word."""
    saved: Checkpoint | None = None
    with ranks.together():
        if ranks.leads:
            clear_leftovers(run.checkpoints_folder)
            saved = newest_checkpoint(run.checkpoints_folder)
    name = ranks.exchange(b"" if saved is None else saved.folder.name.encode())[0].decode()
    return saved if ranks.leads or not name else read_checkpoint(run.checkpoints_folder / name, verify=False)


def load(folder: Path, run: Run, ranks: Ranks, *, saved: Checkpoint | None = None, frozen: bool = False) -> Policy:
    """The policy in ``folder``, with the adapters it trains, fresh ones or those of ``saved``: whole in this process, or sharded over ``ranks``.

    ``frozen`` has no gradient, no adapters and no value head.

    Raises :class:`ConfigError` where the model cannot be packed, its activations cannot be checkpointed, its files cannot be read, or ``saved`` was trained
    with adapters and this is without, or the other way.
    """
    learner, seed = run.config.learner, run.config.seed
    settings: SinglePolicy | FsdpPolicy = learner.policy
    lora = None if frozen else settings.lora
    adapters = None if saved is None else saved.adapter_folder
    if frozen:
        settings = settings.model_copy(update={"activation_checkpointing": False})
    else:
        check_saved(lora, saved)
    device = device_of(run, ranks)
    sharded = isinstance(settings, FsdpPolicy) and ranks.joined
    with ranks.together():
        model: Any = models.sketch_policy(folder) if sharded else models.load_policy(folder, device=device)
        model.requires_grad_(not frozen)
        if lora is not None:
            add_adapters(model, lora)
        head = None if frozen else head_of(model, learner, device)

    def fill() -> None:
        with without_adapters(model):
            models.fill_policy(model, folder, device=device)
        if lora is not None:
            fill_adapters(model, seed, adapters)

    if isinstance(settings, FsdpPolicy) and ranks.joined:
        from .fsdp import ShardedPolicy

        return ShardedPolicy(model, settings, ranks, device, head, fill)
    if lora is not None:
        fill_adapters(model, seed, adapters)
    return Policy(model, settings, head)


def device_of(run: Run, ranks: Ranks) -> str:
    """Where a rank computes: with ``cuda`` each on a GPU of its own, among those its machine (or Ray, which shows each its own) has for it."""
    device = run.config.learner.device
    return f"cuda:{ranks.rank % torch.cuda.device_count()}" if device == "cuda" and ranks.num > 1 else device


def step_settings(run: Run) -> dict[str, Any]:
    """The parts of the configuration that a step depends on: redoing a recorded batch under others would make another version under the same number."""
    learner = run.config.learner
    settings = learner.model_dump(mode="json", include={"batch_groups", "group_size", "preset", "loss", "advantage", "value", "optimizer", "updates"})
    settings |= {"policy": learner.policy.model_dump(mode="json", exclude=_LAYOUT)}
    settings |= {"model": run.config.model.model_dump(mode="json"), "degenerate": run.config.buffer.degenerate, "max_lag": run.config.buffer.max_lag}
    return settings if learner.optimizer.schedule == "constant" else settings | {"versions": learner.versions}


def reference_of(run: Run, policy: Policy) -> Policy | AdaptersOff | None:
    """The frozen policy of the KL term: version 0, which stays on disk for it, or ``policy`` without its adapters. None where the loss has no such term."""
    if run.config.learner.loss.kl is None:
        return None
    if run.config.learner.policy.lora is not None:
        return AdaptersOff(policy)
    first = read_checkpoint(run.checkpoints_folder / FIRST)
    return load(first.model_folder, run, policy.ranks, frozen=True)


def _restore(run: Run, held: Held, saved: Checkpoint) -> None:
    now = step_settings(run)
    changed = sorted(key for key in now.keys() | saved.settings.keys() if now.get(key) != saved.settings.get(key))
    forks_here = run.fork is not None and run.fork.version == saved.version
    if changed and not forks_here:
        raise ConfigError(
            f"{changed[0]} is {now.get(changed[0])}, checkpoint {saved.folder.name} was trained with {saved.settings.get(changed[0])}: "
            "resume with the same, fork from it with --resume --fork, or start a new run"
        )
    with held.policy.ranks.together():
        restore_training(saved, held.policy, held.optimizer)
    held.version, held.lineage, held.saved = saved.version, saved.lineage, saved.folder
    held.skipped_in_a_row, held.skipped = int(saved.progress["skipped_in_a_row"]), int(saved.progress["skipped"])
    logger.info("resumed=%s version=%d", saved.folder, saved.version)
