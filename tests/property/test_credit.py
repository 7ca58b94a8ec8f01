"""Advantages per token on random batches of whole trajectories, laid out and packed as training does, against the page in plain loops (slow_advantages.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

import slow_advantages as slow
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.configs.learner_schema import Advantage, Loss, Overlong
from rollstream.errors import DataRefused
from rollstream.learner.collate import NO_TURNS, Flat, flatten, pack
from rollstream.learner.credit import Scored, assign, needs_credit
from rollstream.learner.plan import Plan, plan

VERSION = 7


def segment_of(rng: np.random.Generator, *, trains: bool) -> Segment:
    """Turns of a few tokens, by turns said and sampled; some sampled ones rewarded, some said ones too."""
    lengths = rng.integers(1, 5, rng.integers(2, 7))
    mask = np.repeat(np.arange(len(lengths)) % 2, lengths).astype(np.uint8) * (1 if trains else 0)
    mask &= (rng.random(len(mask)) < 0.9).astype(np.uint8)
    num = len(mask)
    return Segment(
        token_ids=rng.integers(0, 200, num).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, rng.normal(-2, 0.5, num).clip(max=-0.01), 0).astype(np.float32),
        version_starts=np.zeros(1, np.int32),
        version_values=np.array([VERSION - 3], np.int32),
        turn_starts=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32),
        turn_roles=tuple("assistant" if k % 2 else "user" for k in range(len(lengths))),
        turn_rewards=tuple(float(rng.normal()) if rng.random() < (0.6 if k % 2 else 0.1) else None for k in range(len(lengths))),
    )


def batch_of(rng: np.random.Generator, groups: int = 3, members: int = 3) -> Batch:
    trajectories: list[Trajectory] = []
    for group in range(groups):
        for member in range(members):
            status: Any = rng.choice(["terminated", "terminated", "truncated", "failed"])
            segments = tuple(segment_of(rng, trains=rng.random() < 0.9) for _ in range(rng.integers(1, 4)))
            turns = sum(reward or 0.0 for segment in segments for reward in segment.turn_rewards)
            reward = None if status == "failed" else turns + float(rng.choice([0.0, 0.0, rng.normal()]))
            trajectories.append(Trajectory(TrajectoryKey(0, group, member, 0), "env", 0, 0, "train", segments, reward, status, "terminated"))
    withheld = frozenset({(0, 1)}) if rng.random() < 0.3 else frozenset[tuple[int, int]]()
    return Batch(0, VERSION, tuple(range(groups)), tuple(trajectories), withheld)


class Slow:
    """The batch as lists of its trajectories' trained tokens: their places in the flat batch, and rewards."""

    def __init__(self, batch: Batch, shaped: list[float]) -> None:
        self.places: list[list[int]] = []
        self.rewards: list[list[float]] = []
        self.cut: list[bool] = []
        self.number: list[int] = []
        offset = 0
        for number, trajectory in enumerate(batch.trajectories):
            places: list[int] = []
            turns: list[tuple[int, float]] = []
            for segment in trajectory.segments:
                places += [offset + t for t in range(segment.num_tokens) if segment.loss_mask[t]]
                ends = [*segment.turn_starts[1:].tolist(), segment.num_tokens]
                turns += [(offset + end - 1, reward) for end, reward in zip(ends, segment.turn_rewards, strict=True) if reward is not None]
                offset += segment.num_tokens
            key = (trajectory.key.group_id, trajectory.key.member)
            if trajectory.reward is None or key in batch.withheld or not places:
                continue
            rewards = [0.0] * len(places)
            for end, reward in turns:
                before = [i for i, place in enumerate(places) if place <= end]
                rewards[before[-1] if before else 0] += reward
            rewards[-1] += shaped[number] - sum(reward for _, reward in turns)
            self.places.append(places)
            self.rewards.append(rewards)
            self.cut.append(trajectory.status == "truncated")
            self.number.append(number)

    def of(self, values: np.ndarray) -> list[list[float]]:
        return [[float(values[place]) for place in places] for places in self.places]

    @property
    def mask(self) -> list[list[float]]:
        return [[1.0] * len(places) for places in self.places]

    def flat(self, lists: list[list[float]], num: int) -> np.ndarray:
        out = np.zeros(num)
        for places, values in zip(self.places, lists, strict=True):
            out[places] = values
        return out


def laid_out(rng: np.random.Generator, advantage: Advantage, loss: Loss) -> tuple[Batch, Flat, Plan, Scored]:
    batch = batch_of(rng)
    flat = flatten(batch, max_lag=4)
    num = len(flat.token_ids)
    near = flat.behaviour_logprobs.astype(np.float64)
    scored = Scored(
        prox=-np.abs(near + rng.normal(0, 0.7, num)),
        ref=-np.abs(near + rng.normal(0, 0.5, num)),
        values=rng.normal(0, 1, num),
        after=rng.normal(0, 1, len(batch.trajectories)),
    )
    assert flat.rows.truncated is not None
    assert scored.after is not None
    scored.after[~flat.rows.truncated.astype(bool)] = 0.0
    return batch, flat, plan(flat.rows, loss, advantage, "keep"), scored


def kl_rewards(found: Slow, scored: Scored, loss: Loss) -> list[list[float]]:
    if loss.kl is None:
        return [[0.0] * len(row) for row in found.rewards]
    assert scored.prox is not None
    assert scored.ref is not None
    rows = zip(found.of(scored.prox), found.of(scored.ref), strict=True)
    return [[-loss.kl_coef * estimate(loss.kl, p - q) for p, q in zip(*pair, strict=True)] for pair in rows]


def estimate(kind: str, d: float) -> float:
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[kind]


LOSSES = [Loss(), Loss(kl="k1", kl_in="reward", kl_coef=0.1), Loss(kl="k3", kl_in="reward", kl_coef=0.2)]


@pytest.mark.parametrize("mode", ["gae", "vtrace", "whiten"])
@pytest.mark.parametrize("seed", range(12))
def test_modes_per_token_equal_the_page_on_turns_segments_cuts_and_masks(mode: str, seed: int) -> None:
    rng = np.random.default_rng([seed, 1])
    config = Advantage(
        mode=mode,
        gamma=float(rng.choice([1.0, 0.9])),
        lam=float(rng.choice([1.0, 0.8])),
        rho_bar=float(rng.choice([0.7, 1.0, 2.0])),
        c_bar=float(rng.choice([0.5, 1.0])),
        bootstrap=bool(rng.random() < 0.7),
        whiten=bool(rng.random() < 0.3),
        overlong=Overlong(max_len=12, buffer=6) if rng.random() < 0.5 else None,
    )
    loss = LOSSES[seed % len(LOSSES)]
    batch, flat, decided, scored = laid_out(rng, config, loss)
    assert needs_credit(loss, config)
    assert scored.prox is not None
    assert scored.values is not None
    assert scored.after is not None
    found = Slow(batch, decided.shaped_rewards.tolist())
    rewards = [[r + k for r, k in zip(*rows, strict=True)] for rows in zip(found.rewards, kl_rewards(found, scored, loss), strict=True)]
    values, after = (
        found.of(scored.values),
        [float(scored.after[number]) if cut and config.bootstrap else 0.0 for number, cut in zip(found.number, found.cut, strict=True)],
    )
    if mode == "gae":
        expected = slow.gae(rewards, values, found.mask, after, config.gamma, config.lam)
        targets = expected["returns"]
    elif mode == "vtrace":
        prox, mu = found.of(scored.prox), found.of(flat.behaviour_logprobs)
        expected = slow.vtrace(prox, mu, rewards, values, found.mask, after, config.gamma, config.lam, config.rho_bar, config.c_bar)
        targets = expected["targets"]
    else:
        returns = slow.gae(rewards, [[0.0] * len(row) for row in rewards], found.mask, [0.0] * len(rewards), config.gamma, 1.0)["advantages"]
        expected, targets = {"advantages": slow.whiten(returns, found.mask)}, None
    advantages = slow.whiten(expected["advantages"], found.mask) if config.whiten and mode != "whiten" else expected["advantages"]
    credit = assign(flat, decided, loss, config, scored)
    num = len(flat.token_ids)
    np.testing.assert_allclose(credit.advantages, found.flat(advantages, num), rtol=1e-9, atol=1e-9)
    if targets is None:
        assert credit.targets is None
    else:
        assert credit.targets is not None
        np.testing.assert_allclose(credit.targets, found.flat(targets, num), rtol=1e-9, atol=1e-9)
        flat_targets, flat_values = (np.array([v for row in rows for v in row]) for rows in (targets, values))
        assert credit.metrics["value/explained_variance"] == pytest.approx(1 - np.var(flat_targets - flat_values) / np.var(flat_targets))
        assert credit.metrics["value/return_mean"] == pytest.approx(flat_targets.mean())


@pytest.mark.parametrize("mode", ["mean", "grpo", "rloo", "opo", "batch_std", "none"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "abs"])
def test_a_kl_term_in_the_reward_adds_its_discounted_sum_to_a_trajectorys_advantage(mode: str, kl: Any) -> None:
    rng = np.random.default_rng([len(mode), len(kl)])
    config, loss = Advantage(mode=mode, gamma=0.9), Loss(kl=kl, kl_in="reward", kl_coef=0.3)
    batch, flat, decided, scored = laid_out(rng, config, loss)
    found = Slow(batch, decided.shaped_rewards.tolist())
    penalties = kl_rewards(found, scored, loss)
    zeros = [[0.0] * len(row) for row in penalties]
    togo = slow.gae(penalties, zeros, found.mask, [0.0] * len(zeros), 0.9, 1.0)["advantages"]
    expected = [[decided.advantages[number] + g for g in row] for number, row in zip(found.number, togo, strict=True)]
    credit = assign(flat, decided, loss, config, scored)
    np.testing.assert_allclose(credit.advantages, found.flat(expected, len(flat.token_ids)), rtol=1e-9, atol=1e-9)
    assert credit.targets is None


def test_whitening_makes_mean_zero_and_deviation_one_over_the_tokens_that_train() -> None:
    config = Advantage(mode="mean", whiten=True)
    _, flat, decided, scored = laid_out(np.random.default_rng(3), config, Loss())
    advantages = assign(flat, decided, Loss(), config, scored).advantages
    assert advantages[flat.trained(decided)].mean() == pytest.approx(0, abs=1e-12)
    assert advantages[flat.trained(decided)].std() == pytest.approx(1)
    assert (advantages[~flat.trained(decided)] == 0).all()


def test_rewards_of_the_tokens_of_a_trajectory_sum_to_its_shaped_reward() -> None:
    config = Advantage(mode="whiten", overlong=Overlong(max_len=8, buffer=4))
    batch, flat, decided, _ = laid_out(np.random.default_rng(5), config, Loss())
    with_zero_values = assign(flat, decided, Loss(), config.model_copy(update={"mode": "gae"}), Scored())
    found = Slow(batch, decided.shaped_rewards.tolist())
    assert len(found.places) >= 4
    for number, places in zip(found.number, found.places, strict=True):  # gamma = lam = 1 and V = 0: the first advantage is the sum of all rewards
        assert with_zero_values.advantages[places[0]] == pytest.approx(decided.shaped_rewards[number])


def test_what_was_cut_is_fed_one_token_further_and_scored_nowhere_else() -> None:
    rng = np.random.default_rng(11)
    batch = batch_of(rng, groups=6)
    flat = flatten(batch, max_lag=4)
    decided = plan(flat.rows, Loss(), Advantage(mode="gae"), "keep")
    plain, further = pack(flat, decided, 40), pack(flat, decided, 40, bootstraps=True)
    found = Slow(batch, decided.shaped_rewards.tolist())
    cut = {number: places[-1] for number, places, is_cut in zip(found.number, found.places, found.cut, strict=True) if is_cut}
    assert len(cut) > 1
    assert all(len(one.after) == 0 for one in plain)
    seen = {int(number): int(one.input_ids[0, at]) for one in further for number, at in zip(one.after_trajectory, one.after, strict=True)}
    assert seen == {number: int(flat.token_ids[place]) for number, place in cut.items()}
    assert sum(one.num_tokens for one in further) == sum(one.num_tokens for one in plain) + len(cut)
    for batches in (plain, further):
        scored = sorted(int(place) for one in batches for place in one.scored)
        assert scored == np.flatnonzero(flat.trained(decided)).tolist()
        for one in batches:
            assert one.targets.tolist() == flat.token_ids[one.scored].tolist()


def test_an_empty_batch_and_a_batch_without_turns_are_no_error() -> None:
    batch = batch_of(np.random.default_rng(2))
    flat = flatten(batch, max_lag=4)
    nobody = Batch(0, VERSION, batch.groups, batch.trajectories, frozenset((t.key.group_id, t.key.member) for t in batch.trajectories))
    empty = flatten(nobody, max_lag=4)
    for mode in ("gae", "vtrace", "whiten"):
        config = Advantage(mode=mode, whiten=True)
        decided = plan(empty.rows, Loss(), config, "keep")
        assert decided.skip
        assert not assign(empty, decided, Loss(), config, Scored()).advantages.any()
        bare = replace(flat, turns=NO_TURNS)
        assert assign(bare, plan(bare.rows, Loss(), config, "keep"), Loss(), config, Scored()).advantages.any()


def test_a_turn_reward_that_is_not_finite_is_refused_by_the_trajectorys_name() -> None:
    batch = batch_of(np.random.default_rng(2))
    first = batch.trajectories[0].segments[0]
    bad = msgspec.structs.replace(first, turn_rewards=(float("nan"), *first.turn_rewards[1:]))
    one = batch.trajectories[0]
    trajectory = Trajectory(one.key, "env", 0, 0, "train", (bad,), 1.0, "terminated", "terminated")
    with pytest.raises(DataRefused, match="group 0 member 0 has a turn with reward nan"):
        flatten(Batch(0, VERSION, (0,), (trajectory,)), max_lag=4)
