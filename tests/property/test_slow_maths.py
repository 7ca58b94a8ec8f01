"""Random batches through the functions that training uses, against the algorithms page in plain loops (slow_losses.py, slow_advantages.py)."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import slow_advantages
import slow_losses as slow
from rollstream.learner.golden import check_case
from rollstream.learner.losses import loss_names

LOSSES = ["pg", "is", "ppo", "cispo", "gspo", "gspo_token", "gmpo", "sapo", "spo", "topr", "dro", "dro_seq", "minirl", "dppo_tv", "dppo_kl", "m2po"]
AGGREGATIONS = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_fixed", "traj_mean_token_mean", "group_mean_token_mean", "fixed"]
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=12, deadline=None, derandomize=True, database=None)


def matches(kind, inputs, hyper, expect, dtype="float64"):
    verdict = check_case({"id": "random", "kind": kind, "inputs": inputs, "hyper": hyper, "expect": expect}, dtype)
    assert verdict.passed, f"{verdict.problem}\n{hyper}\n{inputs}"


def grid(rng, rows, width, low, high):
    return [[rng.uniform(low, high) for _ in range(width)] for _ in range(rows)]


def near(rng, values, width):
    return [[min(-1e-3, v + rng.gauss(0, width)) for v in row] for row in values]


def mask_of(rng, rows, width):
    """Holes, empty rows, now and then nothing at all."""
    density = rng.choice([0.0, 0.6, 0.6, 0.9, 1.0])
    mask = [[float(rng.random() < density) for _ in range(width)] for _ in range(rows)]
    if rng.random() < 0.3:
        mask[rng.randrange(rows)] = [0.0] * width
    return mask


def poison(rng, inputs):
    """Junk wherever nothing may look."""
    for name in ("cur", "prox", "mu", "ref", "entropy"):
        for row, marks in zip(inputs.get(name, []), inputs["mask"], strict=False):
            for t, mark in enumerate(marks):
                if not mark and rng.random() < 0.5:
                    row[t] = rng.choice(["nan", "inf", 5.0])


def rule_of(rng):
    low, high = sorted(rng.uniform(0.5, 1.6) for _ in range(2))
    mode = rng.choice(["truncate", "clip", "mask", "reject"])
    rule = {"level": rng.choice(["token", "sequence", "geometric", "min", "max"]), "mode": mode, "low": low, "high": high}
    if mode == "truncate" or rng.random() < 0.3:
        del rule["low"]
    return rule


def hyper_of(rng, loss):
    old = rng.choice(["prox", "prox", "mu", "cur"])
    hyper = {
        "loss": loss,
        "old": old,
        "eps_low": rng.choice([0.01, 0.2, 1.0]),
        "eps_high": rng.choice([0.01, 0.2, 0.28]),
        "dual_clip": rng.choice([None, 1.1, 3.0]),
        "agg": rng.choice(AGGREGATIONS),
        "length": 7.5,
        "const": 40,
        "delta": rng.choice([0.02, 0.1]),
        "is_cap": rng.choice([None, 1.3, 5.0]),
        "dro_beta": rng.choice([0.0, 0.5]),
        "tau_neg": rng.choice([1.05, 2.0]),
        "m2_threshold": rng.choice([1e-4, 0.01, 0.04]),
        "m2_directional": rng.random() < 0.5,
        "mu_sq_coef": rng.choice([0.0, 0.01]),
        "opsm_delta": rng.choice([None, -0.05, 0.05]),
        "entropy_coef": rng.choice([0.0, 0.01]),
    }
    if old != "mu" and rng.random() < 0.7:
        hyper["correction"] = [rule_of(rng) for _ in range(rng.choice([1, 1, 2]))]
        hyper["correction_unit"] = rng.choice(["row", "trajectory"])
        hyper["self_normalise"] = rng.random() < 0.3
    if rng.random() < 0.5:
        hyper |= {"kl": rng.choice(["k1", "k2", "k3", "abs"]), "kl_coef": rng.choice([0.0, 0.1]), "kl_is": rng.random() < 0.5}
    return hyper


def inputs_of(rng, hyper, rows=None):
    rows, width = rows or rng.randint(1, 5), rng.randint(1, 6)
    spread = rng.choice([0.05, 0.5, 15.0])
    cur = grid(rng, rows, width, -3.0 if spread < 1 else -40.0, -1e-3)
    per_token = rng.random() < 0.3

    def advantage():
        return rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 1)])

    inputs = {"cur": cur, "mask": mask_of(rng, rows, width), "prox": near(rng, cur, spread), "mu": near(rng, cur, spread), "ref": near(rng, cur, spread)}
    inputs["entropy"] = grid(rng, rows, width, 0.0, 2.0)
    inputs["adv"] = [[advantage() for _ in range(width)] if per_token else advantage() for _ in range(rows)]
    for name, needed in (("prox", False), ("mu", hyper["old"] == "mu")):
        if not needed and rng.random() < 0.3:
            del inputs[name]
    if rng.random() < 0.7:
        inputs["row_traj"] = sorted(rng.randrange(rows) for _ in range(rows))
        inputs["row_group"] = [traj // 2 for traj in inputs["row_traj"]]
    return inputs


@pytest.mark.parametrize("name", LOSSES)
@quick
@given(seed=seeds)
def test_every_loss_equals_the_page_in_value_gradient_weights_and_metrics(name, seed):
    rng = random.Random(seed)
    hyper = hyper_of(rng, name)
    inputs = inputs_of(rng, hyper)
    expect = slow.loss(inputs, hyper)
    poison(rng, inputs)
    matches("loss", inputs, hyper, expect)


def test_the_losses_compared_are_all_there_are():
    assert sorted(LOSSES) == loss_names()


@quick
@given(seed=seeds)
def test_drop_mode_takes_tokens_out_of_numerators_and_leaves_the_denominators(seed):
    rng = random.Random(seed)
    hyper = hyper_of(rng, rng.choice(LOSSES)) | {"nonfinite": "drop"}
    inputs = inputs_of(rng, hyper)
    for name in ("cur", "prox", "mu"):
        for row in inputs.get(name, []):
            for t in range(len(row)):
                row[t] = rng.choice([float("nan"), float("-inf"), float("inf")]) if rng.random() < 0.15 else row[t]
    matches("loss", inputs, hyper, slow.loss(inputs, hyper))


@quick
@given(seed=seeds)
def test_any_split_over_ranks_and_micro_batches_gives_the_whole_batch(seed):
    rng = random.Random(seed)
    hyper = hyper_of(rng, rng.choice(LOSSES))
    inputs = inputs_of(rng, hyper, rows=6)
    whole = slow.loss(inputs, hyper)
    order = rng.sample(range(6), 6)
    cuts = sorted(rng.sample(range(7), 3))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    hyper["ranks"] = rng.choice([[parts], [parts[:2], parts[2:]], [parts[:1], parts[1:3], parts[3:]]])
    matches("split", inputs, hyper, {"loss": whole["loss"], "grad": whole["grad"]})


@quick
@given(seed=seeds)
def test_every_aggregation_equals_the_page(seed):
    rng = random.Random(seed)
    rows = rng.randint(1, 6)
    mask = mask_of(rng, rows, 4)
    traj = [rng.randrange(rows) for _ in range(rows)]
    inputs = {"mask": mask, "row_traj": traj, "row_group": [t // 2 for t in traj]}
    for mode in AGGREGATIONS:
        expect = slow.aggregation(mask, traj, inputs["row_group"], mode, 9, 64)
        matches("agg", inputs, {"mode": mode, "length": 9, "const": 64}, {"agg": expect})


def rewards_of(rng, num):
    kind = rng.choice(["binary", "real", "same", "nearly"])
    draw = {
        "binary": lambda: float(rng.random() < 0.5),
        "real": lambda: rng.gauss(0, 3),
        "same": lambda: 0.7,
        "nearly": lambda: 100 + rng.choice([0, 1e-8, 1e-6]),
    }
    return [draw[kind]() for _ in range(num)]


@quick
@given(seed=seeds)
def test_every_advantage_mode_equals_the_page(seed):
    rng = random.Random(seed)
    num = rng.randint(1, 10)
    groups = [rng.randrange(4) * 3 for _ in range(num)]
    rewards = rewards_of(rng, num)
    include = [float(rng.random() < 0.8) for _ in range(num)]
    lengths = [rng.randint(1, 50) for _ in range(num)]
    inputs = {"rewards": [r if i else "nan" for r, i in zip(rewards, include, strict=True)], "groups": groups, "include": include, "lengths": lengths}
    for mode in ("mean", "grpo", "rloo", "opo", "batch_std", "none"):
        hyper = {"mode": mode, "ddof": rng.choice([0, 1]), "eps": rng.choice([1e-6, 1e-3]), "std_over": rng.choice(["all", "live"])}
        matches("advantage", inputs, hyper, slow_advantages.advantage(rewards, groups, hyper, include, lengths))


@quick
@given(seed=seeds)
def test_staleness_equals_the_page_at_every_level(seed):
    rng = random.Random(seed)
    rows = rng.randint(1, 5)
    mask = mask_of(rng, rows, 4)
    versions = [[rng.randint(0, 8) if m else 99 for m in row] for row in mask]
    unit = [rng.randrange(rows) for _ in range(rows)]
    for level in ("token", "row", "trajectory", "group"):
        hyper = {"current": 8, "limit": rng.randint(0, 8), "level": level}
        expect = slow_advantages.staleness(versions, mask, 8, hyper["limit"], level, unit)
        matches("staleness", {"versions": versions, "mask": mask, "unit": unit}, hyper, expect)


@quick
@given(seed=seeds)
def test_gae_vtrace_whitening_and_kl_in_the_reward_equal_the_page(seed):
    rng = random.Random(seed)
    rows = rng.randint(1, 4)
    mask = mask_of(rng, rows, 5)
    rewards, values, bootstrap = grid(rng, rows, 5, -1, 1), grid(rng, rows, 5, -1, 1), [rng.gauss(0, 1) for _ in range(rows)]
    cur = grid(rng, rows, 5, -3, 0)
    mu = near(rng, cur, 0.7)
    discount = {"gamma": rng.choice([1.0, 0.9]), "lam": rng.choice([1.0, 0.8])}
    bars = {"rho_bar": rng.choice([0.8, 1.0, 2.0]), "c_bar": rng.choice([0.5, 1.0])}
    token = {"rewards": rewards, "values": values, "mask": mask, "bootstrap": bootstrap}
    matches("gae", token, discount, slow_advantages.gae(rewards, values, mask, bootstrap, **discount))
    matches(
        "vtrace", {**token, "cur": cur, "mu": mu}, {**discount, **bars}, slow_advantages.vtrace(cur, mu, rewards, values, mask, bootstrap, **discount, **bars)
    )
    matches("whiten", {"adv": values, "mask": mask}, {}, {"advantages": slow_advantages.whiten(values, mask)})
    hyper = {"coef": 0.1, "gamma": discount["gamma"]}
    matches("kl_reward", {"rewards": bootstrap, "prox": cur, "ref": mu, "mask": mask}, hyper, slow_advantages.kl_reward(bootstrap, cur, mu, mask, **hyper))


@quick
@given(seed=seeds)
def test_logprobs_and_entropy_equal_the_page_at_any_temperature_and_truncation(seed):
    rng = random.Random(seed)
    logits = grid(rng, 5, 7, -6, 6)
    tokens = [rng.randrange(7) for _ in range(5)]
    for hyper in ({}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 1.7, "top_k": 4, "top_p": 0.9}):
        matches("logprobs", {"logits": logits, "tokens": tokens}, hyper, slow_advantages.logprobs(logits, tokens, **hyper))


@quick
@given(seed=seeds)
def test_the_pipeline_equals_its_steps_taken_one_by_one(seed):
    rng = random.Random(seed)
    hyper = hyper_of(rng, rng.choice(LOSSES))
    inputs = inputs_of(rng, hyper, rows=6)
    row_traj, groups = [0, 0, 1, 2, 3, 4], [0, 0, 1, 1, 1]
    rewards, truncated = rewards_of(rng, 5), [float(rng.random() < 0.3) for _ in range(5)]
    versions = [[rng.randint(0, 4) for _ in row] for row in inputs["mask"]]
    options = {
        "mode": rng.choice(["mean", "grpo", "rloo", "opo", "batch_std"]),
        "degenerate": rng.choice(["keep", "drop"]),
        "truncated": rng.choice(["keep", "mask", "exclude"]),
    }
    overlong = rng.choice([None, {"max_len": 6, "buffer": 4, "factor": 0.5}])
    stale = rng.choice([None, {"current": 4, "limit": 2, "level": rng.choice(["token", "row", "trajectory", "group"])}])

    mask = [list(row) for row in inputs["mask"]]
    length = [int(sum(sum(mask[b]) for b in range(6) if row_traj[b] == k)) for k in range(5)]
    shaped = list(rewards)
    if overlong:
        shaped = [r - 0.5 * min(1.0, max(0.0, (n - 2) / 4)) for r, n in zip(rewards, length, strict=True)]
    include = [1 - t for t in truncated] if options["truncated"] == "exclude" else None
    counted = [max(n, 1) for n in length] if sum(length) == 0 else length
    if options["mode"] == "opo" and any(sum(counted[i] for i in range(5) if groups[i] == g and (include is None or include[i])) == 0 for g in (0, 1)):
        options["mode"] = "mean"
    scored = slow_advantages.advantage(shaped, groups, {"mode": options["mode"]}, include, counted)
    for b, k in enumerate(row_traj):
        if (truncated[k] and options["truncated"] != "keep") or (scored["degenerate"][k] and options["degenerate"] == "drop"):
            mask[b] = [0.0] * len(mask[b])
    expect = {"advantages": scored["advantages"]}
    if stale:
        unit = {"trajectory": row_traj, "group": [groups[k] for k in row_traj]}.get(stale["level"])
        found = slow_advantages.staleness(versions, mask, 4, 2, stale["level"], unit)
        mask = [[float(m) for m in row] for row in found.pop("keep")]
        expect["staleness"] = found
        hyper["stale"] = stale
    if overlong:
        hyper["overlong"] = overlong
    given_inputs = {k: v for k, v in inputs.items() if k not in ("adv", "row_traj", "row_group")}
    after = {**given_inputs, "mask": mask, "adv": [scored["advantages"][k] for k in row_traj], "row_traj": row_traj, "row_group": [groups[k] for k in row_traj]}
    loss_keys = {k: v for k, v in hyper.items() if k not in ("stale", "overlong")}
    expect |= {"mask": mask, **slow.loss(after, loss_keys)}
    given_inputs |= {"rewards": rewards, "traj_group": groups, "row_traj": row_traj, "truncated": truncated, "versions": versions}
    matches("pipeline", given_inputs, {**hyper, "advantage": options}, expect)
