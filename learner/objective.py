"""The objective: one callable from live log-probabilities to the scalar that is differentiated and the numbers that are reported.

    L = sum a w ell + sum a (kl_coef KL + mu_sq_coef d(x, u)^2 - entropy_coef H)

Flat tokens of whole rows come in, so packed micro-batches and padded ones take the same path. All arithmetic is float64, whatever the dtype of the
log-probabilities (the tensors are [P], the cost is nothing beside the model), so the sum does not depend on how the batch was split; the gradient goes back
in the dtype it came in. A step with one update per batch:

    objective = Objective(config.learner.loss)
    if objective.needs_proximal_pass:                     # whole batch: log-probabilities without gradient first
        terms = objective.batch_terms(x_all, tokens_all)  # tokens of all micro-batches of all ranks
    stats = Stats()
    for tokens, index in micro_batches:                   # index: where these tokens lie in the whole batch
        loss, part = objective(x, terms.put(tokens, index) if objective.needs_proximal_pass else tokens, entropy)
        (world_size * loss).backward()
        stats = stats.merge(part)
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from ..configs.learner_schema import Loss
from ..errors import ConfigError
from .aggregation import row_weights
from .corrections import CorrectionWeight, check_rule, correction_weight, self_normalised
from .kl import kl_estimate
from .losses import PerToken, Terms, loss_named
from .ratios import log_ratio
from .registered import calling, of_kind, tensor_like
from .segments import Segments
from .stats import Measured, Stats
from .tokens import Anchored, Tokens, anchor

__all__ = ["BatchTerms", "Objective", "Stats", "Tokens"]


@dataclass(frozen=True, slots=True)
class BatchTerms:
    """What only the whole global batch knows, ``[P_global]``: correction ``weight`` with ``hit``, and the trust mask. None: not needed."""

    weight: Tensor | None
    hit: Tensor | None
    trust: Tensor | None

    def put(self, tokens: Tokens, index: Tensor | slice) -> Tokens:
        """The micro-batch with its share filled in; ``index`` says where its tokens lie in the whole batch."""
        weight, hit, trust = (None if whole is None else whole[index] for whole in (self.weight, self.hit, self.trust))
        return replace(tokens, weight=weight, hit=hit, trust=trust)


class Objective:
    """One configured loss with its corrections and extras. Construction refuses what cannot mean anything; calls refuse data that must not train."""

    def __init__(self, loss: Loss) -> None:
        self.config = loss
        self._entry = loss_named(loss.kind)
        one = np.zeros(1, np.int64)
        row_weights(one + 1, one, one, loss.agg, length=loss.agg_length, const=loss.agg_const)
        for rule in loss.correction:
            check_rule(rule)
        if self._entry.check is not None:
            self._entry.check(loss)
        if loss.old == "mu" and loss.correction:
            raise ConfigError("learner.loss.old is mu and correction rules are set: the ratio to mu would count twice; use old: prox, or drop the rules")
        if loss.kl is None and (loss.kl_coef or loss.kl_is):
            raise ConfigError(f"learner.loss.kl_coef is {loss.kl_coef} and kl_is is {loss.kl_is} without learner.loss.kl: choose k1, k2, k3 or abs")
        if loss.kl_in == "reward" and (loss.kl is None or loss.kl_is):
            raise ConfigError(f"learner.loss.kl_in is reward with kl {loss.kl} and kl_is {loss.kl_is}: a term in the reward needs kl and takes no ratio")

    @property
    def _whole_batch_weight(self) -> bool:
        beyond_rows = self.config.correction_unit == "trajectory" and any(rule.level != "token" for rule in self.config.correction)
        return bool(self.config.correction) and (self.config.self_normalise or beyond_rows)

    @property
    def needs_proximal_pass(self) -> bool:
        """True when x must be known for the whole batch before the first micro-batch: m2po, self_normalise, correction per trajectory."""
        return self._whole_batch_weight or self._entry.batch_trust is not None

    @property
    def needs_entropy(self) -> bool:
        """True when the entropy enters the loss (it may always be given, and is then reported)."""
        return self.config.entropy_coef != 0

    @property
    def needs_reference(self) -> bool:
        """True when ``tokens.ref`` must be given."""
        return self.config.kl is not None

    @property
    def needs_mu(self) -> bool:
        """True when ``tokens.mu`` must be given."""
        return self.config.old == "mu"

    def batch_terms(self, x: Tensor, tokens: Tokens) -> BatchTerms:
        """What needs the whole global batch, from log-probabilities under the weights at the start of the step, ``x [P_global]`` without gradient.

        ``tokens`` are those of all micro-batches of all ranks; ``row`` numbers rows globally, and ``row_trajectory`` joins the rows of a trajectory.

        Raises :class:`DataRefused`: as for a call.
        """
        with torch.no_grad():
            a = self._anchor(x, tokens, None)
            correction = self._correction(a, tokens) if self._whole_batch_weight else None
            trust = None
            if self._entry.batch_trust is not None:
                with calling("learner.loss.kind", self.config.kind):
                    trust = self._entry.batch_trust(a.d_mu, a.adv, a.mask, self.config)
                tensor_like(trust, x, "batch_trust", "learner.loss.kind", self.config.kind)
        return BatchTerms(correction.weight if correction else None, correction.hit if correction else None, trust)

    def __call__(self, x: Tensor, tokens: Tokens, entropy: Tensor | None = None) -> tuple[Tensor, Stats]:
        """The micro-batch's share of the loss, a float64 scalar to call ``backward`` on (times the world size), and its stats.

        ``x [P]`` are live log-probabilities with gradient, ``entropy [P]`` the full-distribution entropy at the sampling temperature. Without any active
        token the loss is 0 with gradient 0, still connected to ``x``.

        Raises :class:`DataRefused`: a non-finite x, p, u, advantage, or a log-probability above 1e-4 on an active token; shapes that disagree.
        Raises :class:`ConfigError`: an input this objective needs is missing, or a registered function gave what does not fit.
        """
        loss, stats, _ = self.evaluate(x, tokens, entropy)
        return loss, stats

    def evaluate(self, x: Tensor, tokens: Tokens, entropy: Tensor | None = None) -> tuple[Tensor, Stats, Tensor]:
        """As a call, and the weight each token's policy term got: w times the off-policy sequence mask, ``[P] float64``, 0 where inactive."""
        config = self.config
        if self.needs_entropy and entropy is None:
            raise ConfigError(f"learner.loss.entropy_coef is {config.entropy_coef} and no entropy was given: compute it with the log-probabilities")
        a = self._anchor(x, tokens, entropy)
        correction = self._given_or_computed(a, tokens)
        trust = None if tokens.trust is None else tokens.trust | ~a.mask
        per_token = self._per_token(Terms(a.x, a.adv, a.log_mu, a.d_old, a.d_mu, a.mask, a.rows, config, trust))
        weight = torch.where(self._off_policy_rows(a), 0.0, correction.weight)
        token_loss = weight * torch.where(a.mask, per_token.ell, 0.0)

        kl = None
        if config.kl is not None:
            assert tokens.ref is not None
            ref = torch.where(a.mask, tokens.ref.detach().to(torch.float64), 0.0)
            kl = kl_estimate(config.kl, log_ratio(a.x, ref))
            if config.kl_in == "loss":
                token_loss = token_loss + config.kl_coef * (kl * torch.exp(a.d_mu) if config.kl_is else kl)
        if config.mu_sq_coef:
            token_loss = token_loss + config.mu_sq_coef * a.d_mu**2
        bits = None if entropy is None else torch.where(a.mask, entropy.to(torch.float64), 0.0)
        if bits is not None and config.entropy_coef:
            token_loss = token_loss - config.entropy_coef * bits

        measured = Measured(
            rows=a.rows,
            d_old=a.d_old.detach(),
            d_rho=a.d_rho,
            d_mu=a.d_mu.detach(),
            weight=correction.weight,
            hit=correction.hit,
            per_token=per_token,
            dropped=a.dropped,
            kl=None if kl is None else kl.detach(),
            entropy=None if bits is None else bits.detach(),
        )
        return (a.agg * token_loss).sum(), Stats.measure(measured), weight

    def _per_token(self, terms: Terms) -> PerToken:
        """What the loss says of each token, in the shape of the tokens, its numbers still connected to x."""
        key, name = "learner.loss.kind", self.config.kind
        with calling(key, name):
            found = of_kind(self._entry.function(terms), PerToken, key, name)
        for field in fields(found):
            if (value := getattr(found, field.name)) is not None:
                tensor_like(value, terms.x, field.name, key, name)
        if terms.x.requires_grad and not found.ell.requires_grad:
            raise ConfigError(f"{key} {name} gave ell that does not depend on the live log-probabilities: it would train nothing; was terms.x detached?")
        return found

    def _anchor(self, x: Tensor, tokens: Tokens, entropy: Tensor | None) -> Anchored:
        config = self.config
        if config.old == "mu" and tokens.mu is None:
            raise ConfigError("learner.loss.old is mu and the batch carries no behaviour log-probabilities: record them, or use old: prox")
        if config.kl is not None and tokens.ref is None:
            raise ConfigError(f"learner.loss.kl is {config.kl} and there are no reference log-probabilities: give a reference policy, or drop learner.loss.kl")
        extra = {"ref": tokens.ref if config.kl is not None else None, "entropy": entropy if self.needs_entropy else None}
        return anchor(x, tokens, old=config.old, drop=config.nonfinite == "drop", extra=extra)

    def _given_or_computed(self, a: Anchored, tokens: Tokens) -> CorrectionWeight:
        if not self._whole_batch_weight:
            return self._correction(a, tokens)
        if tokens.weight is None or tokens.hit is None:
            raise ConfigError("this correction needs the whole batch: compute Objective.batch_terms before the first micro-batch and put its terms")
        return CorrectionWeight(torch.where(a.mask, tokens.weight, 0.0), tokens.hit & a.mask)

    def _correction(self, a: Anchored, tokens: Tokens) -> CorrectionWeight:
        units = a.rows
        if self.config.correction_unit == "trajectory" and tokens.row_trajectory is not None:
            units = Segments(tokens.row_trajectory[tokens.row], int(tokens.row_trajectory.max()) + 1 if len(tokens.row_trajectory) else 0, a.mask)
        correction = correction_weight(a.d_rho, units, self.config.correction)
        if self.config.self_normalise:
            return correction._replace(weight=self_normalised(correction.weight, a.mask))
        return correction

    def _off_policy_rows(self, a: Anchored) -> Tensor:
        """The off-policy sequence mask (DeepSeek-V3.2, arXiv 2512.02556): tokens with A < 0 in rows whose mean_t d(u, sg x) > opsm_delta, ``[P] bool``."""
        if self.config.opsm_delta is None:
            return torch.zeros_like(a.mask)
        return (a.adv < 0) & (a.rows.spread(a.rows.mean(-a.d_mu.detach())) > self.config.opsm_delta)
