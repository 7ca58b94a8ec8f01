"""The learner's part of the configuration: the loss and everything that enters it, the optimiser, the compute, the alarms; see :mod:`.schema`."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field

from .section import MAX_TOKENS, MAX_VERSIONS, Decay, Device, Fraction, Positive, Rate, Section


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

    max_len: int = Field(ge=1, le=MAX_TOKENS)
    """Sampled tokens at which the penalty is full."""
    buffer: int = Field(ge=1, le=MAX_TOKENS)
    """Over how many tokens before that it grows."""
    factor: Positive = 1.0
    """The full penalty, subtracted from the reward."""


class Advantage(Section):
    """How rewards become advantages."""

    mode: str = "grpo"
    """Per trajectory: mean, grpo, rloo, opo, batch_std, none; per token: gae, vtrace (both need learner.value), whiten; or one you registered."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the deviation that grpo and batch_std divide by."""
    ddof: int = Field(default=1, ge=0, le=1)
    """Degrees of freedom taken off in that deviation: 1 sample, 0 population."""
    std_over: Literal["all", "live"] = "all"
    """batch_std over all trajectories, or only those of groups that are not degenerate."""
    gamma: Fraction = 1.0
    """Discount per token that the policy sampled: of gae, vtrace, whiten, and of a KL term in the reward."""
    lam: Fraction = 1.0
    """Lambda of gae and vtrace: 1 looks to the end of the trajectory, 0 one token ahead."""
    rho_bar: Positive = 1.0
    """Cap of vtrace on the ratio to the policy that sampled, in targets and advantages: it decides whose value is learned."""
    c_bar: Positive = 1.0
    """Cap of vtrace on the ratio along the trace: it decides how fast values are learned."""
    bootstrap: bool = True
    """What would follow an episode that was cut is worth its value to gae and vtrace; false: nothing. With gamma 1 a task without end has no finite value."""
    whiten: bool = False
    """Give the advantages of the tokens that train mean 0 and deviation 1 over the batch; mode whiten always does."""
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
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term goes: added to each token's loss, or taken off each token's reward under the weights at the start of the update."""
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
    """A log-probability that is not finite refuses the batch (raise), or its token leaves the loss (drop; not with GAE, V-trace, KL in the reward)."""


class Value(Section):
    """A value head on the policy's body, for advantages that need values. It learns by regression on the returns, with the policy's aggregation.

    Its gradient reaches the body too, times ``coef``, but for the first ``warmup_versions``, in which it learns alone and the policy stays as it is.
    """

    coef: Positive = 0.5
    """Coefficient of the value loss beside the policy's."""
    learning_rate: Positive = 1e-4
    """Full rate of AdamW on the head; it follows the schedule of learner.optimizer."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from where it stood at the start of the batch before its gradient is cut; null is no bound."""
    warmup_versions: int = Field(default=0, ge=0, le=MAX_VERSIONS)
    """Versions in which only the head learns."""


class Optimizer(Section):
    """AdamW with linear warm-up and a schedule; ``max_grad_norm`` clips the global norm."""

    learning_rate: Rate = 1e-6
    """Full rate of AdamW, after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the denominator of the update."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; norms, biases and embeddings do not decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling to 0 at the last version."""
    warmup_versions: int = Field(default=0, ge=0, le=MAX_VERSIONS)
    """Versions over which the rate rises linearly."""
    max_grad_norm: Positive = 1.0
    """Global gradient norm above which gradients are scaled down."""


class Lora(Section):
    """Low-rank adapters (LoRA): only they learn, optimiser state and checkpoints are small, and samplers get the merged weights."""

    rank: int = Field(default=16, ge=1, le=4096)
    """Rank of the update of each adapted matrix."""
    alpha: Positive = 32.0
    """Scale of the update, divided by the rank."""
    target_modules: tuple[str, ...] = ()
    """Ends of the names of the linear layers to adapt, such as q_proj; empty is all but the output's."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's input dropped where gradients are computed; scores of the whole batch are without."""


class PolicySettings(Section):
    """How the policy computes. ``activation_checkpointing`` keeps each layer's input only and computes the rest again: less memory, a third more time.

    ``compute_dtype: bfloat16`` runs the body's matrix products in bfloat16; weights, optimiser and log-probabilities stay float32.
    """

    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the matrix products of the model's body."""
    lora: Lora | None = None
    """Train low-rank adapters instead of the weights; null trains the weights."""


class SinglePolicy(PolicySettings):
    """The whole policy in the learner's one process."""

    kind: Literal["single"] = "single"


class FsdpPolicy(PolicySettings):
    """The policy sharded over ``ranks`` processes with PyTorch's FSDP2: each computes its own rows and holds its share of weights and optimiser.

    With ``reshard_after_forward`` a layer's weights are gathered anew for the backward pass, without it they stay from the first micro-batch of a step to
    the last. ``reduce: step`` adds up whole gradients on every rank and exchanges them once; ``reduce: micro_batch`` exchanges each time and keeps shares.
    """

    kind: Literal["fsdp"]
    ranks: int = Field(ge=1, le=64)
    """Processes the policy is sharded over: on this machine, on a Ray cluster, or started by hand anywhere."""
    reshard_after_forward: bool = True
    """Gather a layer's weights again for its backward pass: less memory, more traffic."""
    reduce: Literal["step", "micro_batch"] = "step"
    """Exchange gradients once per optimiser step, or after every micro-batch: less memory, more traffic."""
    start_timeout_s: Positive = 120.0
    """How long the ranks wait for one another at the start."""


def _with_kind(value: object) -> object:
    """Settings that name no kind are of the default one."""
    return {"kind": "single", **cast("dict[str, object]", value)} if isinstance(value, dict) and "kind" not in value else value


Policy = Annotated[SinglePolicy | FsdpPolicy, Field(discriminator="kind"), BeforeValidator(_with_kind)]


class Updates(Section):
    """How many optimiser updates one batch gives: ``mini_batches`` shares of whole groups, gone through ``epochs`` times. Together they make one version."""

    mini_batches: int = Field(default=1, ge=1, le=65_536)
    """Shares of whole groups that a batch is cut into, one optimiser update each."""
    epochs: int = Field(default=1, ge=1, le=1000)
    """How often a batch is gone through."""


class Checkpoint(Section):
    """When checkpoints are written and which stay. Version 0 and the last version are always written.

    The newest ``keep_last`` stay, and with ``keep_every`` for good those whose version is a multiple of it: a multiple of ``every`` itself.
    """

    every: int = Field(default=50, ge=1, le=MAX_VERSIONS)
    """Versions between two checkpoints."""
    keep_last: int = Field(default=2, ge=1, le=MAX_VERSIONS)
    """How many of the newest stay on disk."""
    keep_every: int | None = Field(default=None, ge=1, le=MAX_VERSIONS)
    """Multiples of this many versions stay for good; null keeps only the newest."""


class Alarms(Section):
    """Figures of a batch beyond which a warning is logged (``*_warn``), or the run stops before a parameter changes (``*_stop``). null is off."""

    ess_warn: Fraction | None = 0.5
    """Smallest effective sample size, as a share, of old, correction and drift ratios without a warning."""
    ess_stop: Fraction | None = 0.2
    """The same, below which the run stops."""
    kl_warn: Positive | None = 0.05
    """Largest k3 estimate of the divergence per token, of old, sampling and drift, without a warning."""
    kl_stop: Positive | None = None
    """The same, above which the run stops."""
    trust_masked_warn: Fraction | None = 0.05
    """Largest share of tokens outside the trust region without a warning."""
    trust_masked_stop: Fraction | None = None
    """The same, above which the run stops."""
    invalid_warn: Fraction | None = 0.1
    """Largest share of failed episodes in a batch without a warning."""
    invalid_stop: Fraction | None = None
    """The same, above which the run stops; ``actors.max_invalid_share`` judges the latest episodes of all actors instead."""
    max_skipped: int = Field(default=5, ge=0, le=MAX_VERSIONS)
    """Consecutive steps skipped, for a non-finite gradient or for want of anything to train on (equal rewards, say), before the run stops."""


class Learner(Section):
    """The learner. ``versions`` batches of ``batch_groups`` groups with ``group_size`` trajectories each are trained."""

    versions: int = Field(ge=1, le=MAX_VERSIONS)
    """Policy versions to train: optimiser steps, skipped ones included."""
    batch_groups: int = Field(ge=1, le=65_536)
    """Groups per batch."""
    group_size: int = Field(ge=1, le=32_767)
    """Trajectories per group, all from one task and seed."""
    preset: Literal["async", "grpo", "gspo", "cispo", "dr_grpo", "dapo", "ppo", "impala"] = "async"
    """Values laid under those of the file; see the algorithms page."""
    loss: Loss = Loss()
    advantage: Advantage = Advantage()
    value: Value | None = None
    """A learned value head, which advantage modes gae and vtrace need; null is none."""
    optimizer: Optimizer = Optimizer()
    updates: Updates = Updates()
    policy: Policy = SinglePolicy()
    checkpoint: Checkpoint = Checkpoint()
    alarms: Alarms = Alarms()
    tokens_per_micro_batch: int = Field(default=16384, ge=1, le=100_000_000)
    """Tokens packed into one forward and backward; at least ``max_trajectory_tokens``."""
    device: Device = "cpu"
    """Where the learner computes: ``cpu``, ``cuda``, ``cuda:N``."""
    peak_tflops: float | None = Field(default=None, gt=0, le=1_000_000)
    """What the device can do, for ``learner/mfu``; null takes the maker's figure for known GPUs and measures anything else at start."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """PyTorch threads of the learner; a resume that is exact needs the same number."""
