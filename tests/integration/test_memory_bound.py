"""A step with a vocabulary of 150 thousand stays below the bound of docs/memory.md, measured in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STEP = """
import json, re
import numpy as np, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from rollstream.buffer.types import Batch, Segment, Trajectory, TrajectoryKey
from rollstream.configs.schema import Config
from rollstream.learner.logprobs import chunk_of
from rollstream.learner.optimizer import optimizer_of
from rollstream.learner.policy import Policy
from rollstream.learner.step import Stepper

V, H, A, I, L, T, MEMBERS = 150_000, 32, 64, 64, 2, 1024, 16
torch.set_num_threads(1)


def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])


shape = dict(vocab_size=V, hidden_size=H, intermediate_size=I, num_hidden_layers=L, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
config = Config.model_validate({"name": "x", "env": {"id": "x"}, "learner": {
    "versions": 1, "batch_groups": 1, "group_size": MEMBERS, "tokens_per_micro_batch": T, "loss": {"entropy_coef": 0.01},
    "advantage": {"mode": "mean"}, "optimizer": {"learning_rate": 1e-3}}})


def trajectory(member):
    length = 2 * T // MEMBERS  # two micro-batches
    rng = np.random.default_rng(member)
    mask = (np.arange(length) > 0).astype(np.uint8)
    zeros = np.zeros(1, np.int32)
    ids, scores = rng.integers(0, V, length).astype(np.int32), np.where(mask, -11.9, 0).astype(np.float32)
    segment = Segment(ids, mask, scores, zeros, zeros, zeros, ("assistant",), (None,))
    return Trajectory(TrajectoryKey(0, 0, member, 0), "env", 0, 0, "train", (segment,), float(member), "terminated", "terminated")


batch = Batch(0, 1, (0,), tuple(trajectory(member) for member in range(MEMBERS)))
before = kilobytes("VmHWM")
assert kilobytes("VmRSS") > 0.9 * before, "what was loaded first is still there, so the peak is what the step adds"
model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True, initializer_range=0.02, pad_token_id=0, bos_token_id=None, eos_token_id=1))
policy = Policy(model)
stepper = Stepper(policy, optimizer_of(policy, config.learner), config)
work = stepper.prepare(batch)
assert len(work.micro_batches) == 2
gradients = stepper.differentiate(work)
assert stepper.update(1, gradients).stepped
parameters = sum(parameter.numel() for parameter in model.parameters())
sizes = {"P": parameters, "V": V, "H": H, "A": A, "I": I, "L": L, "T": T, "C": chunk_of(model.lm_head.weight)}
print(json.dumps({"peak": 1024 * (kilobytes("VmHWM") - before), **sizes}))
"""


def bound(sizes: dict[str, int]) -> float:
    """The formula as the page writes it, in bytes."""
    (formula,) = re.findall(r"^    peak ≤ (.+)$", (ROOT / "docs" / "memory.md").read_text(encoding="utf-8"), re.MULTILINE)
    expression = formula.replace("·", "*").replace("[", "(").replace("]", ")").replace("MiB", "* 2**20")
    assert re.fullmatch(r"[\w\s()*+]+", expression)
    return float(eval(expression, {"__builtins__": {}}, dict(sizes)))


@pytest.mark.timeout(300)
def test_a_step_over_150_thousand_tokens_stays_below_the_bound_of_the_page() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    limit = bound({name: value for name, value in measured.items() if name != "peak"})
    assert measured["peak"] <= limit, f"{measured['peak'] / 2**20:.0f} MiB, bound {limit / 2**20:.0f} MiB"
    assert limit < 4 * measured["T"] * measured["V"], "float32 logits of one micro-batch alone would take more"
