"""The algorithms page once more, in plain Python loops over [row][token] lists: advantages, staleness, returns, log-probabilities.

Written from the page alone: what the fast functions are compared with.
"""

import math


def bound(v):
    return min(20.0, max(-20.0, v))


def advantage(rewards, groups, hyper, include=None, lengths=None):
    hyper = {"eps": 1e-6, "ddof": 1, "std_over": "all", **hyper}
    n = len(rewards)
    include = [True] * n if include is None else include
    adv, flag, centred = [0.0] * n, [0 if include[i] else 1 for i in range(n)], {}
    for g in set(groups):
        members = [i for i in range(n) if groups[i] == g and include[i]]
        values = [rewards[i] for i in members]
        if len(values) < 2 or max(values) - min(values) <= 1e-9 * max(1.0, *(abs(v) for v in values)):
            for i in range(n):
                if groups[i] == g:
                    flag[i] = 1
            centred.update(dict.fromkeys(members, (0.0, False)))
            continue
        mean = sum(values) / len(values)
        std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - hyper["ddof"]))
        for i in members:
            others = [rewards[j] for j in members if j != i]
            if hyper["mode"] in ("mean", "batch_std"):
                adv[i] = rewards[i] - mean
            elif hyper["mode"] == "grpo":
                adv[i] = (rewards[i] - mean) / (std + hyper["eps"])
            elif hyper["mode"] == "rloo":
                adv[i] = rewards[i] - sum(others) / len(others)
            elif hyper["mode"] == "opo":
                adv[i] = rewards[i] - sum(lengths[j] * rewards[j] for j in members) / sum(lengths[j] for j in members)
            else:
                adv[i] = rewards[i]
            centred[i] = (rewards[i] - mean, True)
    if hyper["mode"] == "batch_std":
        counted = [value for value, live in centred.values() if live or hyper["std_over"] == "all"]
        if any(live for _, live in centred.values()):
            mean = sum(counted) / len(counted)
            std = math.sqrt(sum((v - mean) ** 2 for v in counted) / (len(counted) - hyper["ddof"]))
            adv = [v / (std + hyper["eps"]) for v in adv]
    return {"advantages": adv, "degenerate": flag}


def staleness(versions, mask, current, limit, level, unit=None):
    rows = range(len(mask))
    unit = list(rows) if unit is None or level == "row" else unit
    lag = {(b, t): current - versions[b][t] for b in rows for t in range(len(mask[b])) if mask[b][t]}
    keep = [[0] * len(mask[b]) for b in rows]
    for b, t in lag:
        oldest = lag[b, t] if level == "token" else max(v for k, v in lag.items() if unit[k[0]] == unit[b])
        keep[b][t] = int(oldest <= limit)
    values = list(lag.values())
    return {
        "keep": keep,
        "max": max(values, default=0),
        "mean": sum(values) / len(values) if values else 0.0,
        "dropped_tokens": sum(1 for b, t in lag if not keep[b][t]),
    }


def walk(row_mask):
    """Active positions with the next active one, last first."""
    active = [t for t, m in enumerate(row_mask) if m]
    return [(t, following) for t, following in reversed(list(zip(active, [*active[1:], None], strict=False)))]


def gae(rewards, values, mask, bootstrap, gamma, lam):
    adv = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        for t, following in walk(row):
            value = bootstrap[b] if following is None else values[b][following]
            delta = rewards[b][t] + gamma * value - values[b][t]
            adv[b][t] = delta + gamma * lam * (0.0 if following is None else adv[b][following])
    returns = [[adv[b][t] + values[b][t] if m else 0.0 for t, m in enumerate(row)] for b, row in enumerate(mask)]
    return {"advantages": adv, "returns": returns}


def vtrace(cur, mu, rewards, values, mask, bootstrap, gamma, lam=1.0, rho_bar=1.0, c_bar=1.0):
    """IMPALA eq. 1 as the sum it is: V + sum_k gamma^k (prod c) delta."""
    targets, adv = ([[0.0] * len(row) for row in mask] for _ in range(2))
    for b, row in enumerate(mask):
        active = [t for t, m in enumerate(row) if m]
        ratio = {t: math.exp(bound(cur[b][t] - mu[b][t])) for t in active}
        for i, start in enumerate(active):
            total, discount, product = values[b][start], 1.0, 1.0
            for j in range(i, len(active)):
                t = active[j]
                following = bootstrap[b] if j + 1 == len(active) else values[b][active[j + 1]]
                total += discount * product * min(rho_bar, ratio[t]) * (rewards[b][t] + gamma * following - values[b][t])
                discount *= gamma
                product *= lam * min(c_bar, ratio[t])
            targets[b][start] = total
        for t, following in walk(row):
            target = bootstrap[b] if following is None else targets[b][following]
            adv[b][t] = min(rho_bar, ratio[t]) * (rewards[b][t] + gamma * target - values[b][t])
    return {"targets": targets, "advantages": adv}


def whiten(values, mask):
    active = [values[b][t] for b, row in enumerate(mask) for t, m in enumerate(row) if m]
    out = [[0.0] * len(row) for row in mask]
    if len(active) < 2:
        return out
    mean = sum(active) / len(active)
    std = math.sqrt(sum((v - mean) ** 2 for v in active) / len(active))
    return [[(values[b][t] - mean) / (std + 1e-8) if m else 0.0 for t, m in enumerate(row)] for b, row in enumerate(mask)]


def kl_reward(rewards, prox, ref, mask, coef, gamma=1.0):
    token, returns = ([[0.0] * len(row) for row in mask] for _ in range(2))
    for b, row in enumerate(mask):
        for t, following in walk(row):
            token[b][t] = -coef * (prox[b][t] - ref[b][t]) + (rewards[b] if following is None else 0.0)
            returns[b][t] = token[b][t] + (0.0 if following is None else gamma * returns[b][following])
    return {"token_rewards": token, "returns": returns, "advantages": whiten(returns, mask)}


def logprobs(logits, tokens, temperature=1.0, top_k=None, top_p=None):
    out, entropies = [0.0], [0.0]
    for t in range(1, len(tokens)):
        z = [v / temperature for v in logits[t - 1]]
        p = [math.exp(v - max(z)) for v in z]
        p = [v / sum(p) for v in p]
        entropies.append(-sum(v * math.log(v) for v in p if v))
        kept = sorted(range(len(p)), key=lambda i: -p[i])[: top_k or len(p)]
        if top_p is not None:
            mass, total, nucleus = sum(p[i] for i in kept), 0.0, []
            for i in kept:
                if total >= top_p:
                    break
                nucleus.append(i)
                total += p[i] / mass
            kept = nucleus
        mass = sum(p[i] for i in kept)
        out.append(math.log(p[tokens[t]] / mass) if tokens[t] in kept else -math.inf)
    return {"logprobs": out, "entropy": entropies}
