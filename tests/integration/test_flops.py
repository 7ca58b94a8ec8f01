"""Counted FLOPs are those that PyTorch counts when the model runs, for dense models, mixtures of experts and latent attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollstream.learner.flops import Cost, cost_of, peak_flops

ROWS, LENGTH = 2, 20
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
MODELS: dict[str, tuple[type[Any], Any]] = {
    "dense, tied": (Qwen3ForCausalLM, lambda: Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)),
    "dense, untied": (LlamaForCausalLM, lambda: LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=False)),
    "learned positions": (GPT2LMHeadModel, lambda: GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "experts": (Qwen3MoeForCausalLM, lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, num_key_value_heads=2, head_dim=8, num_experts=8)),
    "experts, latent attention": (DeepseekV3ForCausalLM, lambda: DeepseekV3Config(**SHAPE, **EXPERTS, **LATENT)),
}


def counted(model: Any, *, backward: bool) -> float:
    """What PyTorch counts. The rotary angles are a product too small for a model's matrices: they are taken off."""
    ids = torch.randint(2, 96, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    rotary = sum(sum(kinds.values()) for name, kinds in counter.get_flop_counts().items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - rotary


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_and_backward_cost_what_pytorch_counts(name: str) -> None:
    kind, config = MODELS[name]
    model = kind._from_config(config(), attn_implementation="eager", experts_implementation="eager") if "experts" in name else kind(config())
    if "experts" not in name:
        model.set_attn_implementation("eager")
    ours = cost_of(model).forward(np.full(ROWS, LENGTH), ROWS * LENGTH)
    assert counted(model, backward=False) == pytest.approx(ours, rel=1e-9)
    assert counted(model, backward=True) == pytest.approx(3 * ours, rel=0.01), "nothing is propagated below the embedding"


def test_a_window_bounds_the_context_and_unscored_tokens_skip_the_output_matrix() -> None:
    cost = Cost(100.0, 7, ((3.0, None), (3.0, 4)))
    lengths = np.array([10, 2])
    assert cost.forward(lengths, 5) == 2 * 100 * 12 + 2 * 7 * 5 + 3 * (100 + 4) + 3 * (40 + 4)


def test_the_peak_is_the_configured_one_else_measured() -> None:
    cpu = torch.device("cpu")
    assert peak_flops(cpu, torch.float32, 1.5) == 1.5e12
    assert 1e8 < peak_flops(cpu, torch.float32) < 1e14
