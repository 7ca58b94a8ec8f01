"""The algorithms page once more, in plain Python loops over [row][token] lists: losses, corrections, aggregations, metrics.

Written from the page alone: what the fast functions are compared with. Gradients come from its slope column, not from automatic differentiation.
"""

import math

LOSS_DEFAULTS = {
    "loss": "ppo", "old": "prox", "eps_low": 0.2, "eps_high": 0.2, "dual_clip": None, "agg": "token_mean", "length": None, "const": None, "correction": [],
    "correction_unit": "row", "self_normalise": False, "kl": None, "kl_coef": 0.0, "kl_is": False, "entropy_coef": 0.0, "tau_pos": 1.0, "tau_neg": 1.05,
    "opsm_delta": None, "mu_sq_coef": 0.0, "dro_beta": 0.0, "m2_threshold": 0.04, "m2_directional": True, "delta": 0.1, "is_cap": None, "nonfinite": "raise",
}  # fmt: skip


def bound(v):
    return min(20.0, max(-20.0, v))


def inside(v):
    """The slope of the clipped log ratio."""
    return 1.0 if -20.0 <= v <= 20.0 else 0.0


def ess(values, count):
    squares = sum(v * v for v in values)
    return sum(values) ** 2 / (count * squares) if squares else 0.0


def aggregation(mask, row_traj, row_group, mode, length=None, const=None):
    rows = range(len(mask))
    n = [sum(1 for m in row if m) for row in mask]
    n_traj = {k: sum(n[b] for b in rows if row_traj[b] == k) for k in row_traj}
    n_group = {k: sum(n[b] for b in rows if row_group[b] == k) for k in row_group}
    num_rows, num_traj, num_group = (sum(1 for v in counts if v) for counts in (n, n_traj.values(), n_group.values()))
    out = []
    for b in rows:
        if not n[b]:
            out.append([0.0] * len(mask[b]))
            continue
        a = {
            "token_mean": lambda b: 1 / sum(n),
            "seq_mean_token_sum": lambda b: 1 / num_rows,
            "seq_mean_token_mean": lambda b: 1 / (num_rows * n[b]),
            "seq_mean_fixed": lambda b: 1 / (num_rows * length),
            "traj_mean_token_mean": lambda b: 1 / (num_traj * n_traj[row_traj[b]]),
            "group_mean_token_mean": lambda b: 1 / (num_group * n_group[row_group[b]]),
            "fixed": lambda b: 1 / const,
        }[mode](b)
        out.append([a if m else 0.0 for m in mask[b]])
    return out


def correction(log_rho, active, units, hyper):
    """Weight and hit per token; ``active`` lists (b, t), ``units[b]`` names the unit of row b."""
    weight, hit = dict.fromkeys(active, 1.0), dict.fromkeys(active, False)
    for rule in hyper["correction"]:
        low = -math.inf if rule.get("low") is None else rule["low"]
        high = math.inf if rule.get("high") is None else rule["high"]
        for b, t in active:
            unit = [log_rho[k] for k in active if units[k[0]] == units[b]]
            statistic = {
                "token": math.exp(log_rho[b, t]),
                "sequence": math.exp(bound(sum(unit))),
                "geometric": math.exp(sum(unit) / len(unit)),
                "min": math.exp(min(unit)),
                "max": math.exp(max(unit)),
            }[rule["level"]]
            outside = statistic > high or (rule["mode"] != "truncate" and statistic < low)
            hit[b, t] = hit[b, t] or outside
            weight[b, t] *= {
                "truncate": min(statistic, high),
                "clip": min(max(statistic, low), high),
                "mask": 0.0 if outside else statistic,
                "reject": 0.0 if outside else 1.0,
            }[rule["mode"]]
    if hyper["self_normalise"] and active and sum(weight.values()):
        mean = sum(weight.values()) / len(active)
        weight = {k: v / mean for k, v in weight.items()}
    return weight, hit


def clip_flags(s, adv, hyper, dual=True):
    high = adv > 0 and s > 1 + hyper["eps_high"]
    low = adv < 0 and s < 1 - hyper["eps_low"]
    return high, low, bool(dual and hyper["dual_clip"] is not None and adv < 0 and s > hyper["dual_clip"])


def surrogate(s, adv, hyper):
    """Value, and whether the slope is that of -A s."""
    clipped = min(max(s, 1 - hyper["eps_low"]), 1 + hyper["eps_high"])
    value = max(-adv * s, -adv * clipped)
    if hyper["dual_clip"] is not None and adv < 0:
        value = min(value, -hyper["dual_clip"] * adv)
    return value, not any(clip_flags(s, adv, hyper))


def second_moment(active, adv, dmu, hyper):
    """M of m2po: drop the largest d^2 one by one."""
    left = [k for k in active if not hyper["m2_directional"] or adv[k] * dmu[k] > 0]
    dropped = set()
    while left and sum(dmu[k] ** 2 for k in left) / len(left) > hyper["m2_threshold"]:
        worst = max(left, key=lambda k: dmu[k] ** 2)
        left.remove(worst)
        dropped.add(worst)
    return {k: k not in dropped for k in active}


def bernoulli_kl(mu, pi):
    mu, pi, other_mu, other_pi = (max(p, 1e-300) for p in (mu, pi, 1 - mu, 1 - pi))
    return mu * math.log(mu / pi) + other_mu * math.log(other_mu / other_pi)


class Tokens:
    """Everything per active token, keyed (b, t)."""

    def __init__(self, inputs, hyper):
        mask, cur = inputs["mask"], inputs["cur"]
        self.shape = [(b, t) for b in range(len(mask)) for t in range(len(mask[b]))]
        given = {name: inputs.get(name) for name in ("cur", "prox", "mu")}
        counted = [k for k in self.shape if mask[k[0]][k[1]]]

        def finite(k):
            return all(values is None or math.isfinite(values[k[0]][k[1]]) for values in given.values())

        self.active = [k for k in counted if finite(k)]
        self.dropped = len(counted) - len(self.active)
        self.x = {(b, t): cur[b][t] for b, t in self.active}
        self.adv = {(b, t): inputs["adv"][b][t] if isinstance(inputs["adv"][b], list) else inputs["adv"][b] for b, t in self.active}

        def pick(name):
            return None if inputs.get(name) is None else {(b, t): inputs[name][b][t] for b, t in self.active}

        u, p = pick("mu"), pick("prox")
        if p is None:
            p = u if hyper["old"] == "mu" else self.x
        old = {"prox": p, "mu": u, "cur": self.x}[hyper["old"]]
        u = old if u is None else u
        self.u, self.q, self.entropy = u, pick("ref"), pick("entropy")
        self.raw_old = {k: self.x[k] - old[k] for k in self.active}
        self.raw_mu = {k: self.x[k] - u[k] for k in self.active}
        self.d = {k: bound(v) for k, v in self.raw_old.items()}
        self.dmu = {k: bound(v) for k, v in self.raw_mu.items()}
        self.drho = {k: bound(p[k] - u[k]) for k in self.active}

    def row(self, k):
        return [j for j in self.active if j[0] == k[0]]

    def rows(self):
        return sorted({b for b, _ in self.active})


def ell_and_slopes(t, hyper, aw):
    """``{k: ell}``, ``{k: sum_j aw_j d ell_j / d x_k}``, clip flags and M."""
    ell, grad, flags, trust = {}, dict.fromkeys(t.active, 0.0), {}, None
    name = hyper["loss"]
    if name == "m2po":
        trust = second_moment(t.active, t.adv, t.dmu, hyper)
    elif name in ("minirl", "dppo_tv", "dppo_kl"):
        trust = {}
    for k in t.active:
        adv, x, d, r, flow = t.adv[k], t.x[k], t.d[k], math.exp(t.d[k]), inside(t.raw_old[k])
        row = t.row(k)
        flags[k] = (False, False, False)
        if name == "pg":
            ell[k], slope = -adv * x, -adv
        elif name == "is":
            ell[k], slope = -adv * r, -adv * r * flow
        elif name == "ppo":
            ell[k], live = surrogate(r, adv, hyper)
            slope, flags[k] = (-adv * r * flow if live else 0.0), clip_flags(r, adv, hyper)
        elif name == "cispo":
            weight = min(max(r, 1 - hyper["eps_low"]), 1 + hyper["eps_high"])
            ell[k], slope = -weight * adv * x, -adv * weight
            flags[k] = (r > 1 + hyper["eps_high"], r < 1 - hyper["eps_low"], False)
        elif name in ("gspo", "gspo_token"):
            s = math.exp(sum(t.d[j] for j in row) / len(row))
            ell[k], live = surrogate(s, adv, hyper)
            flags[k] = clip_flags(s, adv, hyper)
            slope = -adv * s if live else 0.0
            if name == "gspo":
                for j in row:
                    grad[j] += aw[k] * slope / len(row) * inside(t.raw_old[j])
                continue
        elif name == "gmpo":
            c = {j: min(t.d[j], hyper["eps_high"]) if t.adv[j] > 0 else max(t.d[j], -hyper["eps_low"]) for j in row}
            mean = math.exp(sum(c.values()) / len(row))
            ell[k] = -adv * mean
            flags[k] = (d > hyper["eps_high"] and adv > 0, d < -hyper["eps_low"] and adv < 0, False)
            for j in row:
                free = t.d[j] <= hyper["eps_high"] if t.adv[j] > 0 else t.d[j] >= -hyper["eps_low"]
                grad[j] += aw[k] * -adv * mean / len(row) * inside(t.raw_old[j]) * free
            continue
        elif name == "sapo":
            tau = hyper["tau_pos"] if adv > 0 else hyper["tau_neg"]
            z = 1 / (1 + math.exp(-tau * (r - 1))) if tau * (r - 1) > -700 else 0.0
            ell[k], slope = -adv * 4 / tau * z, -adv * 4 * z * (1 - z) * r * flow
        elif name == "spo":
            ell[k] = -(adv * r - abs(adv) / (2 * hyper["eps_high"]) * (r - 1) ** 2)
            slope = -(adv - abs(adv) / hyper["eps_high"] * (r - 1)) * r * flow
        elif name == "topr":
            weight = 1.0 if adv >= 0 else min(1.0, math.exp(bound(sum(t.dmu[j] for j in row))))
            ell[k], slope = -weight * adv * x, -weight * adv
        elif name == "dro":
            ell[k], slope = -adv * x + hyper["dro_beta"] / 2 * d * d, -adv + hyper["dro_beta"] * d * flow
        elif name == "dro_seq":
            total = sum(t.d[j] for j in row)
            ell[k], slope = -adv * x + hyper["dro_beta"] / 2 * total**2 / len(row), -adv
            for j in row:
                grad[j] += aw[k] * hyper["dro_beta"] * total / len(row) * inside(t.raw_old[j])
        else:
            pi, mu = math.exp(x), math.exp(t.u[k])
            if name == "minirl":
                flags[k] = clip_flags(r, adv, hyper, dual=False)
                trust[k] = not any(flags[k])
            elif name == "dppo_tv":
                trust[k] = not (adv * (pi - mu) > 0 and abs(pi - mu) > hyper["delta"])
            elif name == "dppo_kl":
                trust[k] = not (adv * (pi - mu) > 0 and bernoulli_kl(mu, pi) > hyper["delta"])
            weight = math.exp(t.dmu[k])
            weight = weight if hyper["is_cap"] is None else min(weight, hyper["is_cap"])
            ell[k], slope = (-weight * adv * x, -weight * adv) if trust[k] else (0.0, 0.0)
        grad[k] += aw[k] * slope
    return ell, grad, flags, trust


def kl_and_slope(kind, raw):
    d = bound(raw)
    value = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[kind]
    slope = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d), "abs": math.copysign(1.0, d) if d else 0.0}[kind]
    return value, slope * inside(raw)


def loss(inputs, hyper):
    """The outputs of a loss case."""
    hyper = {**LOSS_DEFAULTS, **hyper}
    t = Tokens(inputs, hyper)
    num_rows = len(inputs["mask"])
    row_traj, row_group = inputs.get("row_traj", list(range(num_rows))), inputs.get("row_group", list(range(num_rows)))
    agg = inputs["agg"] if "agg" in inputs else aggregation(inputs["mask"], row_traj, row_group, hyper["agg"], hyper["length"], hyper["const"])
    a = {(b, s): agg[b][s] for b, s in t.active}
    units = row_traj if hyper["correction_unit"] == "trajectory" else list(range(num_rows))
    w, hit = correction(t.drho, t.active, units, hyper)
    weights = dict(w)
    if hyper["opsm_delta"] is not None:
        for k in t.active:
            row = t.row(k)
            if t.adv[k] < 0 and sum(-t.dmu[j] for j in row) / len(row) > hyper["opsm_delta"]:
                weights[k] = 0.0
    ell, grad, flags, trust = ell_and_slopes(t, hyper, {k: a[k] * weights[k] for k in t.active})
    total, kl_ref = sum(a[k] * weights[k] * ell[k] for k in t.active), 0.0
    for k in t.active:
        if hyper["kl"] is not None:
            value, slope = kl_and_slope(hyper["kl"], t.x[k] - t.q[k])
            kl_ref += value
            if hyper["kl_is"]:
                ratio = math.exp(t.dmu[k])
                slope, value = ratio * (slope + value * inside(t.raw_mu[k])), ratio * value
            total += a[k] * hyper["kl_coef"] * value
            grad[k] += a[k] * hyper["kl_coef"] * slope
        total += a[k] * hyper["mu_sq_coef"] * t.dmu[k] ** 2
        grad[k] += a[k] * hyper["mu_sq_coef"] * 2 * t.dmu[k] * inside(t.raw_mu[k])
        if hyper["entropy_coef"]:
            total -= a[k] * hyper["entropy_coef"] * t.entropy[k]

    def grid(values):
        return [[float(values.get((b, s), 0.0)) for s in range(len(inputs["mask"][b]))] for b in range(num_rows)]

    return {"loss": total, "grad": grid(grad), "weights": grid(weights), "agg": agg, "metrics": metrics(t, hyper, w, hit, flags, trust, kl_ref)}


def metrics(t, hyper, w, hit, flags, trust, kl_ref):
    n = len(t.active)
    if not n:
        return {"active_tokens": 0, "skip_step": True}

    def mean(values):
        return sum(values) / n

    ratio, rho = [math.exp(t.d[k]) for k in t.active], [math.exp(t.drho[k]) for k in t.active]
    rows = {b: [k for k in t.active if k[0] == b] for b in t.rows()}
    out = {
        "active_tokens": n,
        "skip_step": False,
        "dropped_nonfinite": t.dropped,
        "clip_frac_high": mean(flags[k][0] for k in t.active),
        "clip_frac_low": mean(flags[k][1] for k in t.active),
        "clip_frac_dual": mean(flags[k][2] for k in t.active),
        "clip_frac": mean(any(flags[k]) for k in t.active),
        "ratio_mean": mean(ratio),
        "ratio_max": max(ratio),
        "ratio_ess": ess(ratio, n),
        "ratio_seq_ess": ess([math.exp(bound(sum(t.d[k] for k in row))) for row in rows.values()], len(rows)),
        "kl_old_k1": mean(-t.d[k] for k in t.active),
        "kl_old_k3": mean(math.exp(t.d[k]) - 1 - t.d[k] for k in t.active),
        "is_mean": mean(rho),
        "is_std": math.sqrt(mean((v - mean(rho)) ** 2 for v in rho)),
        "is_min": min(rho),
        "is_max": max(rho),
        "is_ess": ess(rho, n),
        "is_seq_ess": ess([math.exp(bound(sum(t.drho[k] for k in row))) for row in rows.values()], len(rows)),
        "is_geo_mean": sum(math.exp(sum(t.drho[k] for k in row) / len(row)) for row in rows.values()) / len(rows),
        "w_mean": mean(w.values()),
        "w_ess": ess(list(w.values()), n),
        "w_hit_frac": mean(hit.values()),
        "w_zero_frac": mean(v == 0 for v in w.values()),
        "kl_mu_k1": mean(-t.drho[k] for k in t.active),
        "kl_mu_k3": mean(math.exp(t.drho[k]) - 1 - t.drho[k] for k in t.active),
    }
    if trust is not None:
        out["trust_masked_frac"] = mean(not trust[k] for k in t.active)
    if hyper["kl"] is not None:
        out["kl_ref"] = kl_ref / n
    return out
