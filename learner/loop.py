"""The learner's loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .. import models
from ..buffer import wire
from ..buffer.channels import publish_to
from ..buffer.client import LearnerClient
from ..buffer.curve import client_keys
from ..buffer.types import Batch
from ..buffer.wire import StatusReply, Welcome
from ..configs.run_folder import Run
from ..errors import ConfigError, RoleFailed, StreamError
from .alarms import check_alarms
from .checkpoint import FIRST, Checkpoint, clear_leftovers, model_folder_of, newest_checkpoint, read_checkpoint, restore_training, write_checkpoint
from .evaluations import Evaluations
from .lora import AdaptersOff, adapt
from .metrics import Counters, data_figures, row_of
from .optimizer import optimizer_of
from .policy import Policy, policy_of
from .publisher import Publisher
from .step import Stepper
from .tracker import Tracker
from .updates import Trained, train_batch
from .warmup import warm_up

if TYPE_CHECKING:
    from ..models import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


class BatchSource(Protocol):
    """Where batches come from and what is told back: the buffer's client, or a recording of one."""

    def hello(self, version: int, lineage: int) -> Welcome: ...  # noqa: D102 - as LearnerClient
    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None: ...  # noqa: D102
    def trained(self, version: int) -> None: ...  # noqa: D102
    def published(self, version: int, digest: str) -> str: ...  # noqa: D102
    def sync(self) -> None: ...  # noqa: D102
    def retained(self, statement: wire.Retained) -> wire.Evaluations: ...  # noqa: D102
    def status(self) -> StatusReply: ...  # noqa: D102


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


def learn(run: Run, stop: threading.Event) -> None:
    """Trains ``run`` from its newest checkpoint to its last version.

    Consumes: batches, one per version, from the buffer.
    Waits for: the next batch (:meth:`LearnerClient.pull`), which the buffer forms once its window's head is ready; nothing else.
    Released by: that batch, or ``stop`` (the version held is checkpointed then).
    Produces: version v + 1 of the weights for the actors, a row of metrics, a checkpoint when one is due.

    Raises :class:`DataRefused` for a batch that must not train, :class:`CheckpointError` for a damaged one, :class:`RoleFailed` where an alarm stops the run.
    """
    with LearnerClient(run.endpoint, run.run_id, keys=client_keys(run), stalled_s=run.config.buffer.stall_timeout_s) as client:
        learn_from(run, client, stop)


def learn_from(run: Run, source: BatchSource, stop: threading.Event) -> None:
    """:func:`learn` from any source of batches."""
    config = run.config.learner
    torch.set_num_threads(config.num_threads)  # sums depend on it, so a resume needs the same
    held = start(run, stop)
    if held.saved is None and stop.is_set():
        return  # half warmed up: the next start begins anew
    held.lineage = source.hello(held.version, held.lineage).lineage  # from here on in the current one, which shares the version held
    if held.saved is None:
        held.saved = _save(run, held, source.sync)
    stepper = Stepper(held.policy, held.optimizer, run.config, reference_of(run, held.policy))
    tracker = Tracker(run.metrics_path, run.tensorboard_folder, held.version)
    publisher = Publisher(publish_to(run, run.config.actors.num), held.policy.model, model_folder_of(held.saved))
    evaluations = Evaluations(run, source, publisher, tracker)
    counters = Counters(source.status)
    saving_s = 0.0

    def wait(reason: str) -> None:
        _tell(source, publisher)
        evaluations.look()
        logger.debug("version=%d waiting_for=%s", held.version + 1, reason)

    try:
        evaluations.publish(held.lineage, held.version)
        while held.version < config.versions:
            began = time.perf_counter()
            batch = source.pull(held.version + 1, wait, stop)
            if batch is None:
                break
            pulled = time.perf_counter()
            data, done, prepare_s = _make_version(run, held, stepper, batch, source, publisher)
            _advance(held, batch, done.update.stepped, config.alarms.max_skipped)
            source.trained(held.version)
            _tell(source, publisher)
            evaluations.publish(held.lineage, held.version)
            ended = time.perf_counter()
            seconds = {"step": ended - began, "wait_batch": pulled - began, "prepare": prepare_s, "publish": publisher.copy_s}
            row = row_of(data, done, skipped=held.skipped, seconds=seconds | {"checkpoint": saving_s})
            tracker.row(batch.lineage, held.version, row | counters.read())
            publisher.expect(counters.num_actors)
            saving_s = 0.0
            if held.version % config.checkpoint.every == 0 or held.version == config.versions:
                held.saved = _save(run, held, source.sync)
                saving_s = time.perf_counter() - ended
        _leave(run, held, source, publisher)
        if held.version == config.versions:
            evaluations.finish(stop)
    finally:
        publisher.close()
        tracker.close()


def _make_version(run: Run, held: Held, stepper: Stepper, batch: Batch, source: BatchSource, publisher: Publisher) -> tuple[dict[str, float], Trained, float]:
    """Trains one batch: what it was, what was done, and the seconds its preparation took.

    Where an alarm stops the run before a parameter changed, the version held is checkpointed first.
    """
    began = time.perf_counter()
    work = stepper.prepare(batch)
    data, prepare_s = data_figures(batch, work, run.config.envs), time.perf_counter() - began
    num_steps, alarms = stepper.num_steps, run.config.learner.alarms
    try:
        check_alarms(data, alarms, batch.version)
        return data, train_batch(stepper, work, batch.version, alarms, publisher.fence), prepare_s
    except RoleFailed:
        if stepper.num_steps == num_steps:
            _leave(run, held, source, publisher)
        raise


def start(run: Run, stop: threading.Event) -> Held:
    """The newest checkpoint; where there is none, the starting policy, warmed up, with ``saved`` None: version 0 is to be written.

    Raises :class:`CheckpointError` where the newest is damaged, :class:`ConfigError` where a setting that a step depends on has changed since.
    """
    clear_leftovers(run.checkpoints_folder)
    saved = newest_checkpoint(run.checkpoints_folder)
    config = run.config.learner
    folder = saved.model_folder if saved is not None else models.prepare_model(run)
    model, tokenizer = models.load_policy(folder, device=config.device), models.load_tokenizer(folder)
    policy = policy_of(model, config)
    if saved is None and run.config.warmup is not None:
        warm_up(policy, tokenizer, run.config, stop)
    adapt(model, config.policy.lora, run.config.seed, saved)
    optimizer = optimizer_of(policy, config)
    held = Held(policy, tokenizer, optimizer, version=0, lineage=0, skipped_in_a_row=0, skipped=0, saved=None)
    if saved is None:
        torch.manual_seed(run.config.seed)
    else:
        _restore(run, held, saved)
    return held


def step_settings(run: Run) -> dict[str, Any]:
    """The parts of the configuration that a step depends on: redoing a recorded batch under others would make another version under the same number."""
    learner = run.config.learner
    settings = learner.model_dump(mode="json", include={"batch_groups", "group_size", "preset", "loss", "advantage", "value", "optimizer", "updates", "policy"})
    settings |= {"model": run.config.model.model_dump(mode="json"), "degenerate": run.config.buffer.degenerate, "max_lag": run.config.buffer.max_lag}
    return settings if learner.optimizer.schedule == "constant" else settings | {"versions": learner.versions}


def reference_of(run: Run, policy: Policy) -> Policy | AdaptersOff | None:
    """The frozen policy of the KL term: version 0, which stays on disk for it, or ``policy`` without its adapters. None where the loss has no such term."""
    if run.config.learner.loss.kl is None:
        return None
    if run.config.learner.policy.lora is not None:
        return AdaptersOff(policy)
    first = read_checkpoint(run.checkpoints_folder / FIRST)
    model = models.load_policy(first.model_folder, device=run.config.learner.device).requires_grad_(False)
    return Policy(model, run.config.learner.policy.model_copy(update={"activation_checkpointing": False}))


def _restore(run: Run, held: Held, saved: Checkpoint) -> None:
    now = step_settings(run)
    changed = sorted(key for key in now.keys() | saved.settings.keys() if now.get(key) != saved.settings.get(key))
    forks_here = run.fork is not None and run.fork.version == saved.version
    if changed and not forks_here:
        raise ConfigError(
            f"{changed[0]} is {now.get(changed[0])}, checkpoint {saved.folder.name} was trained with {saved.settings.get(changed[0])}: "
            "resume with the same, fork from it with --resume --fork, or start a new run"
        )
    restore_training(saved, held.optimizer, run.config.learner.device, held.policy.value_head)
    held.version, held.lineage, held.saved = saved.version, saved.lineage, saved.folder
    held.skipped_in_a_row, held.skipped = int(saved.progress["skipped_in_a_row"]), int(saved.progress["skipped"])
    logger.info("resumed=%s version=%d", saved.folder, saved.version)


def _advance(held: Held, batch: Batch, stepped: bool, max_skipped: int) -> None:
    """Moves to the batch's version. A skipped step counts; too many in a row end the run."""
    held.version = batch.version
    held.skipped_in_a_row = 0 if stepped else held.skipped_in_a_row + 1
    held.skipped += not stepped
    if not stepped:
        logger.warning("version=%d step=skipped in_a_row=%d", held.version, held.skipped_in_a_row)
    if held.skipped_in_a_row > max_skipped:
        raise RoleFailed(
            f"{held.skipped_in_a_row} steps in a row were skipped (no finite gradient, or nothing to train on), "
            f"bound learner.alarms.max_skipped {max_skipped}: lower learner.optimizer.learning_rate, or look at loss/* and train/* in metrics.jsonl"
        )


def _save(run: Run, held: Held, sync: Callable[[], object]) -> Path:
    return write_checkpoint(
        run.checkpoints_folder,
        version=held.version,
        lineage=held.lineage,
        model=held.policy.model,
        tokenizer=held.tokenizer,
        optimizer=held.optimizer,
        value_head=held.policy.value_head,
        settings=step_settings(run),
        progress={"skipped_in_a_row": held.skipped_in_a_row, "skipped": held.skipped},
        keep_last=run.config.learner.checkpoint.keep_last,
        keep_every=run.config.learner.checkpoint.keep_every,
        keep_first=run.config.learner.loss.kl is not None or run.config.learner.policy.lora is not None,
        sync=sync,
    )


def _leave(run: Run, held: Held, source: BatchSource, publisher: Publisher) -> None:
    """Tells what was published last, and keeps what was trained since the last checkpoint; a buffer that is gone already costs that much redo and no error."""
    publisher.fence()
    try:
        _tell(source, publisher)
        if held.saved is None or held.saved.name != f"v{held.version:06d}":
            held.saved = _save(run, held, source.sync)
    except StreamError as error:
        logger.warning("version=%d saved=%s reason=%s", held.version, held.saved, error)


def _tell(source: BatchSource, publisher: Publisher) -> None:
    """Records the digests of what was written since; here and not in the thread, since a socket belongs to one thread."""
    for manifest in publisher.written():
        note = source.published(manifest.version, manifest.digest)
        if note:
            logger.warning("version=%d digest=%s note=%s", manifest.version, manifest.digest, note)
