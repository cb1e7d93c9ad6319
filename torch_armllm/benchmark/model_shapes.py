"""Shapes of well-known models, to measure with random weights."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": (
        "llama",
        {
            "vocab_size": 128256,
            "max_position_embeddings": 32768,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b": (
        "llama",
        {
            "vocab_size": 128256,
            "max_position_embeddings": 32768,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3.5-35b-a3b": (
        "qwen3_5_moe_text",
        {
            "vocab_size": 248320,
            "max_position_embeddings": 32768,
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "vocab_size": 102400,
            "max_position_embeddings": 32768,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": False,
        },
    ),
}
SHAPES = tuple(_SHAPES)


def shape_of(name: str, layers: int | None = None, vocabulary: int | None = None) -> PreTrainedConfig:
    """Returns the configuration of a model in bfloat16.

    Args:
        name: one of `SHAPES`.
        layers: number of layers; None: all.
        vocabulary: vocabulary size; None: the model's own.

    Raises:
        ValueError: no shape has this name, or ``layers`` is less than 1.
    """
    if name not in _SHAPES:
        raise ValueError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    if layers is not None and layers < 1:
        raise ValueError(f"a model has at least one layer, not {layers}")
    kind, values = _SHAPES[name]
    changed = {"num_hidden_layers": layers, "vocab_size": vocabulary}
    values = {**values, **{key: value for key, value in changed.items() if value is not None}}
    return CONFIG_MAPPING[kind](**values, dtype="bfloat16")
