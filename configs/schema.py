"""The configuration of a run: every key, its type, its bound and its default.

Defaults live here and nowhere else. Models are frozen, refuse unknown keys, and where a thing comes in kinds it is a tagged union (``kind:``).
Counts are ``num_x`` or named by what they count; quantities carry their unit. The string under a key is its meaning (of a section, the
first sentence of its class): ``docs/configuration.md`` and ``rollstream show-config --explain`` are made of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


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
    max_positions: int = Field(default=512, ge=16)
    """Longest sequence in tokens, prompt and turns together."""


class FolderModel(Section):
    """A Hugging Face causal language model in a local folder: config, safetensors, tokenizer with a chat template."""

    kind: Literal["folder"]
    path: str
    """The folder; ``~`` is understood."""


Model = Annotated[TinyModel | FolderModel, Field(discriminator="kind")]


# --- environment --------------------------------------------------------------------------------------------------------------------


class Env(Section):
    """The environment that is trained on. ``kwargs`` go to its constructor."""

    id: str
    """Registered, versioned id, ``namespace/Name-vN``; see ``rollstream envs list``."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor."""


class Warmup(Section):
    """Supervised steps on the environment's scripted demonstrations, before version 0. ``correct`` is the share of demonstrations that are right."""

    steps: int = Field(default=150, ge=1)
    """Supervised optimiser steps."""
    demonstrations_per_step: int = Field(default=48, ge=1)
    """Scripted conversations in each of them."""
    correct: Fraction = 0.4
    """Share of the demonstrations that earn the full reward."""
    learning_rate: Positive = 1e-3
    """AdamW's rate during the warm-up."""


# --- buffer -------------------------------------------------------------------------------------------------------------------------


class Buffer(Section):
    """The stream between actors and learner.

    ``depth``: how many batches may be leased beyond the one being trained; 0 is synchronous, on-policy training. ``max_lag``: no token with a larger lag is
    ever trained. ``degenerate``: what a group whose rewards are all equal does: stay in the denominators (keep), leave the loss (mask), or
    also be replaced by up to ``max_refill`` further groups (refill).
    """

    depth: int = Field(default=1, ge=0)
    """Batches that may be leased beyond the one being trained; 0 is synchronous training."""
    max_lag: int = Field(default=4, ge=0)
    """Largest lag, in versions, of a token that trains; at least ``depth``."""
    degenerate: Literal["keep", "mask", "refill"] = "keep"
    """A group whose rewards are all equal stays in the denominators (keep), leaves the loss (mask), or is also replaced (refill)."""
    max_refill: int = Field(default=4, ge=1)
    """Groups a batch may take beyond ``batch_groups`` to replace degenerate ones; read with refill."""
    endpoint: str = Field(default="ipc", pattern=r"^(ipc|tcp://(127\.0\.0\.1|localhost):\d{1,5})$")
    """Where the buffer listens: ``ipc`` (a Unix socket in a private folder) or ``tcp://127.0.0.1:PORT``."""
    lease_timeout_s: Positive = 60.0
    """Silence of an actor after which its leases are offered to others."""
    max_attempts: int = Field(default=3, ge=1)
    """How often a member is played before its infrastructure or environment failure is recorded as failed."""
    segment_mb: int = Field(default=256, ge=1)
    """Size at which a segment of the log is closed and the next one opened."""
    keep_gb: float | None = Field(default=None, gt=0)
    """Above this size the oldest rows of the stream that no checkpoint can need again are removed; null keeps everything."""


# --- actors -------------------------------------------------------------------------------------------------------------------------


class Sampling(Section):
    """How tokens are drawn while training."""

    temperature: Positive = 1.0
    """Divides the logits before sampling; the learner scores at the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens of this total probability is sampled from; training needs 1."""
    top_k: int = Field(default=0, ge=0)
    """Only the ``top_k`` most probable tokens are sampled from; 0 is all of them, which training needs."""
    max_turn_tokens: int = Field(default=64, ge=1)
    """Most tokens the policy may say in one turn."""
    max_trajectory_tokens: int = Field(default=256, ge=2)
    """Most tokens of a whole episode, prompt and observations included; what would exceed it is truncated."""


class ScriptedSampler(Section):
    """A deterministic double without a model: for tests of everything around the sampler."""

    kind: Literal["scripted"]
    token_delay_s: float = Field(default=0.0, ge=0)
    """Pause before every token."""


class TorchSampler(Section):
    """Continuous batching in the actor's own process. ``on_push``: what generations in flight do when new weights arrive."""

    kind: Literal["torch"] = "torch"
    on_push: Literal["keep", "recompute", "drain"] = "keep"
    """New weights keep the KV cache, recompute it, or wait until running generations are drained."""
    max_batch: int = Field(default=256, ge=1)
    """Most episodes in one forward; further ones wait."""


Sampler = Annotated[TorchSampler | ScriptedSampler, Field(discriminator="kind")]


class Actors(Section):
    """The rollout actors: ``num`` processes with ``slots`` concurrent episodes each."""

    num: int = Field(default=1, ge=1)
    """Actor processes."""
    slots: int = Field(default=96, ge=1)
    """Episodes each of them plays at once."""
    episode_timeout_s: Positive = 300.0
    """Longest time one episode may take, sampling included."""
    max_invalid_share: Fraction = 0.5
    """Above this share of invalid episodes (over the last 100 and more) the run stops with the reasons; below 1 also when the first 16 of an actor all fail."""
    sampler: Sampler = TorchSampler()
    sampling: Sampling = Sampling()
    device: str = "cpu"
    """Where the sampler computes: ``cpu``, ``cuda``, ``cuda:N``."""
    num_threads: int = Field(default=1, ge=1)
    """PyTorch threads of each actor."""


# --- learner ------------------------------------------------------------------------------------------------------------------------


class Correction(Section):
    """One factor of the correction weight (IS weight): a statistic of rho at ``level``, treated by ``mode`` with bounds ``low`` and ``high``."""

    level: str
    """Statistic of rho: token, sequence, geometric, min, max, or one you registered."""
    mode: str
    """What is done with it: truncate, clip, mask, reject, or one you registered."""
    low: float | None = None
    """Lower bound on the ratio trainer / sampler."""
    high: float | None = None
    """Upper bound on the ratio trainer / sampler."""


class Overlong(Section):
    """Soft overlong penalty (DAPO): 0 up to ``max_len - buffer``, linear to ``-factor`` at ``max_len``.

    A file may leave both lengths out: they resolve to ``actors.sampling.max_trajectory_tokens`` and a fifth of ``max_len``.
    """

    max_len: int = Field(ge=1)
    """Sampled tokens at which the penalty is full."""
    buffer: int = Field(ge=1)
    """Over how many tokens before that it grows."""
    factor: Positive = 1.0
    """The full penalty, subtracted from the reward."""


class Advantage(Section):
    """How rewards become advantages."""

    mode: str = "grpo"
    """mean, grpo, rloo, opo, batch_std, none, or one you registered."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the deviation that grpo and batch_std divide by."""
    ddof: int = Field(default=1, ge=0, le=1)
    """Degrees of freedom taken off in that deviation: 1 sample, 0 population."""
    std_over: Literal["all", "live"] = "all"
    """batch_std over all trajectories, or only those of groups that are not degenerate."""
    truncated: Literal["keep", "mask", "exclude"] = "keep"
    """Truncated episodes train (keep), only shape the baseline (mask), or do neither (exclude)."""
    overlong: Overlong | None = None
    """Soft penalty for long answers; null is none."""


class Loss(Section):
    """The loss and everything that enters it; names as in the algorithms page of the docs. Keys left out come from the preset, then from here.

    ``agg_length``, where ``agg: seq_mean_fixed`` needs it and a file leaves it out, resolves to ``actors.sampling.max_trajectory_tokens``.
    """

    kind: str = "ppo"
    """Name of the per-token loss; see the algorithms page, or one you registered."""
    old: Literal["prox", "mu", "cur"] = "prox"
    """Anchor of the ratio r: weights at the start of the update (prox), the policy that sampled (mu), the live one (cur)."""
    eps_low: float = Field(default=0.2, ge=0)
    """Width of the clip below 1 (an offset of the log ratio in gmpo)."""
    eps_high: float = Field(default=0.2, ge=0)
    """Width of the clip above 1 (an offset of the log ratio in gmpo)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Cap on the ratio where the advantage is negative; null is none."""
    delta: Positive = 0.1
    """Radius of the trust region of dppo_tv and dppo_kl."""
    is_cap: float | None = Field(default=None, gt=0)
    """Cap on the frozen weight of the trust-region losses; null is none."""
    tau_pos: Positive = 1.0
    """Steepness of sapo where the advantage is positive."""
    tau_neg: Positive = 1.05
    """Steepness of sapo elsewhere."""
    opsm_delta: float | None = None
    """Off-policy sequence mask: rows with negative advantage and mean log(mu / pi) above this get weight 0; null is off."""
    mu_sq_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the squared log ratio to the policy that sampled."""
    dro_beta: float = Field(default=0.0, ge=0)
    """Coefficient of the squared log ratio in dro and dro_seq."""
    m2_threshold: Positive = 0.04
    """Bound of m2po on the mean squared log ratio of the tokens it may drop."""
    m2_directional: bool = True
    """m2po may drop only tokens that already moved the way their advantage points."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    kl: Literal["k1", "k2", "k3", "abs"] | None = None
    """Estimator of the KL term towards version 0; null is none."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL term."""
    kl_is: bool = False
    """Multiply the KL term by the ratio to the policy that sampled."""
    agg: str = "token_mean"
    """How token losses become one number; see the algorithms page."""
    agg_length: float | None = Field(default=None, gt=0)
    """Constant row length of ``seq_mean_fixed``."""
    agg_const: float | None = Field(default=None, gt=0)
    """Divisor of ``fixed``."""
    correction: tuple[Correction, ...] = ()
    """Rules whose factors multiply to the correction weight; empty is weight 1."""
    correction_unit: Literal["row", "trajectory"] = "row"
    """Statistics beyond a token are over a row, or over all rows of a trajectory."""
    self_normalise: bool = False
    """Divide the correction weight by its mean over the batch."""
    nonfinite: Literal["raise", "drop"] = "raise"
    """A number that is not finite refuses the batch (raise), or its token leaves the loss (drop)."""


class Optimizer(Section):
    """AdamW with linear warm-up and a schedule; ``max_grad_norm`` clips the global norm."""

    learning_rate: Positive = 1e-6
    """Full rate of AdamW, after the warm-up."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the denominator of the update."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; norms, biases and embeddings do not decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling to 0 at the last version."""
    warmup_versions: int = Field(default=0, ge=0)
    """Versions over which the rate rises linearly."""
    max_grad_norm: Positive = 1.0
    """Global gradient norm above which gradients are scaled down."""


class PolicySettings(Section):
    """How the policy computes. ``activation_checkpointing`` keeps each layer's input only and computes the rest again: less memory, a third more time.

    ``compute_dtype: bfloat16`` runs the body's matrix products in bfloat16; weights, optimiser and log-probabilities stay float32.
    """

    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the matrix products of the model's body."""


class Updates(Section):
    """How many optimiser updates one batch gives: ``mini_batches`` shares of whole groups, gone through ``epochs`` times. Together they make one version."""

    mini_batches: int = Field(default=1, ge=1)
    """Shares of whole groups that a batch is cut into, one optimiser update each."""
    epochs: int = Field(default=1, ge=1)
    """How often a batch is gone through."""


class Checkpoint(Section):
    """When checkpoints are written and which stay. Version 0 and the last version are always written.

    The newest ``keep_last`` stay, and with ``keep_every`` for good those whose version is a multiple of it: a multiple of ``every`` itself.
    """

    every: int = Field(default=50, ge=1)
    """Versions between two checkpoints."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest stay on disk."""
    keep_every: int | None = Field(default=None, ge=1)
    """Multiples of this many versions stay for good; null keeps only the newest."""


class Alarms(Section):
    """Bounds on the drift between the policy that sampled and the one that learns."""

    ess_warn: Fraction = 0.5
    """Effective sample size, as a share, below which a warning is logged."""
    ess_stop: Fraction = 0.2
    """Effective sample size, as a share, below which the run stops before the step."""
    kl_warn: Positive = 0.05
    """Mean k3 estimate of a KL divergence per token above which a warning is logged."""
    trust_masked_warn: Fraction = 0.05
    """Share of tokens outside the trust region above which a warning is logged."""
    max_skipped: int = Field(default=5, ge=0)
    """Consecutive steps skipped for a non-finite gradient before the run stops."""


class Learner(Section):
    """The learner. ``versions`` batches of ``batch_groups`` groups with ``group_size`` trajectories each are trained."""

    versions: int = Field(ge=1)
    """Policy versions to train: optimiser steps, skipped ones included."""
    batch_groups: int = Field(ge=1)
    """Groups per batch."""
    group_size: int = Field(ge=1)
    """Trajectories per group, all from one task and seed."""
    preset: Literal["async", "grpo", "gspo", "cispo", "dr_grpo", "dapo"] = "async"
    """Values laid under those of the file; see the algorithms page."""
    loss: Loss = Loss()
    advantage: Advantage = Advantage()
    optimizer: Optimizer = Optimizer()
    updates: Updates = Updates()
    policy: PolicySettings = PolicySettings()
    checkpoint: Checkpoint = Checkpoint()
    alarms: Alarms = Alarms()
    tokens_per_micro_batch: int = Field(default=16384, ge=1)
    """Tokens packed into one forward and backward; at least ``max_trajectory_tokens``."""
    device: str = "cpu"
    """Where the learner computes: ``cpu``, ``cuda``, ``cuda:N``."""
    num_threads: int = Field(default=1, ge=1)
    """PyTorch threads of the learner; a resume that is exact needs the same number."""


# --- run ----------------------------------------------------------------------------------------------------------------------------


class LocalLauncher(Section):
    """Starts the roles as processes on this machine; a dead actor or buffer is restarted up to ``max_restarts`` times."""

    kind: Literal["local"] = "local"
    max_restarts: int = Field(default=10, ge=0)
    """Deaths of actors and buffer, together, that are answered by a restart."""


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
    env: Env
    warmup: Warmup | None = None
    """Supervised warm-up before version 0; null is none."""
    buffer: Buffer = Buffer()
    actors: Actors = Actors()
    learner: Learner
    launcher: LocalLauncher = LocalLauncher()
