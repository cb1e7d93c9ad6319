"""Tiny random transformers models with the structures of many families."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Builds a random model of ``family`` (a transformers ``model_type`` in `FAMILIES`).

    The weights are scaled up from transformers' tiny initial ones so that attention, routing and logits are
    far from uniform: a wrong expert or a wrong position changes the output by much more than rounding does.

    Args:
        family: key of `FAMILIES`.
        dtype: dtype of the parameters.
        seed: seed of the weights; the global random state has no influence.
        overrides: configuration values.
    """
    known = FAMILIES | MORE
    if family not in known:
        raise ValueError(f"unknown family {family!r}; there are {sorted(known)}")
    config = AutoConfig.for_model(family, **{**COMMON, **known[family], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, 0.08)
                elif "bias" in name:
                    parameter.normal_(0.0, 0.02)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def token_ids(batch: int = 1, length: int = 12, vocab: int = 97, seed: int = 1) -> torch.Tensor:
    """Returns random token ids of shape (batch, length), without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (batch, length), generator=generator)
