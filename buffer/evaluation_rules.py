"""What the configuration says about evaluations, as their books need it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from ..configs.schema import Config

_SEEDS_FROM = 2**31
"""Reset seeds of training lie below, those of evaluations from here on."""


@dataclass(frozen=True, slots=True)
class EvaluationRules:
    """What the configuration says about evaluations. ``settings`` name what gives a trajectory its meaning: an open evaluation does not outlive a change."""

    env_ids: tuple[str, ...]
    tasks: int
    samples: int
    first_task: int
    seed: int
    max_infra_attempts: int
    max_env_attempts: int
    ks: tuple[int, ...]
    success_at: float | None
    settings: str

    @classmethod
    def of(cls, config: Config) -> EvaluationRules | None:
        """The rules of a run; None where it evaluates nothing."""
        evaluation = config.evaluation
        if evaluation is None:
            return None
        envs, sampling = config.evaluated_envs(), config.evaluators().sampling
        meaning = {"envs": envs, "sampling": sampling.model_dump(), "tasks": evaluation.tasks, "samples": evaluation.samples}
        return cls(
            env_ids=tuple(envs),
            tasks=evaluation.tasks,
            samples=evaluation.samples,
            first_task=evaluation.first_task,
            seed=config.seed,
            max_infra_attempts=config.buffer.max_infra_attempts,
            max_env_attempts=config.buffer.max_env_attempts,
            ks=evaluation.k,
            success_at=evaluation.success_at,
            settings=msgspec.json.encode({**meaning, "first_task": evaluation.first_task}, order="deterministic").decode(),
        )

    def attempts(self, stop_reason: str) -> int:
        """How often a member may fail for this reason before its failure is recorded."""
        return self.max_infra_attempts if stop_reason == "infra" else self.max_env_attempts

    @property
    def num_groups(self) -> int:
        """Groups of an evaluation."""
        return len(self.env_ids) * self.tasks

    def reset_seed(self, task_index: int) -> int:
        """Reset seed of a task: the same for every version, and one that training never uses."""
        return _SEEDS_FROM | int(np.random.SeedSequence(self.seed, spawn_key=(1, task_index)).generate_state(1)[0]) & (_SEEDS_FROM - 1)
