"""The configuration of a run: every key, its type, its bound and its default.

Defaults live here and nowhere else. Models are frozen, refuse unknown keys, and where a thing comes in kinds it is a tagged union (``kind:``).
Counts are ``num_x`` or named by what they count; quantities carry their unit. The string under a key is its meaning (of a section, the
first sentence of its class): ``docs/configuration.md`` and ``rollstream show-config --explain`` are made of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from .learner_schema import Learner
from .section import MAX_TOKENS, Device, Fraction, Positive, Rate, Seconds, Section

# --- model --------------------------------------------------------------------------------------------------------------------------


class TinyModel(Section):
    """A small Qwen3-architecture policy with a byte-level tokenizer, built on the spot from the run's seed. Nothing is downloaded."""

    kind: Literal["tiny"] = "tiny"
    num_layers: int = Field(default=2, ge=1, le=64)
    """Transformer layers."""
    hidden_size: int = Field(default=64, ge=32, le=8192, multiple_of=32)
    """Width of the residual stream."""
    num_heads: int = Field(default=4, ge=1, le=128)
    """Query heads per layer; a multiple of ``num_kv_heads``."""
    num_kv_heads: int = Field(default=2, ge=1, le=128)
    """Key-value heads per layer."""
    max_positions: int = Field(default=512, ge=16, le=MAX_TOKENS)
    """Longest sequence in tokens, prompt and turns together."""


class FolderModel(Section):
    """A Hugging Face causal language model in a local folder: config, safetensors, tokenizer with a chat template."""

    kind: Literal["folder"]
    path: str
    """The folder; ``~`` is understood."""


Model = Annotated[TinyModel | FolderModel, Field(discriminator="kind")]


# --- environment --------------------------------------------------------------------------------------------------------------------


class Env(Section):
    """An environment that is trained on: one, or a list of several, each of which gets its share of the groups, to within one group at any time."""

    id: str
    """Registered, versioned id, ``namespace/Name-vN``; see ``rollstream envs list``."""
    kwargs: dict[str, Any] = Field(default={})
    """Arguments of the environment's constructor."""
    weight: Positive = 1.0
    """Its share of the groups, relative to the weights of the others; read where there are several."""


def _one_or_several(value: Any) -> str:
    return "several" if isinstance(value, list | tuple) else "one"


Envs = Annotated[
    Annotated[Env, Tag("one")] | Annotated[tuple[Env, ...], Tag("several"), Field(min_length=1)],
    Discriminator(_one_or_several),
]


class Warmup(Section):
    """Supervised steps on scripted demonstrations of the environments that have them, before version 0. ``correct`` is the share that are right."""

    steps: int = Field(default=150, ge=1, le=1_000_000)
    """Supervised optimiser steps."""
    demonstrations_per_step: int = Field(default=48, ge=1, le=65_536)
    """Scripted conversations in each of them."""
    correct: Fraction = 0.4
    """Share of the demonstrations that earn the full reward."""
    learning_rate: Rate = 1e-3
    """AdamW's rate during the warm-up."""


# --- buffer -------------------------------------------------------------------------------------------------------------------------


class Buffer(Section):
    """The stream between actors and learner.

    ``depth``: how many batches may be leased beyond the one being trained; 0 is synchronous, on-policy training. ``max_lag``: no token with a larger lag is
    ever trained. ``degenerate``: what a group whose rewards are all equal does: stay in the denominators (keep), leave the loss (mask), or
    also be replaced by up to ``max_refill`` further groups (refill).

    A failed member has two budgets, one per kind of failure. ``group_deadline_s`` and ``min_group`` say when a group no longer waits for its missing members.
    """

    depth: int = Field(default=1, ge=0, le=10_000)
    """Batches that may be leased beyond the one being trained; 0 is synchronous training."""
    max_lag: int = Field(default=4, ge=0, le=10_000)
    """Largest lag, in versions, of a token that trains; at least ``depth``."""
    degenerate: Literal["keep", "mask", "refill"] = "keep"
    """A group whose rewards are all equal stays in the denominators (keep), leaves the loss (mask), or is also replaced (refill)."""
    max_refill: int = Field(default=4, ge=1, le=1_000_000)
    """Groups a batch may take beyond ``batch_groups`` to replace degenerate ones, leased as those become known. Read with refill."""
    endpoint: str = Field(default="ipc", pattern=r"^(ipc|tcp://(localhost|[\d.]+|\[[\da-fA-F:.]+\]):\d{1,5})$")
    """Where the buffer listens: ``ipc`` (a private Unix socket) or ``tcp://ADDRESS:PORT``; beyond loopback only who has the run's keys is let in."""
    stall_timeout_s: Seconds = 1800.0
    """Longest wait of the learner for its batch, or of an actor for weights, without any progress; then the run ends, naming whom it waited for."""
    compression: Literal["none", "lz4", "zstd"] = "none"
    """Of rows on the wire and in the log; a core compresses about 0.6 GB/s with lz4, so it is for networks and full disks."""
    lease_timeout_s: float = Field(default=60.0, ge=1.5, le=2_592_000)
    """Silence of an actor, which speaks every second, after which its leases are offered to others."""
    max_infra_attempts: int = Field(default=3, ge=1, le=1000)
    """How often a member may fail for the world around it (infrastructure) until that is its outcome; before, it is played again."""
    max_env_attempts: int = Field(default=2, ge=1, le=1000)
    """How often a member may fail for its environment's own code until that is its outcome; before, it is played again."""
    group_deadline_s: Seconds | None = None
    """Seconds from its first lease after which a group is closed with the members it has; null waits for all."""
    min_group: int = Field(default=2, ge=1, le=10_000)
    """Scored members a group needs at its deadline; with fewer it is dropped and another one is leased. Read with ``group_deadline_s``."""
    score_timeout_s: Seconds = 600.0
    """Seconds a group whose members are all played waits for scores that come later; then those without one are invalid."""
    segment_mb: int = Field(default=256, ge=1, le=65_536)
    """Size at which a segment of the log is closed and the next one opened."""
    keep_gb: float | None = Field(default=None, gt=0)
    """Above this size the oldest rows of the stream that no checkpoint can need again go, with images and amendments; null keeps everything."""


# --- weights ------------------------------------------------------------------------------------------------------------------------


class Weights(Section):
    """How each version of the policy reaches the actors."""

    channel: Literal["shm", "files"] = "shm"
    """Shared memory (actors on the learner's machine), or files in the run folder (every machine that shares its file system)."""


# --- actors -------------------------------------------------------------------------------------------------------------------------


class Sampling(Section):
    """How tokens are drawn while training."""

    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Divides the logits before sampling; the learner scores at the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens of this total probability is sampled from; training needs 1."""
    top_k: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """Only the ``top_k`` most probable tokens are sampled from; 0 is all of them, which training needs."""
    max_turn_tokens: int = Field(default=64, ge=1, le=MAX_TOKENS)
    """Most tokens the policy may say in one turn."""
    max_trajectory_tokens: int = Field(default=256, ge=2, le=MAX_TOKENS)
    """Most tokens of a whole episode, prompt and observations included; what would exceed it is truncated."""


class ScriptedSampler(Section):
    """A deterministic double without a model: for tests of everything around the sampler."""

    kind: Literal["scripted"]
    token_delay_s: float = Field(default=0.0, ge=0, le=3600)
    """Pause before every token."""


class TorchSampler(Section):
    """Continuous batching in the actor's own process. ``on_push``: what generations in flight do when new weights arrive."""

    kind: Literal["torch"] = "torch"
    on_push: Literal["keep", "recompute", "drain"] = "keep"
    """New weights keep the KV cache, recompute it, or wait until running generations are drained."""
    max_batch: int = Field(default=256, ge=1, le=65_536)
    """Most episodes in one forward; further ones wait."""


Sampler = Annotated[TorchSampler | ScriptedSampler, Field(discriminator="kind")]


class Actors(Section):
    """The rollout actors: ``num`` processes with ``slots`` concurrent episodes each."""

    num: int = Field(default=1, ge=1, le=10_000)
    """Actor processes."""
    slots: int = Field(default=96, ge=1, le=65_536)
    """Episodes each of them plays at once."""
    episode_timeout_s: Seconds = 300.0
    """Longest time one episode may take, sampling included."""
    max_invalid_share: Fraction = 0.5
    """Above this share of invalid episodes (over the last 100 and more) the run stops with the reasons; below 1 also when the first 16 of an actor all fail."""
    sampler: Sampler = TorchSampler()
    sampling: Sampling = Sampling()
    device: Device = "cpu"
    """Where the sampler computes: ``cpu``, ``cuda``, ``cuda:N``."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """PyTorch threads of each actor."""


# --- evaluation ---------------------------------------------------------------------------------------------------------------------


class EvaluationSampling(Section):
    """How tokens are drawn while evaluating; the training's settings have no say in it."""

    temperature: float = Field(default=1.0, ge=0, le=100)
    """Divides the logits before sampling; 0 always takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens of this total probability is sampled from."""
    top_k: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """Only the ``top_k`` most probable tokens are sampled from; 0 is all of them."""
    max_turn_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Most tokens the policy may say in one turn; null is ``actors.sampling.max_turn_tokens``."""
    max_trajectory_tokens: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    """Most tokens of a whole episode; null is ``actors.sampling.max_trajectory_tokens``."""


class EvaluatedEnv(Section):
    """An environment that is evaluated on, where that is another than those trained on, or the same with other arguments."""

    id: str
    """Registered, versioned id, ``namespace/Name-vN``; see ``rollstream envs list``."""
    kwargs: dict[str, Any] = Field(default={})
    """Arguments of the environment's constructor, such as those that choose its test set."""


class Evaluation(Section):
    """Scores versions of the policy on tasks of their own while training goes on.

    Each evaluation is pinned to one version: evaluators, processes beside the actors, play it with exactly those weights, which the learner keeps until it is
    done. Training never waits for it: a version that finds no room to be kept is reported as skipped.
    """

    every: int = Field(default=20, ge=1, le=1_000_000_000)
    """Version 0, the multiples of this and the last version are evaluated."""
    tasks: int = Field(default=64, ge=1, le=1_000_000)
    """Tasks of an evaluation, per environment: the same ones for every version."""
    samples: int = Field(default=4, ge=1, le=32767)
    """Trajectories per task."""
    k: tuple[Annotated[int, Field(ge=1, le=32767)], ...] = (1,)
    """The k of every pass@k that is reported; none is larger than ``samples``."""
    success_at: float | None = None
    """Reward from which on a trajectory counts as a success; null asks the environment's metric ``success``."""
    envs: tuple[EvaluatedEnv, ...] = ()
    """Environments to evaluate on, ``tasks`` of each; none means those that are trained on, with seeds and task numbers that training never uses."""
    first_task: int = Field(default=1_000_000_000, ge=0, le=10**18)
    """``task_index`` of the first task; the others follow. Environments with ``num_tasks`` take it modulo that."""
    sampling: EvaluationSampling = EvaluationSampling()
    num: int = Field(default=1, ge=1, le=1000)
    """Evaluator processes."""
    slots: int = Field(default=64, ge=1, le=65_536)
    """Episodes each of them plays at once."""
    device: Device | None = None
    """Where the evaluators' samplers compute; null is ``actors.device``."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """PyTorch threads of each evaluator; they run at low priority."""
    retain: int = Field(default=1, ge=1, le=64)
    """Versions kept in shared memory for their evaluations at once; a version that finds no room is skipped."""
    wait_s: Seconds = 120.0
    """How long a run that has trained its last version waits for evaluations that are still open."""

    def is_due(self, version: int, versions: int) -> bool:
        """Whether ``version`` is evaluated in a run of ``versions``."""
        return version % self.every == 0 or version == versions


# --- run ----------------------------------------------------------------------------------------------------------------------------


class LocalLauncher(Section):
    """Starts the roles as processes on this machine; a dead actor, evaluator or buffer is restarted up to ``max_restarts`` times."""

    kind: Literal["local"] = "local"
    max_restarts: int = Field(default=10, ge=0, le=1_000_000)
    """Deaths of an actor, an evaluator or the buffer, each, that are answered by a restart."""


class Resources(Section):
    """What one process of a role takes of its node, as Ray counts: room for it is kept, its use is not limited."""

    cpus: float = Field(default=1.0, ge=0, le=100_000)
    """CPUs."""
    gpus: float = Field(default=0.0, ge=0, le=1_000)
    """GPUs; a share such as 0.5 lets roles share one. With 0 the process sees none."""
    custom: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Resources that the nodes were started with (``ray start --resources``), by name."""


class RayLauncher(Section):
    """Places the roles on a Ray cluster in one placement group; what dies is started again, elsewhere where its node is gone."""

    kind: Literal["ray"]
    address: str | None = Field(default=None, pattern=r"^(auto|[\w.-]+:\d{1,5}|\[[\da-fA-F:.]+\]:\d{1,5})$")
    """The running cluster: ``auto`` (this machine's) or ``HOST:PORT``; null starts Ray on this machine for the run alone."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Few nodes (PACK) or many (SPREAD); strictly: one node for all, one for each process."""
    placement_timeout_s: Seconds = 120.0
    """How long the roles may wait for room before the run is refused."""
    buffer: Resources = Resources()
    learner: Resources = Resources()
    actor: Resources = Resources()
    evaluator: Resources = Resources()
    max_restarts: int = Field(default=10, ge=0, le=1_000_000)
    """Deaths of an actor, an evaluator or the buffer, each, that are answered by a restart; a lost node counts as one of each of its roles."""


def _kind_of(value: Any) -> str:
    """The kind a launcher says it is; local where it says none."""
    found = cast("dict[str, Any]", value).get("kind", "local") if isinstance(value, dict) else getattr(value, "kind", "local")
    return str(found)


Launcher = Annotated[
    Annotated[LocalLauncher, Tag("local")] | Annotated[RayLauncher, Tag("ray")],
    Discriminator(_kind_of, custom_error_type="launcher_kind", custom_error_message="kind must be local or ray"),
]


class Wandb(Section):
    """Weights & Biases gets the rows too, under the same names; needs the extra ``wandb``. A run keeps its id there when it is resumed."""

    project: str = Field(default="rollstream", min_length=1, max_length=128)
    """Project the run is filed under."""
    entity: str | None = Field(default=None, min_length=1, max_length=128)
    """User or team it belongs to; null is the account's default."""
    mode: Literal["offline", "online"] = "offline"
    """offline writes below ``runs/NAME/wandb`` for ``wandb sync``; online sends rows while the run goes on."""


class Tracking(Section):
    """Where the rows of metrics go beside ``metrics.jsonl`` and TensorBoard."""

    wandb: Wandb | None = None
    """Weights & Biases; null is none."""


class Config(Section):
    """One run. ``imports`` are modules or files that register environments; they are imported in every role."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the run and of its folder."""
    folder: str = Field(default="runs", min_length=1, max_length=4000, pattern=r"^[^\x00]+$")
    """Where run folders are made."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of everything random: model, tasks, sampling."""
    imports: tuple[str, ...] = ()
    """Modules, or ``.py`` files relative to the working folder, that register environments and losses."""
    model: Model = TinyModel()
    env: Envs
    warmup: Warmup | None = None
    """Supervised warm-up before version 0; null is none."""
    buffer: Buffer = Buffer()
    weights: Weights = Weights()
    actors: Actors = Actors()
    learner: Learner
    evaluation: Evaluation | None = None
    """Evaluation while training goes on; null is none."""
    launcher: Launcher = LocalLauncher()
    tracking: Tracking = Tracking()

    @property
    def envs(self) -> tuple[Env, ...]:
        """The environments, however many there are."""
        return (self.env,) if isinstance(self.env, Env) else self.env

    def evaluated_envs(self) -> dict[str, dict[str, Any]]:
        """The environments that evaluations play, by id, with the arguments of their constructors."""
        given = self.evaluation.envs if self.evaluation is not None else ()
        return {env.id: env.kwargs for env in given or self.envs}

    def evaluators(self) -> Actors:
        """What an evaluator does where an actor reads ``actors``: the actors' settings with those that ``evaluation`` gives instead."""
        evaluation, actors = self.evaluation, self.actors
        assert evaluation is not None
        lengths = {name: getattr(evaluation.sampling, name) or getattr(actors.sampling, name) for name in ("max_turn_tokens", "max_trajectory_tokens")}
        own = {name: getattr(evaluation, name) for name in ("num", "slots", "num_threads")}
        sampling = evaluation.sampling.model_copy(update=lengths)
        return actors.model_copy(update={**own, "device": evaluation.device or actors.device, "sampling": sampling})
