"""The configuration of a run: every key, its type, its bound and its default.

Defaults live here and nowhere else. Models are frozen, refuse unknown keys, and where a thing comes in kinds it is a tagged union (``kind:``).
Counts are ``num_x`` or named by what they count; quantities carry their unit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# --- model --------------------------------------------------------------------------------------------------------------------------


class TinyModel(Section):
    """A small Qwen3-architecture policy with a byte-level tokenizer, built on the spot from the run's seed. Nothing is downloaded."""

    kind: Literal["tiny"] = "tiny"
    num_layers: int = Field(default=2, ge=1, le=64)
    hidden_size: int = Field(default=64, ge=32, le=8192, multiple_of=32)
    num_heads: int = Field(default=4, ge=1, le=128)
    num_kv_heads: int = Field(default=2, ge=1, le=128)
    max_positions: int = Field(default=512, ge=16)


class FolderModel(Section):
    """A Hugging Face causal language model in a local folder: config, safetensors, tokenizer with a chat template."""

    kind: Literal["folder"]
    path: str


Model = Annotated[TinyModel | FolderModel, Field(discriminator="kind")]


# --- environment --------------------------------------------------------------------------------------------------------------------


class Env(Section):
    """The environment that is trained on. ``kwargs`` go to its constructor."""

    id: str
    kwargs: dict[str, Any] = {}


class Warmup(Section):
    """Supervised steps on the environment's scripted demonstrations, before version 0. ``correct`` is the share of demonstrations that are right."""

    steps: int = Field(default=150, ge=1)
    demonstrations_per_step: int = Field(default=48, ge=1)
    correct: Fraction = 0.4
    learning_rate: Positive = 1e-3


# --- buffer -------------------------------------------------------------------------------------------------------------------------


class Buffer(Section):
    """The stream between actors and learner.

    ``depth``: how many batches may be leased beyond the one being trained; 0 is synchronous, on-policy training. ``max_lag``: no token with a larger lag is
    ever trained. ``degenerate``: what a group whose rewards are all equal does: stay in the denominators (keep), leave the loss (mask), or
    also be replaced by up to ``max_refill`` further groups (refill).
    """

    depth: int = Field(default=1, ge=0)
    max_lag: int = Field(default=4, ge=0)
    degenerate: Literal["keep", "mask", "refill"] = "keep"
    max_refill: int = Field(default=4, ge=1)
    endpoint: str = Field(default="ipc", pattern=r"^(ipc|tcp://(127\.0\.0\.1|localhost):\d{1,5})$")
    lease_timeout_s: Positive = 60.0
    max_attempts: int = Field(default=3, ge=1)
    """How often a member is played before its infrastructure or environment failure is recorded as failed."""
    segment_mb: int = Field(default=256, ge=1)


# --- actors -------------------------------------------------------------------------------------------------------------------------


class Sampling(Section):
    """How tokens are drawn while training."""

    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = Field(default=0, ge=0)
    max_turn_tokens: int = Field(default=64, ge=1)
    max_trajectory_tokens: int = Field(default=256, ge=2)


class ScriptedSampler(Section):
    """A deterministic double without a model: for tests of everything around the sampler."""

    kind: Literal["scripted"]
    token_delay_s: float = Field(default=0.0, ge=0)


class TorchSampler(Section):
    """Continuous batching in the actor's own process. ``on_push``: what generations in flight do when new weights arrive."""

    kind: Literal["torch"] = "torch"
    on_push: Literal["keep", "recompute", "drain"] = "keep"
    max_batch: int = Field(default=256, ge=1)


Sampler = Annotated[TorchSampler | ScriptedSampler, Field(discriminator="kind")]


class Actors(Section):
    """The rollout actors: ``num`` processes with ``slots`` concurrent episodes each."""

    num: int = Field(default=1, ge=1)
    slots: int = Field(default=96, ge=1)
    episode_timeout_s: Positive = 300.0
    max_invalid_share: Fraction = 0.5
    """Above this share of invalid episodes (over the last 100 and more) the run stops with the reasons."""
    sampler: Sampler = TorchSampler()
    sampling: Sampling = Sampling()
    device: str = "cpu"
    num_threads: int = Field(default=1, ge=1)


# --- learner ------------------------------------------------------------------------------------------------------------------------


class Correction(Section):
    """One factor of the correction weight (IS weight): a statistic of rho at ``level``, treated by ``mode`` with bounds ``low`` and ``high``."""

    level: str
    mode: str
    low: float | None = None
    high: float | None = None


class Overlong(Section):
    """Soft overlong penalty (DAPO): 0 up to ``max_len - buffer``, linear to ``-factor`` at ``max_len``."""

    max_len: int = Field(ge=1)
    buffer: int = Field(ge=1)
    factor: Positive = 1.0


class Advantage(Section):
    """How rewards become advantages."""

    mode: str = "grpo"
    eps: float = Field(default=1e-6, ge=0)
    ddof: int = Field(default=1, ge=0, le=1)
    std_over: Literal["all", "live"] = "all"
    truncated: Literal["keep", "mask", "exclude"] = "keep"
    overlong: Overlong | None = None


class Loss(Section):
    """The loss and everything that enters it; names as in the algorithms page of the docs. Keys left out come from the preset, then from here."""

    kind: str = "ppo"
    old: Literal["prox", "mu", "cur"] = "prox"
    eps_low: float = Field(default=0.2, ge=0)
    eps_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    delta: Positive = 0.1
    is_cap: float | None = Field(default=None, gt=0)
    tau_pos: Positive = 1.0
    tau_neg: Positive = 1.05
    opsm_delta: float | None = None
    mu_sq_coef: float = Field(default=0.0, ge=0)
    dro_beta: float = Field(default=0.0, ge=0)
    m2_threshold: Positive = 0.04
    m2_directional: bool = True
    entropy_coef: float = 0.0
    kl: Literal["k1", "k2", "k3", "abs"] | None = None
    kl_coef: float = Field(default=0.0, ge=0)
    kl_is: bool = False
    agg: str = "token_mean"
    agg_length: float | None = Field(default=None, gt=0)
    agg_const: float | None = Field(default=None, gt=0)
    correction: tuple[Correction, ...] = ()
    correction_unit: Literal["row", "trajectory"] = "row"
    self_normalise: bool = False
    nonfinite: Literal["raise", "drop"] = "raise"


class Optimizer(Section):
    """AdamW with linear warm-up and a schedule; ``max_grad_norm`` clips the global norm."""

    learning_rate: Positive = 1e-6
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_versions: int = Field(default=0, ge=0)
    max_grad_norm: Positive = 1.0


class Checkpoint(Section):
    """When checkpoints are written and how many stay. Version 0 and the last version are always written; the newest ``keep_last`` stay."""

    every: int = Field(default=50, ge=1)
    keep_last: int = Field(default=2, ge=1)


class Alarms(Section):
    """Bounds on the drift between the policy that sampled and the one that learns."""

    ess_warn: Fraction = 0.5
    ess_stop: Fraction = 0.2
    kl_warn: Positive = 0.05
    trust_masked_warn: Fraction = 0.05
    max_skipped: int = Field(default=5, ge=0)
    """Consecutive steps skipped for a non-finite gradient before the run stops."""


class Learner(Section):
    """The learner. ``versions`` batches of ``batch_groups`` groups with ``group_size`` trajectories each are trained."""

    versions: int = Field(ge=1)
    batch_groups: int = Field(ge=1)
    group_size: int = Field(ge=1)
    preset: Literal["async", "grpo"] = "async"
    loss: Loss = Loss()
    advantage: Advantage = Advantage()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    alarms: Alarms = Alarms()
    tokens_per_micro_batch: int = Field(default=16384, ge=1)
    device: str = "cpu"
    num_threads: int = Field(default=1, ge=1)


# --- run ----------------------------------------------------------------------------------------------------------------------------


class LocalLauncher(Section):
    """Starts the roles as processes on this machine; a dead actor or buffer is restarted up to ``max_restarts`` times."""

    kind: Literal["local"] = "local"
    max_restarts: int = Field(default=10, ge=0)


class Config(Section):
    """One run. ``imports`` are modules or files that register environments; they are imported in every role."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    folder: str = Field(default="runs", min_length=1, max_length=4000, pattern=r"^[^\x00]+$")
    seed: int = Field(default=0, ge=0, lt=2**31)
    imports: tuple[str, ...] = ()
    model: Model = TinyModel()
    env: Env
    warmup: Warmup | None = None
    buffer: Buffer = Buffer()
    actors: Actors = Actors()
    learner: Learner
    launcher: LocalLauncher = LocalLauncher()
