"""The families of models that the learner is meant for, tiny and random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
NINE_TO_THREE: dict[str, Any] = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "Qwen2.5": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "Qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "tie_word_embeddings": False}),
    "Qwen3-MoE": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"head_dim": 8, "num_experts": 4, "norm_topk_prob": True, **EXPERTS}),
    "Llama": (LlamaForCausalLM, LlamaConfig, {}),
    "SmolLM2, nine heads to three": (LlamaForCausalLM, LlamaConfig, NINE_TO_THREE),
    "Gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 8}),
    "Gemma 3, sliding windows": (Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}),
    "DeepSeek-V3, latent attention and experts": (DeepseekV3ForCausalLM, DeepseekV3Config, {**EXPERTS, **LATENT}),
}  # fmt: skip


def folder_of(family: str, folder: Path) -> Path:
    """A tiny random model of the family, saved as its makers' checkpoints are."""
    model, config, extra = FAMILIES[family]
    torch.manual_seed(0)
    model._from_config(config(**SHAPE | extra)).save_pretrained(folder)
    return folder
