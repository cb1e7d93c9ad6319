"""Tiny random transformers models with the structures of many families."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torch_armllm.model_survey.tiny_models import build_tiny

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "phi3": {"tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Configuration of each family in addition to `COMMON`."""
MORE: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16},
    "nemotron": {},
    "qwen3_next": {
        "head_dim": 16,
        "num_experts": 0,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 1,
    },
    "qwen3_5_moe_text": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "layer_types": ["full_attention", "full_attention"],
    },
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
}
"""Configuration of families that only some tests use."""
_LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "head_dim": 16,
}
_GROUPED: dict[str, Any] = {
    **_LATENTS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_GROUPED, "topk_method": "greedy"},
    "deepseek_v3": _GROUPED,
    "glm4_moe_lite": {**_GROUPED, "n_group": 1},
    "minicpm3": _LATENTS,
    "youtu": _LATENTS,
    "axk1": _GROUPED,
}
"""Configuration of families that cache latents, whose sizes are all different."""


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Builds a random model of ``family`` (a transformers ``model_type`` in one of the tables above).

    The weights are scaled up from transformers' tiny initial ones so that attention, routing and logits are
    far from uniform: a wrong expert or a wrong position changes the output by much more than rounding does.

    Args:
        family: key of `FAMILIES`, `MORE` or `LATENT`.
        dtype: dtype of the parameters.
        seed: seed of the weights; the global random state has no influence.
        overrides: configuration values.
    """
    known = FAMILIES | MORE | LATENT
    if family not in known:
        raise ValueError(f"unknown family {family!r}; there are {sorted(known)}")
    config = AutoConfig.for_model(family, **{**COMMON, **known[family], **overrides})
    model: PreTrainedModel = build_tiny(AutoModelForCausalLM, config, dtype, seed)
    model.generation_config.pad_token_id = 0
    return model


def token_ids(batch: int = 1, length: int = 12, vocab: int = 97, seed: int = 1) -> torch.Tensor:
    """Returns random token ids of shape (batch, length), without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (batch, length), generator=generator)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Returns the logits of a model for two texts of nine tokens."""
    found: torch.Tensor = model(token_ids(2, 9)).logits
    return found
