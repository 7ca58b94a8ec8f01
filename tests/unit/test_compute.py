"""Activation checkpointing and bfloat16 arithmetic: what they save, and what they must not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from rollstream.configs.learner_schema import PolicySettings
from rollstream.errors import ConfigError
from rollstream.learner.collate import MicroBatch, pack
from rollstream.learner.compute import checkpoint_activations, warn_of_slow_bfloat16
from rollstream.learner.policy import Policy
from rollstream.learner.warmup import supervised

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), attn_implementation="sdpa")


def micro_batch() -> MicroBatch:
    rng = np.random.default_rng(0)
    lengths = (17, 30, 5)
    rows = [(rng.integers(0, 64, length).tolist(), [0] + [1] * (length - 1)) for length in lengths]
    (one,) = pack(*supervised(rows), tokens_per_micro_batch=1000)
    return one


def scored(model: Any, **settings: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Log-probabilities, gradient of their mean, and bytes that the graph keeps between forward and backward."""
    policy = Policy(model, PolicySettings(**settings))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x, entropy = policy.logprobs(micro_batch(), 0.9)
    (x.mean() + 0.1 * entropy.mean()).backward()
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    return x.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), sum(kept.values())


def test_checkpointed_activations_give_the_same_bits_and_keep_less() -> None:
    x, gradient, kept = scored(llama())
    again, same_gradient, less = scored(llama(), activation_checkpointing=True)
    assert torch.equal(x, again)
    assert torch.equal(gradient, same_gradient)
    assert less < 0.6 * kept


def test_bfloat16_moves_logprobs_by_its_rounding_and_leaves_float32_behind() -> None:
    x, gradient, _ = scored(llama())
    rounded, close_gradient, _ = scored(llama(), compute_dtype="bfloat16")
    assert rounded.dtype == torch.float32
    assert 1e-5 < float((x - rounded).abs().max()) < 0.2
    assert float(torch.nn.functional.cosine_similarity(gradient, close_gradient, dim=0)) > 0.995
    fine = rounded.to(torch.bfloat16).float()
    assert not torch.equal(rounded, fine), "the log-probabilities themselves are not rounded"


def test_bfloat16_and_checkpointing_together_recompute_what_the_forward_did() -> None:
    x, gradient, _ = scored(llama(), compute_dtype="bfloat16")
    again, same_gradient, _ = scored(llama(), compute_dtype="bfloat16", activation_checkpointing=True)
    assert torch.equal(x, again)
    assert torch.equal(gradient, same_gradient)


def test_models_that_scale_their_logits_keep_them_in_float32_too() -> None:
    def granite() -> Any:
        torch.manual_seed(0)
        return GraniteForCausalLM._from_config(GraniteConfig(**SHAPE, logits_scaling=3.0), attn_implementation="sdpa")

    x, _, _ = scored(granite())
    rounded, _, _ = scored(granite(), compute_dtype="bfloat16")
    assert float((x - rounded).abs().max()) < 0.2
    assert not torch.equal(rounded, rounded.to(torch.bfloat16).float())


def test_a_model_without_layers_to_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing is set and Linear has no layers"):
        checkpoint_activations(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("capability", "warns"), [("AVX2", True), ("DEFAULT", True), ("AVX512", False)])
def test_bfloat16_on_a_processor_without_its_instructions_is_told(capability: str, warns: bool, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    warn_of_slow_bfloat16(torch.device("cpu"), "float32")
    assert not caplog.records
    warn_of_slow_bfloat16(torch.device("cpu"), "bfloat16")
    assert [("float32 is many times faster" in record.getMessage()) for record in caplog.records] == [True] * warns
