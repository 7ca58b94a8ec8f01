"""Every name of the algorithms page, from its configuration value through the real step: gradients of the model's parameters, loss and metrics.

The other side is independent: the page in plain loops (tests/property/slow_*.py) for advantages and for d loss / d x, a plain unpacked forward of
transformers for x, and autograd from x to the parameters; all of it in float64.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slow_advantages
import slow_losses as slow
from rollstream import models
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.configs.checks import check_config
from rollstream.configs.loader import load_config
from rollstream.configs.run_folder import Run
from rollstream.configs.schema import Config
from rollstream.learner.aggregation import aggregation_named
from rollstream.learner.freeze import freeze
from rollstream.learner.losses import loss_names
from rollstream.learner.optimizer import adamw, add_value_head
from rollstream.learner.policy import Policy
from rollstream.learner.step import Stepper, Work
from rollstream.learner.updates import split
from rollstream.learner.value import ValueHead

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS, MEMBERS, VERSION, TEMPERATURE = 3, 3, 5, 0.8
AGGREGATIONS = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_fixed", "traj_mean_token_mean", "group_mean_token_mean", "fixed"]
PER_TRAJECTORY = ["mean", "grpo", "rloo", "opo", "batch_std", "none"]
LEVELS, MODES = ["token", "sequence", "geometric", "min", "max"], ["truncate", "clip", "mask", "reject"]
ANCHORS, KLS = ["prox", "mu", "cur"], ["k1", "k2", "k3", "abs"]
CARRY_MU = ["minirl", "dppo_tv", "dppo_kl", "m2po", "topr"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return models.prepare_model(
        Run(folder, load_config("quickstart", ["model={kind: tiny, num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1}"]), "t")
    )


def segment_of(rng: np.random.Generator) -> Segment:
    lengths = rng.integers(1, 4, 2 * int(rng.integers(1, 3)))
    mask = np.repeat(np.arange(len(lengths)) % 2, lengths).astype(np.uint8)
    num = len(mask)
    return Segment(
        token_ids=rng.integers(0, 200, num).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, rng.normal(-5.6, 0.4, num), 0).astype(np.float32),
        version_starts=np.zeros(1, np.int32),
        version_values=np.array([VERSION - 3], np.int32),
        turn_starts=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32),
        turn_roles=tuple("assistant" if k % 2 else "user" for k in range(len(lengths))),
        turn_rewards=tuple(float(rng.normal()) if k % 2 and rng.random() < 0.7 else None for k in range(len(lengths))),
    )


def batch_of(seed: int) -> Batch:
    rng = np.random.default_rng([seed, 77])
    trajectories: list[Trajectory] = []
    for group, member in itertools.product(range(GROUPS), range(MEMBERS)):
        segments = tuple(segment_of(rng) for _ in range(1 if rng.random() < 0.6 else 2))
        status: Any = ["truncated", "terminated", "terminated"][member] if group else ["failed", "terminated", "terminated"][member]
        reward = None if status == "failed" else 0.5 if group == 2 else float(rng.normal())
        key = TrajectoryKey(0, group, member, 0)
        trajectories.append(Trajectory(key, "env", 0, 0, "train", segments, reward, status, "terminated", temperature=TEMPERATURE))
    return Batch(0, VERSION, tuple(range(GROUPS)), tuple(trajectories), frozenset({(1, 2)}))


def config_of(loss: dict[str, Any], advantage: dict[str, Any], updates: dict[str, int], degenerate: str) -> Config:
    values = {"learner.loss": loss, "learner.advantage": advantage, "learner.updates": updates, "buffer.degenerate": degenerate}
    if advantage["mode"] in ("gae", "vtrace"):
        values["learner.value"] = {"coef": 0.3, "value_clip": 0.01, "learning_rate": 3e-3}
    overrides = [f"{path}={json.dumps(value)}" for path, value in values.items()]
    config = load_config(
        "quickstart",
        ["learner.preset=grpo", "warmup=", f"learner.batch_groups={GROUPS}", f"learner.group_size={MEMBERS}", "learner.tokens_per_micro_batch=160", *overrides],
    )
    check_config(config)
    return config


@functools.cache
def loaded(folder: Path) -> Any:
    return models.load_policy(folder, dtype=torch.float64)


def fresh(folder: Path) -> Any:
    return copy.deepcopy(loaded(folder))


class Reference:
    """The same model twice, unpacked and in float64: as it is now, and as the batch found it."""

    def __init__(self, folder: Path, stepper: Stepper, batch: Batch) -> None:
        self.live = fresh(folder)
        self.head = None if stepper.policy.value_head is None else ValueHead(32).double()
        self.segments = [segment for trajectory in batch.trajectories for segment in trajectory.segments]
        self.stepper = stepper

    def follow(self) -> None:
        self.live.load_state_dict(self.stepper.policy.model.state_dict())
        self.live.zero_grad()
        if self.head is not None:
            assert self.stepper.policy.value_head is not None
            self.head.load_state_dict(self.stepper.policy.value_head.state_dict())
            self.head.zero_grad()

    def scores(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Per row: x and entropy by the token scored, V of the state each token was drawn in, V after each token."""
        xs, entropies, values, afters = [], [], [], []
        for segment in self.segments:
            ids = torch.from_numpy(segment.token_ids.astype(np.int64))
            hidden = self.live.base_model(ids[None]).last_hidden_state[0]
            every = torch.log_softmax(self.live.lm_head(hidden) / TEMPERATURE, -1)
            nothing = torch.zeros(1, dtype=torch.float64)
            xs.append(torch.cat([nothing, every[:-1].gather(1, ids[1:, None])[:, 0]]))
            entropies.append(torch.cat([nothing, -(every.exp() * every).sum(-1)[:-1]]))
            after = torch.zeros(len(ids), dtype=torch.float64) if self.head is None else self.head(hidden)
            values.append(torch.cat([nothing, after[:-1]]))
            afters.append(after)
        return xs, entropies, values, afters


def numbers(rows: list[torch.Tensor]) -> list[list[float]]:
    return [row.detach().tolist() for row in rows]


def advantages_of(config: Config, batch: Batch, mask: list[list[int]], start: dict[str, Any]) -> tuple[list[list[float]], list[list[float]], list[list[int]]]:
    """Advantage and target of every token, and the mask after filters, from the page."""
    advantage, loss = config.learner.advantage, config.learner.loss
    row_traj = [number for number, trajectory in enumerate(batch.trajectories) for _ in trajectory.segments]
    num = len(batch.trajectories)
    include = [t.reward is not None and not (advantage.truncated == "exclude" and t.status == "truncated") for t in batch.trajectories]
    lengths = [sum(sum(mask[b]) for b in range(len(mask)) if row_traj[b] == n) for n in range(num)]
    shaped = [0.0 if t.reward is None else t.reward for t in batch.trajectories]
    if (overlong := advantage.overlong) is not None:
        over = [min(1.0, max(0.0, (n - overlong.max_len + overlong.buffer) / overlong.buffer)) for n in lengths]
        shaped = [r - overlong.factor * o for r, o in zip(shaped, over, strict=True)]
    per_token = advantage.mode in ("gae", "vtrace", "whiten")
    groups = [t.key.group_id for t in batch.trajectories]
    hyper = {"mode": advantage.mode, "ddof": advantage.ddof, "eps": advantage.eps, "std_over": advantage.std_over}
    scored: Any = {"advantages": [0.0] * num, "degenerate": [not i for i in include]}
    if not per_token:
        scored = slow_advantages.advantage(shaped, groups, hyper, [float(i) for i in include], lengths)
    leaves = [
        not include[n] or (groups[n], t.key.member) in batch.withheld or (advantage.truncated != "keep" and t.status == "truncated")
        or (config.buffer.degenerate != "keep" and bool(scored["degenerate"][n])) for n, t in enumerate(batch.trajectories)
    ]  # fmt: skip
    mask = [[0] * len(row) if leaves[row_traj[b]] else row for b, row in enumerate(mask)]
    places = [[(b, t) for b in range(len(mask)) if row_traj[b] == n for t in range(len(mask[b])) if mask[b][t]] for n in range(num)]

    def of(grid: list[list[float]]) -> list[list[float]]:
        return [[grid[b][t] for b, t in row] for row in places]

    ones = [[1.0] * len(row) for row in places]
    extra = [[0.0] * len(row) for row in places]
    if loss.kl is not None and loss.kl_in == "reward":
        extra = [
            [-loss.kl_coef * slow.kl_and_slope(loss.kl, p - q)[0] for p, q in zip(*rows, strict=True)]
            for rows in zip(of(start["x"]), of(start["ref"]), strict=True)
        ]
    targets = [[0.0] * len(row) for row in places]
    if per_token:
        rewards = token_rewards(batch, places, row_traj, shaped)
        rewards = [[r + e for r, e in zip(*rows, strict=True)] for rows in zip(rewards, extra, strict=True)]
        after = [start["after"][row[-1][0]][row[-1][1]] if row and batch.trajectories[n].status == "truncated" else 0.0 for n, row in enumerate(places)]
        if advantage.mode == "gae":
            found = slow_advantages.gae(rewards, of(start["values"]), ones, after, advantage.gamma, advantage.lam)
            advantages, targets = found["advantages"], found["returns"]
        elif advantage.mode == "vtrace":
            bars = (advantage.gamma, advantage.lam, advantage.rho_bar, advantage.c_bar)
            found = slow_advantages.vtrace(of(start["x"]), of(start["mu"]), rewards, of(start["values"]), ones, after, *bars)
            advantages, targets = found["advantages"], found["targets"]
        else:
            zeros = [[0.0] * len(row) for row in places]
            advantages = slow_advantages.whiten(slow_advantages.gae(rewards, zeros, ones, [0.0] * num, advantage.gamma, 1.0)["advantages"], ones)
    else:
        zeros = [[0.0] * len(row) for row in places]
        togo = slow_advantages.gae(extra, zeros, ones, [0.0] * num, advantage.gamma, 1.0)["advantages"]
        advantages = [[scored["advantages"][n] + g for g in row] for n, row in enumerate(togo)]
    if advantage.whiten and advantage.mode != "whiten":
        advantages = slow_advantages.whiten(advantages, ones)
    out, learn = ([[0.0] * len(row) for row in mask] for _ in range(2))
    for row, found_row, target_row in zip(places, advantages, targets, strict=True):
        for (b, t), a, g in zip(row, found_row, target_row, strict=True):
            out[b][t], learn[b][t] = a, g
    return out, learn, mask


def token_rewards(batch: Batch, places: list[list[tuple[int, int]]], row_traj: list[int], shaped: list[float]) -> list[list[float]]:
    rewards = [[0.0] * len(row) for row in places]
    rows = [segment for trajectory in batch.trajectories for segment in trajectory.segments]
    for n, row in enumerate(places):
        if not row:
            continue
        rewards[n][-1] = shaped[n]
        for b in [b for b in range(len(rows)) if row_traj[b] == n]:
            ends = [*rows[b].turn_starts[1:].tolist(), rows[b].num_tokens]
            for end, reward in zip(ends, rows[b].turn_rewards, strict=True):
                if reward is not None:
                    rewards[n][max(i for i, place in enumerate(row) if place < (b, end))] += reward
                    rewards[n][-1] -= reward
    return rewards


RENAMED = {"kind": "loss", "agg_length": "length", "agg_const": "const"}


def compare(tiny: Path, config: Config, seed: int) -> None:
    """Every update of one batch: what the step did against what the page says."""
    batch, learner = batch_of(seed), config.learner
    model = fresh(tiny)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    head = None
    if learner.value is not None:
        head = ValueHead(32).double()
        torch.nn.init.normal_(head.weight, std=0.3)
    first = fresh(tiny).requires_grad_(False) if learner.loss.kl is not None else None
    optimizer = adamw(model.named_parameters(), [], rate=3e-3)
    if head is not None:
        add_value_head(optimizer, head, 1.0)
    stepper = Stepper(Policy(model, learner.policy, head), optimizer, config, None if first is None else Policy(first))
    reference = Reference(tiny, stepper, batch)
    reference.follow()
    x, _, values, after = reference.scores()
    mu = [segment.behaviour_logprobs.astype(np.float64).tolist() for segment in reference.segments]
    start = {"x": numbers(x), "mu": mu, "values": numbers(values), "after": numbers(after)}
    if first is not None:
        reference.live.load_state_dict(first.state_dict())
        start["ref"] = numbers(reference.scores()[0])
    sampled = [segment.loss_mask.tolist() for segment in reference.segments]
    advantages, targets, mask = advantages_of(config, batch, sampled, start)

    work = stepper.prepare(batch)
    several = learner.updates.mini_batches * learner.updates.epochs > 1
    frozen = freeze(stepper, work, several=several)
    shares = [frozen.put(share) for share in (split(stepper, work, (0, VERSION)) if several else [work])]
    assert len(shares) == learner.updates.mini_batches * learner.updates.epochs
    for share in shares:
        reference.follow()
        compare_share(stepper, share, reference, {"start": start, "adv": advantages, "targets": targets, "mask": mask, "several": several})
        stepper.update(VERSION, stepper.differentiate(share))


def compare_share(stepper: Stepper, share: Work, reference: Reference, given: dict[str, Any]) -> None:
    loss, value, rows = stepper.config.learner.loss, stepper.config.learner.value, share.flat.rows
    x, entropy, values, _ = reference.scores()
    trained = share.flat.trained(share.plan)
    members = [bool(trained[start:end].any()) for start, end in itertools.pairwise(share.flat.offsets.tolist())]
    mask = [[float(m) for m in row] if inside else [0.0] * len(row) for row, inside in zip(given["mask"], members, strict=True)]
    assert [m for row in mask for m in row] == trained.astype(float).tolist()
    hyper = {RENAMED.get(name, name): getattr(loss, name) for name in type(loss).model_fields if name != "kl_in"}
    hyper["correction"] = [rule.model_dump() for rule in loss.correction]
    inputs = {"cur": numbers(x), "mu": given["start"]["mu"], "entropy": numbers(entropy), "mask": mask, "adv": given["adv"]}
    frozen_prox = given["several"] and loss.old != "mu"
    whole_batch = loss.kind == "m2po" or (loss.correction and (loss.self_normalise or loss.correction_unit == "trajectory"))
    if frozen_prox or whole_batch:
        inputs["prox"] = given["start"]["x"] if frozen_prox else numbers(x)
    if loss.kl is not None:
        inputs["ref"] = given["start"]["ref"]
    inputs |= {"row_traj": rows.row_trajectory.tolist(), "row_group": rows.groups[rows.row_trajectory].tolist()}
    expected = slow.loss(inputs, hyper | ({"kl_coef": 0.0} if loss.kl_in == "reward" else {}))

    def weighed(weights: list[list[float]], grid: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(torch.tensor(row, dtype=torch.float64) * values).sum() for row, values in zip(weights, grid, strict=True)]).sum()

    scalar = weighed(expected["grad"], x) - loss.entropy_coef * weighed(expected["agg"], entropy)
    total = expected["loss"]
    if value is not None:
        clip = value.value_clip
        assert clip is not None
        terms: list[torch.Tensor] = []
        for v, v0, g in zip(values, given["start"]["values"], given["targets"], strict=True):
            before, target = torch.tensor(v0, dtype=torch.float64), torch.tensor(g, dtype=torch.float64)
            terms.append(0.5 * torch.maximum((v - target) ** 2, (before + (v - before).clamp(-clip, clip) - target) ** 2))
        regression = weighed(expected["agg"], terms)
        scalar, total = scalar + value.coef * regression, total + value.coef * float(regression.detach())
    scalar.backward()
    found = stepper.differentiate(share)
    assert found.metrics["total"] == pytest.approx(total, rel=1e-7, abs=1e-9)
    for name, number in expected["metrics"].items():
        assert found.metrics[name] == pytest.approx(float(number), rel=1e-6, abs=1e-8), name
    wanted = dict(reference.live.named_parameters()) | ({} if reference.head is None else dict(reference.head.named_parameters()))
    got = dict(stepper.policy.model.named_parameters()) | ({} if stepper.policy.value_head is None else dict(stepper.policy.value_head.named_parameters()))
    scale = max(float(parameter.grad.abs().max()) for parameter in wanted.values() if parameter.grad is not None)
    for name, parameter in wanted.items():
        gradient, other = parameter.grad, got[name].grad
        assert gradient is not None
        assert other is not None
        assert float((gradient - other).abs().max()) <= 1e-7 * scale + 1e-12, name
    stepper.policy.model.zero_grad()
    if stepper.policy.value_head is not None:
        stepper.policy.value_head.zero_grad()


def setting(index: int, kind: str, anchor: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, int], str]:
    """One of many combinations, so that every value of every key is met."""
    rng = np.random.default_rng(index)
    loss: dict[str, Any] = {
        "kind": kind, "old": anchor, "correction": [], "agg": AGGREGATIONS[index % 7], "agg_length": 12.0, "agg_const": 50.0,
        "eps_low": float(rng.choice([0.01, 0.2])), "eps_high": float(rng.choice([0.01, 0.28])), "dual_clip": [None, 1.05][index % 2],
        "entropy_coef": [0.0, 0.02][index % 2], "mu_sq_coef": [0.0, 0.05][(index // 2) % 2], "opsm_delta": [None, 0.0][(index // 3) % 2],
        "is_cap": [None, 1.2][index % 2], "delta": 0.001, "dro_beta": 0.3, "m2_threshold": 0.02, "m2_directional": index % 2 == 0,
    }  # fmt: skip
    advantage: dict[str, Any] = {"mode": PER_TRAJECTORY[index % 6], "truncated": ["keep", "mask", "exclude"][index % 3], "std_over": ["all", "live"][index % 2]}
    advantage |= {"whiten": index % 5 == 0, "gamma": [1.0, 0.9][index % 2], "lam": 0.8, "rho_bar": 0.9, "c_bar": 0.7}
    if index % 3 == 0:
        advantage["overlong"] = {"max_len": 6, "buffer": 4, "factor": 0.5}
    carries = anchor == "mu" or kind in CARRY_MU
    if index % 4 == 3:
        advantage["mode"] = ["gae", "whiten", "gae" if carries else "vtrace"][(index // 4) % 3]
    if anchor != "mu" and advantage["mode"] != "vtrace" and index % 2:
        low, high = sorted(rng.uniform(0.6, 1.5, 2).tolist())
        loss["correction"] = [{"level": LEVELS[index % 5], "mode": MODES[(index // 2) % 4], "high": high}]
        if loss["correction"][0]["mode"] != "truncate":
            loss["correction"][0]["low"] = low
        loss |= {"correction_unit": ["row", "trajectory"][(index // 2) % 2], "self_normalise": index % 3 == 0}
    if index % 3 == 1:
        loss |= {"kl": KLS[(index // 3) % 4], "kl_coef": 0.1, "kl_in": ["loss", "reward"][(index // 3) % 2], "kl_is": index % 2 == 0 and (index // 3) % 2 == 0}
    updates = [{"mini_batches": 1, "epochs": 1}, {"mini_batches": 1, "epochs": 2}, {"mini_batches": 2, "epochs": 1}][index % 3]
    degenerate = "keep" if advantage["mode"] in ("gae", "vtrace", "whiten") else ["keep", "mask"][index % 2]
    return loss, advantage, updates, degenerate


CASES = list(itertools.product(loss_names(), ANCHORS))


@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(case) for case in CASES])
def test_every_loss_under_every_anchor_steps_as_the_page_says(index: int, tiny: Path) -> None:
    kind, anchor = CASES[index]
    compare(tiny, config_of(*setting(index, kind, anchor)), index)


@pytest.mark.parametrize(("level", "mode"), list(itertools.product(LEVELS, MODES)))
def test_every_correction_steps_as_the_page_says(level: str, mode: str, tiny: Path) -> None:
    index = 10 * LEVELS.index(level) + MODES.index(mode)
    rule = {"level": level, "mode": mode, "high": 1.02} | ({} if mode == "truncate" else {"low": 0.97})
    loss = {"kind": "ppo", "correction": [rule, {"level": "geometric", "mode": "reject", "low": 0.5, "high": 1.6}], "self_normalise": index % 2 == 0}
    compare(tiny, config_of(loss, {"mode": "grpo"}, {"mini_batches": 1, "epochs": 1 + index % 2}, "keep"), index)


@pytest.mark.parametrize("mode", [*PER_TRAJECTORY, "gae", "vtrace", "whiten"])
@pytest.mark.parametrize("kl", [{}, {"kl": "k1", "kl_coef": 0.2, "kl_in": "reward"}])
def test_every_advantage_mode_steps_as_the_page_says_with_and_without_kl_in_the_reward(mode: str, kl: dict[str, Any], tiny: Path) -> None:
    loss = {"kind": "pg" if mode == "vtrace" else "ppo", "correction": [], **kl}
    compare(tiny, config_of(loss, {"mode": mode, "gamma": 0.95, "lam": 0.9}, {"mini_batches": 2, "epochs": 2}, "keep"), len(mode))


def test_the_settings_compared_are_all_there_are() -> None:
    drawn = [setting(index, *case) for index, case in enumerate(CASES)]
    assert {loss["agg"] for loss, *_ in drawn} == set(AGGREGATIONS)
    assert all(aggregation_named(name) for name in AGGREGATIONS)
    assert {(loss["kl"], loss["kl_in"]) for loss, *_ in drawn if "kl" in loss} >= {("k1", "loss"), ("k2", "reward"), ("k3", "loss"), ("abs", "reward")}
    assert {advantage["mode"] for _, advantage, *_ in drawn} == {*PER_TRAJECTORY, "gae", "vtrace", "whiten"}
    assert {degenerate for *_, degenerate in drawn} == {"keep", "mask"}
