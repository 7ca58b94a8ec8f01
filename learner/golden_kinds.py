"""How each kind of golden case is fed to the functions that training uses. Results are nested lists and numbers under the names of the case's ``expect``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from ..buffer.shaping import overlong_penalty
from ..configs.learner_schema import Advantage, Correction, Loss, Overlong
from ..errors import ConfigError, DataRefused
from .advantages import compute_advantages
from .aggregation import row_weights
from .logprobs import distribution_logprobs, token_logprobs
from .masks import as_mask, response_mask
from .objective import Objective
from .plan import Plan, Rows, StaleLimit, plan
from .returns import gae, kl_reward, vtrace, whiten
from .staleness import Level, drop_stale
from .stats import Stats
from .tokens import Tokens

Case = dict[str, Any]
Settings = TypeVar("Settings", bound=BaseModel)
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

_LOSS_KEYS = {"loss": "kind", "length": "agg_length", "const": "agg_const"}
_OTHER_KEYS = ("advantage", "stale", "overlong", "ranks")
_DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Grid:
    """A padded batch ``[B, T]`` of a loss, pipeline or split case: the mask after filters, and everything per token."""

    mask: Bool
    adv: Float64
    agg: Float64
    row_trajectory: npt.NDArray[np.int64]
    logprobs: dict[str, Float64]
    entropy: Float64 | None


def number(value: object) -> float:
    """A number of the file; nan, inf and -inf are strings there."""
    return float(value)  # type: ignore[arg-type]


def array(values: object, name: str) -> Float64:
    """A nested list of the file as float64.

    Raises :class:`DataRefused`: its rows differ in length.
    """

    def convert(item: object) -> object:
        return [convert(each) for each in item] if isinstance(item, list) else number(item)

    try:
        return np.asarray(convert(values), np.float64)
    except ValueError as error:
        raise DataRefused(f"{name} has rows of different lengths: {error}") from error


def rounded(values: Float64, dtype: str) -> Float64:
    """What is left of the values after a stay in ``dtype``."""
    return values.astype(dtype).astype(np.float64)


def ids(values: object, num: int, name: str) -> npt.NDArray[np.int64]:
    """``num`` integer ids; default: each its own."""
    if values is None:
        return np.arange(num)
    found = array(values, name)
    if found.shape != (num,):
        raise DataRefused(f"{name} has shape {found.shape}, there are {num}: one of each is needed")
    return found.astype(np.int64)


def loss_config(hyper: dict[str, Any]) -> Loss:
    """The configuration section of a case's hyper-parameters. Bounds a rule's mode does not read are left out."""
    values = {_LOSS_KEYS.get(key, key): value for key, value in hyper.items() if key not in _OTHER_KEYS}
    rules: list[Case] = values.pop("correction", None) or []
    read = tuple(section(Correction, {**rule, "low": None} if rule["mode"] == "truncate" else rule) for rule in rules)
    return section(Loss, {**values, "correction": read})


def section(kind: type[Settings], values: dict[str, Any]) -> Settings:
    """A section of the configuration. Raises :class:`ConfigError`."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"hyper-parameters: {error.errors()[0]['msg']} at {error.errors()[0]['loc']}") from error


def advantage_kind(case: Case, dtype: str) -> Case:
    """Rewards and groups to advantages."""
    inputs = case["inputs"]
    rewards = array(inputs["rewards"], "rewards")
    included = as_mask(array(inputs["include"], "include"), "include") if "include" in inputs else None
    lengths = array(inputs["lengths"], "lengths").astype(np.int64) if "lengths" in inputs else None
    groups = ids(inputs["groups"], len(rewards), "groups")
    advantages, degenerate = compute_advantages(rewards, groups, section(Advantage, case["hyper"]), included=included, lengths=lengths)
    return {"advantages": advantages.tolist(), "degenerate": degenerate.astype(int).tolist()}


def whiten_kind(case: Case, dtype: str) -> Case:
    """Whitening over the active tokens."""
    mask = as_mask(array(case["inputs"]["mask"], "mask"))
    return {"advantages": whiten(rounded(array(case["inputs"]["adv"], "adv"), dtype), mask).tolist()}


def gae_kind(case: Case, dtype: str) -> Case:
    """GAE over padded rows."""
    inputs = _token_inputs(case, ("rewards", "values", "bootstrap"), dtype)
    found = gae(inputs["rewards"], inputs["values"], _mask(case), inputs.get("bootstrap"), **case["hyper"])
    return {name: values.tolist() for name, values in found._asdict().items()}


def vtrace_kind(case: Case, dtype: str) -> Case:
    """V-trace over padded rows."""
    inputs = _token_inputs(case, ("cur", "mu", "rewards", "values", "bootstrap"), dtype)
    found = vtrace(inputs["cur"], inputs["mu"], inputs["rewards"], inputs["values"], _mask(case), inputs.get("bootstrap"), **case["hyper"])
    return {name: values.tolist() for name, values in found._asdict().items()}


def kl_reward_kind(case: Case, dtype: str) -> Case:
    """The KL penalty inside the reward."""
    inputs = _token_inputs(case, ("rewards", "prox", "ref"), dtype)
    found = kl_reward(inputs["rewards"], inputs["prox"], inputs["ref"], _mask(case), **case["hyper"])
    return {name: values.tolist() for name, values in found._asdict().items()}


def overlong_kind(case: Case, dtype: str) -> Case:
    """The soft overlong penalty."""
    return {"penalty": overlong_penalty(array(case["inputs"]["lengths"], "lengths").astype(np.int64), section(Overlong, case["hyper"])).tolist()}


def logprobs_kind(case: Case, dtype: str) -> Case:
    """Without truncation through the chunked function of training (the output matrix is the identity), else through the plain one."""
    hyper = case["hyper"]
    logits = torch.tensor(array(case["inputs"]["logits"], "logits"), dtype=_DTYPES[dtype])
    tokens = torch.tensor(case["inputs"]["tokens"], dtype=torch.int64)
    if logits.ndim != 2 or len(logits) != len(tokens):
        raise DataRefused(f"logits have shape {tuple(logits.shape)}, there are {len(tokens)} tokens: one row of logits per token is needed")
    logprobs, entropy = distribution_logprobs(logits, tokens, hyper.get("temperature", 1.0), hyper.get("top_k"), hyper.get("top_p"))
    if not hyper.get("top_k") and (hyper.get("top_p") or 1.0) >= 1.0 and torch.isfinite(logits).all():
        identity = torch.eye(logits.shape[1], dtype=logits.dtype)
        trained = token_logprobs(logits[:-1], identity, tokens[1:], hyper.get("temperature", 1.0), chunk_tokens=2, want_entropy=True)
        assert trained.entropy is not None
        logprobs, entropy = (torch.cat([found.new_zeros(min(1, len(tokens))), found]) for found in trained)  # type: ignore[union-attr]
    return {"logprobs": logprobs.tolist(), "entropy": entropy.tolist()}


def mask_kind(case: Case, dtype: str) -> Case:
    """The mask of a response by its end tokens."""
    return {"mask": response_mask(case["inputs"]["tokens"], **case["hyper"]).astype(float).tolist()}


def staleness_kind(case: Case, dtype: str) -> Case:
    """The staleness filter at any level."""
    mask = _mask(case)
    given = array(case["inputs"]["versions"], "versions")
    if given.shape != mask.shape or not (np.isfinite(given[mask]) & (given[mask] == np.round(given[mask]))).all():
        raise DataRefused(f"versions have shape {given.shape} for a mask {mask.shape}: every active token needs the whole number of its version")
    versions = np.where(mask, given, 0).astype(np.int64)
    hyper = case["hyper"]
    level: Level = hyper.get("level", "row")
    units = None
    if level != "token":
        units = np.repeat(ids(case["inputs"].get("unit") if level != "row" else None, len(mask), "unit"), mask.shape[1])
    found = drop_stale(versions.ravel(), mask.ravel(), units, current=hyper["current"], limit=hyper["limit"])
    keep = found.keep.reshape(mask.shape).astype(int).tolist()
    return {"keep": keep, "max": found.max, "mean": found.mean, "dropped_tokens": found.dropped_tokens}


def agg_kind(case: Case, dtype: str) -> Case:
    """The weight of every token."""
    mask, hyper = _mask(case), case["hyper"]
    return {"agg": _agg(mask, case["inputs"], hyper["mode"], hyper.get("length"), hyper.get("const")).tolist()}


def loss_kind(case: Case, dtype: str) -> Case:
    """One objective on given advantages."""
    loss = loss_config(case["hyper"])
    grid = _grid(case, loss)
    return _evaluate(Objective(loss), grid, dtype)


def pipeline_kind(case: Case, dtype: str) -> Case:
    """Rewards to gradient, through the plan."""
    inputs, hyper = case["inputs"], case["hyper"]
    loss = loss_config(hyper)
    advantage = dict(hyper.get("advantage", {}))
    degenerate = "mask" if advantage.pop("degenerate", "keep") == "drop" else "keep"
    if "overlong" in hyper:
        advantage["overlong"] = hyper["overlong"]
    mask = _mask(case)
    decided = plan(_rows(inputs, hyper.get("stale"), mask), loss, section(Advantage, advantage), degenerate)
    shape = mask.shape
    kept = decided.mask.reshape(shape)
    grid = Grid(
        mask=kept,
        adv=np.repeat(decided.row_advantage[:, None], shape[1], axis=1),
        agg=np.where(kept, decided.row_weight[:, None], 0.0),
        row_trajectory=ids(inputs.get("row_traj"), shape[0], "row_traj"),
        logprobs=_logprobs(inputs, shape),
        entropy=_entropy(inputs, shape),
    )
    result = {"advantages": decided.advantages.tolist(), "mask": kept.astype(float).tolist(), **_evaluate(Objective(loss), grid, dtype)}
    return result | _staleness(decided)


def split_kind(case: Case, dtype: str) -> Case:
    """Every rank differentiates W times its share, ranks average: the result of the whole batch."""
    loss = loss_config(case["hyper"])
    grid = _grid(case, loss)
    objective = Objective(loss)
    x, tokens, entropy = _flat(grid, dtype)
    terms = objective.batch_terms(x.detach(), tokens) if objective.needs_proximal_pass else None
    ranks: list[list[list[int]]] = case["hyper"]["ranks"]
    total, grad = 0.0, torch.zeros_like(x)
    for micro_batches in ranks:
        x.grad = None
        for rows in micro_batches:
            index = torch.cat([torch.arange(row * grid.mask.shape[1], (row + 1) * grid.mask.shape[1]) for row in rows] or [torch.zeros(0, dtype=torch.int64)])
            part = _take(tokens, index, rows)
            part = part if terms is None else terms.put(part, index)
            share, _ = objective(x[index], part, None if entropy is None else entropy[index])
            (len(ranks) * share).backward()
            total += float(share.detach())
        grad += (x.grad if x.grad is not None else torch.zeros_like(x)) / len(ranks)
    return {"loss": total, "grad": grad.reshape(grid.mask.shape).tolist()}


KINDS: dict[str, Callable[[Case, str], Case]] = {
    "advantage": advantage_kind,
    "whiten": whiten_kind,
    "gae": gae_kind,
    "vtrace": vtrace_kind,
    "kl_reward": kl_reward_kind,
    "overlong": overlong_kind,
    "logprobs": logprobs_kind,
    "mask": mask_kind,
    "staleness": staleness_kind,
    "agg": agg_kind,
    "loss": loss_kind,
    "pipeline": pipeline_kind,
    "split": split_kind,
}


def _mask(case: Case) -> Bool:
    return as_mask(array(case["inputs"]["mask"], "mask"), "mask")


def _token_inputs(case: Case, names: tuple[str, ...], dtype: str) -> dict[str, Float64]:
    return {name: rounded(array(case["inputs"][name], name), dtype) for name in names if name in case["inputs"]}


def _agg(mask: Bool, inputs: Case, mode: str, length: float | None, const: float | None) -> Float64:
    row_trajectory, row_group = (ids(inputs.get(name), len(mask), name) for name in ("row_traj", "row_group"))
    weights = row_weights(mask.sum(axis=1), row_trajectory, row_group, mode, length=length, const=const)
    return np.where(mask, weights[:, None], 0.0)


def _logprobs(inputs: Case, shape: tuple[int, ...]) -> dict[str, Float64]:
    found = {name: array(inputs[name], name) for name in ("cur", "prox", "mu", "ref") if inputs.get(name) is not None}
    for name, values in found.items():
        if values.shape != shape:
            raise DataRefused(f"{name} has shape {values.shape}, the mask {shape}: every token needs one")
    return found


def _entropy(inputs: Case, shape: tuple[int, ...]) -> Float64 | None:
    if inputs.get("entropy") is None:
        return None
    values = array(inputs["entropy"], "entropy")
    if values.shape != shape:
        raise DataRefused(f"entropy has shape {values.shape}, the mask {shape}: every token needs one")
    return values


def _grid(case: Case, loss: Loss) -> Grid:
    """A loss or split case: advantages are given, per row or per token."""
    inputs, mask = case["inputs"], _mask(case)
    adv = array(inputs["adv"], "adv")
    if mask.ndim != 2 or adv.shape not in ((len(mask),), mask.shape):
        raise DataRefused(f"adv has shape {adv.shape}, the mask {mask.shape}: one per row or per token is needed")
    return Grid(
        mask=mask,
        adv=adv if adv.ndim == 2 else np.repeat(adv[:, None], mask.shape[1], axis=1),
        agg=_agg(mask, inputs, loss.agg, loss.agg_length, loss.agg_const),
        row_trajectory=ids(inputs.get("row_traj"), len(mask), "row_traj"),
        logprobs=_logprobs(inputs, mask.shape),
        entropy=_entropy(inputs, mask.shape),
    )


def _rows(inputs: Case, stale: Case | None, mask: Bool) -> Rows:
    num_rows, width = mask.shape
    rewards = array(inputs["rewards"], "rewards")
    versions = None
    if inputs.get("versions") is not None:
        found = array(inputs["versions"], "versions")
        if found.shape != mask.shape:
            raise DataRefused(f"versions have shape {found.shape}, the mask {mask.shape}: every token needs its version")
        versions = np.where(mask, found, 0).astype(np.int64).ravel()
    return Rows(
        offsets=np.arange(num_rows + 1) * width,
        mask=mask.ravel(),
        row_trajectory=ids(inputs.get("row_traj"), num_rows, "row_traj"),
        rewards=rewards,
        groups=ids(inputs["traj_group"], len(rewards), "traj_group"),
        truncated=array(inputs["truncated"], "truncated") if inputs.get("truncated") is not None else None,
        lengths=array(inputs["lengths"], "lengths").astype(np.int64) if inputs.get("lengths") is not None else None,
        versions=versions,
        stale=None if stale is None else StaleLimit(stale["current"], stale["limit"], stale.get("level", "row")),
    )


def _flat(grid: Grid, dtype: str) -> tuple[Tensor, Tokens, Tensor | None]:
    """The padded batch as flat tokens, inactive positions included."""

    def tensor(values: Float64) -> Tensor:
        return torch.tensor(values.ravel(), dtype=_DTYPES[dtype])

    def given(name: str) -> Tensor | None:
        return tensor(grid.logprobs[name]) if name in grid.logprobs else None

    num_rows, width = grid.mask.shape
    tokens = Tokens(
        row=torch.arange(num_rows).repeat_interleave(width),
        num_rows=num_rows,
        mask=torch.tensor(grid.mask.ravel()),
        adv=tensor(grid.adv),
        agg=tensor(grid.agg),
        row_trajectory=torch.tensor(grid.row_trajectory),
        mu=given("mu"),
        prox=given("prox"),
        ref=given("ref"),
    )
    return tensor(grid.logprobs["cur"]).requires_grad_(), tokens, None if grid.entropy is None else tensor(grid.entropy)


def _take(tokens: Tokens, index: Tensor, rows: list[int]) -> Tokens:
    """A micro-batch: the tokens at ``index``, which are those of ``rows``."""
    per_token = ("mask", "adv", "agg", "mu", "prox", "ref")
    taken = {name: None if getattr(tokens, name) is None else getattr(tokens, name)[index] for name in per_token}
    width = len(index) // max(len(rows), 1)
    row_trajectory = None if tokens.row_trajectory is None else tokens.row_trajectory[rows]
    return replace(tokens, row=torch.arange(len(rows)).repeat_interleave(width), num_rows=len(rows), row_trajectory=row_trajectory, **taken)


def _evaluate(objective: Objective, grid: Grid, dtype: str) -> Case:
    x, tokens, entropy = _flat(grid, dtype)
    if objective.needs_proximal_pass:
        tokens = objective.batch_terms(x.detach(), tokens).put(tokens, slice(None))
    loss, stats, weight = objective.evaluate(x, tokens, entropy)
    loss.backward()
    assert x.grad is not None
    shape = grid.mask.shape
    return {
        "loss": float(loss.detach()),
        "grad": x.grad.reshape(shape).tolist(),
        "weights": weight.reshape(shape).tolist(),
        "agg": grid.agg.tolist(),
        "metrics": Stats().merge(stats).result(),
    }


def _staleness(decided: Plan) -> Case:
    found = decided.staleness
    return {} if found is None else {"staleness": {"max": found.max, "mean": found.mean, "dropped_tokens": found.dropped_tokens}}
