"""The learner's loop, the same in one process and in each of several ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from ..buffer import wire
from ..buffer.channels import publish_to
from ..buffer.client import LearnerClient
from ..buffer.curve import client_keys
from ..buffer.log_files import local_files
from ..buffer.types import Batch
from ..buffer.wire import StatusReply, Welcome
from ..configs.learner_schema import FsdpPolicy
from ..configs.run_folder import Run
from ..errors import CheckpointError, RankFailed, RoleFailed, StreamError
from .alarms import check_alarms
from .checkpoint import Keep, model_folder_of, name_of
from .evaluations import Evaluations
from .flops import peak_flops
from .gathered import GatheringPublisher
from .intake import Taken, take
from .meeting import join
from .metrics import Counters, costs_of, data_figures, row_of
from .publisher import Publisher
from .ranks import Ranks, naming_the_lost, refuse_a_lonely_rank
from .saving import write_checkpoint
from .skips import why_skipped
from .space import RETRY_S
from .start import Held, device_of, reference_of, start, step_settings
from .step import Stepper
from .tracker import Tracker
from .updates import Trained, train_batch
from .wandb_tracker import WandbTracker

logger = logging.getLogger(__name__)


class BatchSource(Protocol):
    """Where batches come from and what is told back: the buffer's client, or a recording of one. Only rank 0 tells anything."""

    def hello(self, version: int | None, lineage: int | None, vocabulary: int | None) -> Welcome: ...  # noqa: D102 - as LearnerClient
    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None: ...  # noqa: D102
    def trained(self, version: int) -> None: ...  # noqa: D102
    def published(self, version: int, digest: str) -> str: ...  # noqa: D102
    def sync(self) -> None: ...  # noqa: D102
    def retained(self, statement: wire.Retained) -> wire.Evaluations: ...  # noqa: D102
    def status(self) -> StatusReply: ...  # noqa: D102


def learn(run: Run, stop: threading.Event, rank: int = 0, meet: str | None = None) -> None:
    """Trains ``run`` from its newest checkpoint to its last version, as ``rank`` of the learner; ranks on several machines meet at ``meet``.

    Consumes: batches, one per version, from the buffer: the header of each, and the rows dealt to this rank.
    Waits for: the next batch (:meth:`LearnerClient.pull`), which the buffer forms once its window's head is ready; and the other ranks.
    Released by: that batch, or ``stop`` on any rank (the version held is checkpointed then).
    Produces: version v + 1 of the weights for the actors, a row of metrics, a checkpoint when one is due.

    Raises :class:`DataRefused` for a batch that must not train, :class:`CheckpointError` for a damaged one, :class:`RoleFailed` where an alarm stops the run,
    :class:`RankFailed` where another rank failed.
    """
    policy = run.config.learner.policy
    num = policy.ranks if isinstance(policy, FsdpPolicy) else 1
    refuse_a_lonely_rank(rank, num)
    ranks = Ranks()
    if isinstance(policy, FsdpPolicy):
        ranks = join(run.socket_folder, rank, num, device=run.config.learner.device, timeout_s=policy.start_timeout_s, meet=meet, run_id=run.run_id)
    with naming_the_lost(ranks), _client(run, rank, num, stop) as client:
        learn_from(run, client, stop, ranks)
        ranks.close()


def _client(run: Run, rank: int, num: int, stop: threading.Event) -> LearnerClient:
    stalled_s, keys, files = run.config.buffer.stall_timeout_s, client_keys(run), local_files(run)
    return LearnerClient(run.endpoint, run.run_id, peer_id(rank), rank=rank, ranks=num, stalled_s=stalled_s, keys=keys, files=files, stop=stop)


def peer_id(rank: int) -> str:
    """What a rank is called, to the buffer and in logs."""
    return f"learner-{rank}" if rank else "learner"


def learn_from(run: Run, source: BatchSource, stop: threading.Event, ranks: Ranks | None = None) -> None:
    """:func:`learn` from any source of batches, as one of ``ranks``."""
    ranks = ranks or Ranks()
    config = run.config.learner
    _set_up(run, ranks)
    held = start(run, stop, ranks)
    if held.saved is None and any(ranks.largest([stop.is_set()])):
        return  # half warmed up: the next start begins anew
    _hello(source, held, ranks)
    if held.saved is None:
        held.saved = _save(run, held, source, stop)
    stepper = Stepper(held.policy, held.optimizer, run.config, reference_of(run, held.policy))
    tracker = _tracker(run, held, stop) if ranks.leads else None
    peak = peak_flops(held.policy.device, getattr(torch, config.policy.compute_dtype), config.peak_tflops)
    publisher = _publisher(run, held)
    evaluations = Evaluations(run, source, publisher, tracker) if tracker is not None else None
    counters, saving_s = Counters(source.status), 0.0

    def wait(reason: str) -> None:
        _tell(source, publisher, evaluations)
        logger.debug("version=%d waiting_for=%s", held.version + 1, reason)

    try:
        (evaluations or publisher).publish(held.lineage, held.version)
        while held.version < config.versions:
            began = time.perf_counter()
            taken = take(source, stepper, held.version + 1, wait, stop)
            if taken is None:
                break
            data, done = _make_version(run, held, stepper, taken, source, publisher, stop)
            skipped = None if done.update.stepped else why_skipped(taken.batch, data, done.gradients.metrics, config.loss)
            _advance(held, taken.batch, skipped, config.alarms.max_skipped)
            if ranks.leads:
                source.trained(held.version)
            _tell(source, publisher)
            (evaluations or publisher).publish(held.lineage, held.version)
            ended = time.perf_counter()
            seconds = {"step": ended - began, "wait_batch": taken.wait_s, "prepare": taken.prepare_s, "publish": publisher.copy_s}
            row = row_of(data, done, skipped=held.skipped, seconds=seconds | {"checkpoint": saving_s}, peak_flops=peak) | costs_of(ranks)
            if tracker is not None:
                tracker.row(taken.batch.lineage, held.version, row | counters.read())
                publisher.expect(counters.num_actors)
            saving_s = 0.0
            if held.version % config.checkpoint.every == 0 or held.version == config.versions:
                held.saved = _save(run, held, source, stop)
                saving_s = time.perf_counter() - ended
        _leave(run, held, source, publisher, stop)
        if held.version == config.versions and evaluations is not None:
            evaluations.finish(stop)
    finally:
        publisher.close()
        if tracker is not None:
            tracker.close()


def _make_version(
    run: Run, held: Held, stepper: Stepper, taken: Taken, source: BatchSource, publisher: Publisher | GatheringPublisher, stop: threading.Event
) -> tuple[dict[str, float], Trained]:
    """Trains one batch: what it was, and what was done.

    Where an alarm stops the run before a parameter changed, the version held is checkpointed first: on all ranks, since all see the same figures.
    """
    data = data_figures(taken.batch, taken.work, run.config.envs)
    num_steps, alarms = stepper.num_steps, run.config.learner.alarms
    try:
        check_alarms(data, alarms, taken.batch.version)
        return data, train_batch(stepper, taken.work, taken.batch.version, alarms, publisher.fence)
    except RankFailed:
        raise
    except RoleFailed:
        if stepper.num_steps == num_steps:
            _leave(run, held, source, publisher, stop)
        raise


def _set_up(run: Run, ranks: Ranks) -> None:
    """Threads and GPU of this process."""
    torch.set_num_threads(run.config.learner.num_threads)  # sums depend on it, so a resume needs the same
    if device_of(run, ranks).startswith("cuda:"):
        torch.cuda.set_device(device_of(run, ranks))


def _hello(source: BatchSource, held: Held, ranks: Ranks) -> None:
    """Rank 0 first: what it holds decides which batches are served."""
    with ranks.together():
        if ranks.leads:
            welcome = source.hello(held.version, held.lineage, held.policy.vocabulary)
            held.lineage = welcome.lineage  # from here on in the current one, which shares the version held
    with ranks.together():
        if not ranks.leads:
            source.hello(None, None, None)


def _publisher(run: Run, held: Held) -> Publisher | GatheringPublisher:
    """What publishes the policy held: in the background from one process, all ranks together from several."""
    assert held.saved is not None
    policy = held.policy
    if not policy.sharded:
        return Publisher(publish_to(run, run.config.actors.num), policy.model, model_folder_of(held.saved))
    policy.settle()
    with policy.ranks.together():
        writer = publish_to(run, run.config.actors.num) if policy.ranks.leads else None
    return GatheringPublisher(writer, policy.model, model_folder_of(held.saved), policy.ranks)


def _advance(held: Held, batch: Batch, skipped: tuple[str, str] | None, max_skipped: int) -> None:
    """Moves to the batch's version. A step ``skipped``, for a cause that has a remedy, counts; too many in a row end the run."""
    held.version = batch.version
    if skipped is None:
        held.skipped_in_a_row = 0
        return
    held.skipped_in_a_row += 1
    held.skipped += 1
    cause, remedy = skipped
    logger.warning("version=%d step=skipped in_a_row=%d cause=%r", held.version, held.skipped_in_a_row, cause)
    if held.skipped_in_a_row > max_skipped:
        raise RoleFailed(
            f"{held.skipped_in_a_row} steps in a row were skipped, bound learner.alarms.max_skipped {max_skipped}; version {held.version}: {cause}; {remedy}"
        )


def _save(run: Run, held: Held, source: BatchSource, stop: threading.Event) -> Path:
    """Checkpoints what is held, all ranks together; on a full disk once there is space, unless a rank was asked to stop."""
    while True:
        try:
            return _write(run, held, source)
        except (CheckpointError, RankFailed) as error:
            if not error.waits_for_space or any(held.policy.ranks.largest([stop.is_set()])):
                raise
            logger.warning("event=disk_full reason=%r remedy='free space there and the run goes on'", str(error))
        stop.wait(RETRY_S)


def _write(run: Run, held: Held, source: BatchSource) -> Path:
    settings = run.config.learner
    return write_checkpoint(
        run.checkpoints_folder,
        version=held.version,
        lineage=held.lineage,
        policy=held.policy,
        tokenizer=held.tokenizer,
        optimizer=held.optimizer,
        settings=step_settings(run),
        progress={"skipped_in_a_row": held.skipped_in_a_row, "skipped": held.skipped},
        keep=Keep(settings.checkpoint.keep_last, settings.loss.kl is not None or settings.policy.lora is not None, settings.checkpoint.keep_every),
        sync=source.sync,
    )


def _tracker(run: Run, held: Held, stop: threading.Event) -> Tracker:
    wandb = run.config.tracking.wandb
    return Tracker(run.metrics_path, run.tensorboard_folder, held.version, None if wandb is None else WandbTracker(wandb, run, held.lineage), stop)


def _leave(run: Run, held: Held, source: BatchSource, publisher: Publisher | GatheringPublisher, stop: threading.Event) -> None:
    """Tells what was published last, and keeps what was trained since the last checkpoint; a buffer that is gone already costs that much redo and no error."""
    publisher.fence()
    try:
        with held.policy.ranks.together():
            _tell(source, publisher)
        if held.saved is None or held.saved.name != name_of(held.version):
            held.saved = _save(run, held, source, stop)
    except (StreamError, RankFailed) as error:
        logger.warning("version=%d saved=%s reason=%s", held.version, held.saved, error)


def _tell(source: BatchSource, publisher: Publisher | GatheringPublisher, evaluations: Evaluations | None = None) -> None:
    """Records the digests of what was written since, and looks at ``evaluations``; here and not in the thread, since a socket belongs to one thread."""
    for manifest in publisher.written():
        note = source.published(manifest.version, manifest.digest)
        if note:
            logger.warning("version=%d digest=%s note=%s", manifest.version, manifest.digest, note)
    if evaluations is not None:
        evaluations.look()
