"""What the learner starts from: the newest checkpoint, or the starting policy after its warm-up; alike on every rank."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import models
from ..configs.learner_schema import FsdpPolicy, Learner, Lora, SinglePolicy
from ..configs.run_folder import Run
from ..errors import ConfigError
from .checkpoint import FIRST, Checkpoint, clear_leftovers, newest_checkpoint, read_checkpoint
from .lora import AdaptersOff, adapt
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
        policy, tokenizer = load(folder, run, ranks), models.load_tokenizer(folder)
    if saved is None and run.config.warmup is not None:
        warm_up(policy, tokenizer, run.config, stop)
    adapt(policy.model, lora_of(config), run.config.seed, saved)
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


def load(folder: Path, run: Run, ranks: Ranks, *, frozen: bool = False) -> Policy:
    """The policy in ``folder``: whole in this process, or sharded over ``ranks``; ``frozen`` has no gradient.

    Raises :class:`ConfigError` where the model cannot be packed, or its activations cannot be checkpointed.
    """
    settings: SinglePolicy | FsdpPolicy = run.config.learner.policy
    if frozen:
        settings = settings.model_copy(update={"activation_checkpointing": False})
    if isinstance(settings, FsdpPolicy) and ranks.joined:
        from .fsdp import ShardedPolicy

        model: Any = models.load_policy(folder).requires_grad_(not frozen)
        return ShardedPolicy(model, settings, ranks, device_of(run, ranks), None if frozen else head_of(model, run.config.learner))
    model = models.load_policy(folder, device=run.config.learner.device).requires_grad_(not frozen)
    return Policy(model, settings, None if frozen else head_of(model, run.config.learner))


def lora_of(learner: Learner) -> Lora | None:
    """The adapters that are trained instead of the weights; None where there are none, as in a policy of several ranks."""
    return learner.policy.lora if isinstance(learner.policy, SinglePolicy) else None


def device_of(run: Run, ranks: Ranks) -> str:
    """Where a rank computes: with ``cuda`` each on a GPU of its own."""
    device = run.config.learner.device
    return f"cuda:{ranks.rank}" if device == "cuda" and ranks.num > 1 else device


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
    if lora_of(run.config.learner) is not None:
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
