"""The learner's forward and backward, against what one would write with Hugging Face alone.

*Dense*: a batch of equal lengths, every token trained. The yardstick is the plain loop: the model's own forward over the rectangle, log-softmax of its logits
in float32, gather, the same loss, backward. Time per token, CPU seconds of the process; reach ≤ 1.15.

*Tail*: lengths with a long tail (log-normal, median 64, σ 1.0), half of each trajectory trained. The learner packs them; the yardstick is the same learner's
loss over rows padded to the longest of the batch, as a plain training loop would pad them. Reach ≥ 2 times the tokens per second.

Both are interleaved, medians of several repeats, after a warm-up. The optimiser's step is the same for all and left out.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from report import Row, options, report, row
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.configs.schema import Config
from rollstream.learner.optimizer import optimizer_of
from rollstream.learner.policy import Policy
from rollstream.learner.step import Stepper, Work

VOCABULARY = 4096
LONGEST = 2048


def build(quick: bool) -> Qwen3ForCausalLM:
    """A Qwen3 of 2 million parameters, or of half a million."""
    size = 96 if quick else 192
    torch.manual_seed(0)
    shape = {"hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=LONGEST, tie_word_embeddings=True, **shape, **ids)).eval()


def trajectory(member: int, length: int, trained: float) -> Trajectory:
    """Random tokens, of which the last share ``trained`` counts."""
    rng = np.random.default_rng(member)
    mask = (np.arange(length) >= max(1, int(length * (1 - trained)))).astype(np.uint8)
    zeros = np.zeros(1, np.int32)
    ids, scores = rng.integers(2, VOCABULARY, length).astype(np.int32), np.where(mask, -8.3, 0).astype(np.float32)
    segment = Segment(ids, mask, scores, zeros, zeros, zeros, ("assistant",), (None,))
    return Trajectory(TrajectoryKey(0, 0, member, 0), "env", 0, 0, "train", (segment,), float(member % 2), "terminated", "terminated")


def batch_of(lengths: list[int], trained: float) -> Batch:
    """One group of trajectories of these lengths."""
    return Batch(0, 1, (0,), tuple(trajectory(member, length, trained) for member, length in enumerate(lengths)))


def stepper_of(model: Qwen3ForCausalLM, members: int, budget: int) -> Stepper:
    """The learner's own, with the loss of the ``async`` preset."""
    loss = {"kind": "dppo_tv", "old": "mu", "delta": 0.2, "is_cap": 5.0, "mu_sq_coef": 0.001, "agg": "group_mean_token_mean"}
    learner = {
        "versions": 1, "batch_groups": 1, "group_size": members, "tokens_per_micro_batch": budget, "loss": loss,
        "advantage": {"mode": "mean"}, "optimizer": {"learning_rate": 1e-6},
    }  # fmt: skip
    config = Config.model_validate({"name": "x", "env": {"id": "x"}, "learner": learner})
    policy = Policy(model)
    return Stepper(policy, optimizer_of(policy, config.learner), config)


def plain(model: Qwen3ForCausalLM, batch: Batch, rows_at_once: int) -> Callable[[], None]:
    """Forward and backward over rows padded to the longest, in rectangles of ``rows_at_once``."""
    segments = [one.segments[0] for one in batch.trajectories]
    longest = max(segment.num_tokens for segment in segments)

    def rectangle(name: str, kind: type[np.generic]) -> torch.Tensor:
        values = np.zeros((len(segments), longest), kind)
        for place, segment in enumerate(segments):
            values[place, : segment.num_tokens] = getattr(segment, name)
        return torch.from_numpy(values)

    ids, mask, mu = rectangle("token_ids", np.int64), rectangle("loss_mask", np.bool_), rectangle("behaviour_logprobs", np.float32)
    present = torch.arange(longest)[None] < torch.tensor([segment.num_tokens for segment in segments])[:, None]
    padded = not bool(present.all())
    advantage = torch.tensor([float(one.reward or 0) for one in batch.trajectories])
    advantage = (advantage - advantage.mean())[:, None]
    total = int(mask[:, 1:].sum())

    def run() -> None:
        for start in range(0, len(segments), rows_at_once):
            part = slice(start, start + rows_at_once)
            attention = present[part].long() if padded else None
            logits = model(input_ids=ids[part], attention_mask=attention, use_cache=False).logits[:, :-1].float()
            x = torch.log_softmax(logits, -1).gather(-1, ids[part][:, 1:, None])[..., 0]
            ratio = torch.exp((x - mu[part][:, 1:]).clamp(-20, 20))
            ell = -advantage[part] * ratio.detach().clamp(max=5.0) * x + 0.001 * (x - mu[part][:, 1:]) ** 2
            (torch.where(mask[part][:, 1:], ell, 0.0).sum() / total).backward()
        model.zero_grad(set_to_none=True)

    return run


def learner(stepper: Stepper, work: Work) -> Callable[[], None]:
    """The learner's forward and backward."""

    def run() -> None:
        stepper.differentiate(work)
        stepper.policy.model.zero_grad(set_to_none=True)

    return run


def interleaved(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, tuple[list[float], list[float]]]:
    """CPU seconds and wall seconds of each, taken in turn."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            found[name][0].append(time.process_time() - cpu)
            found[name][1].append(time.perf_counter() - wall)
    return found


def rows_of(name: str, found: dict[str, tuple[list[float], list[float]]], ours: str, yardstick: str, tokens: int) -> list[Row]:
    """Microseconds a token, ours over the yardstick's, by CPU and by wall time."""
    made: list[Row] = []
    for place, kind in enumerate(("cpu", "wall")):
        per_token = {key: [1e6 * seconds / tokens for seconds in times[place]] for key, times in found.items()}
        base = statistics.median(per_token[yardstick])
        made.append(row(f"{name} {yardstick} {kind}", per_token[yardstick], "us/token"))
        made.append(row(f"{name} {ours} {kind}", per_token[ours], "us/token", yardstick=yardstick, over=base))
    return made


def main() -> None:
    """Runs both parts and prints their rows."""
    arguments = options(__doc__)
    torch.set_num_threads(1)
    repeats = 3 if arguments.quick else 7
    reference, model = build(arguments.quick), build(arguments.quick)

    members, length = (8, 128) if arguments.quick else (16, 256)
    dense = batch_of([length] * members, 1.0)
    stepper = stepper_of(model, members, members * length)
    found = interleaved({"plain": plain(reference, dense, members), "learner": learner(stepper, stepper.prepare(dense))}, repeats)
    rows = rows_of("dense", found, "learner", "plain", members * length)

    members = 32 if arguments.quick else 64
    lengths = np.exp(np.random.default_rng(0).normal(np.log(64), 1.0, members)).astype(int).clip(8, LONGEST // 2)
    tail = batch_of(lengths.tolist(), 0.5)
    budget = 4 * int(lengths.max())
    stepper = stepper_of(model, members, budget)
    found = interleaved({"padded": plain(reference, tail, 4), "packed": learner(stepper, stepper.prepare(tail))}, repeats)
    rows += rows_of("tail", found, "packed", "padded", int(lengths.sum()))
    times = [(entry, 1 / entry.ratio) for entry in rows[-4:] if entry.ratio]
    faster = [dataclasses.replace(entry, name=f"{entry.name}, times faster", value=ratio, unit="x", ratio=ratio) for entry, ratio in times]
    report([*rows, *faster], arguments.json)


if __name__ == "__main__":
    main()
