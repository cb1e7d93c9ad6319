"""Compared models: shapes of real models with random weights, on whose values speed does not depend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCABULARY = 49_152
CONTEXT = 8192


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        name: name on the command line.
        title: name in tables.
        config: transformers' ``config.json``.
    """

    name: str
    title: str
    config: dict[str, Any]


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _shape(name: str, title: str, **config: Any) -> Shape:
    return Shape(name, title, {**_COMMON, **config})


_ALL = (
    _shape(
        "smollm2",
        "SmolLM2-135M",
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    ),
    _shape(
        "1b",
        "Llama-3.2-1B",
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rope_theta=500_000.0,
        tie_word_embeddings=True,
    ),
    _shape(
        "moe",
        "Qwen3-30B-A3B, 4 layers",
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_theta=1_000_000.0,
        tie_word_embeddings=False,
    ),
    _shape(
        "deepseek",
        "DeepSeek-V2-Lite, 4 layers",
        model_type="deepseek_v2",
        architectures=["DeepseekV2ForCausalLM"],
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    ),
    _shape(
        "qwen3.5",
        "Qwen3.5-35B-A3B, 4 layers",
        model_type="qwen3_5_moe_text",
        architectures=["Qwen3_5MoeForCausalLM"],
        hidden_size=2048,
        intermediate_size=512,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        num_experts=256,
        num_experts_per_tok=8,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rope_theta=10_000_000.0,
        tie_word_embeddings=False,
    ),
    _shape(
        "granite4",
        "Granite-4.0-H-Tiny, 10 layers",
        model_type="granitemoehybrid",
        architectures=["GraniteMoeHybridForCausalLM"],
        hidden_size=1536,
        intermediate_size=512,
        shared_intermediate_size=1024,
        num_hidden_layers=10,
        layer_types=["full_attention" if layer == 5 else "linear_attention" for layer in range(10)],
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=64,
        num_experts_per_tok=6,
        mamba_n_heads=48,
        mamba_n_groups=1,
        mamba_d_state=128,
        mamba_d_head=64,
        mamba_d_conv=4,
        mamba_expand=2,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=6.0,
        attention_multiplier=0.0078125,
        position_embedding_type="nope",
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    ),
    _shape(
        "lfm2",
        "LFM2-1.2B",
        model_type="lfm2",
        architectures=["Lfm2ForCausalLM"],
        hidden_size=2048,
        intermediate_size=8192,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=16,
        layer_types=["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        num_attention_heads=32,
        num_key_value_heads=8,
        conv_L_cache=3,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    ),
    _shape(
        "tiny",
        "a tiny Llama",
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    ),
)

SHAPES = {shape.name: shape for shape in _ALL}
COMPARED = ("smollm2", "1b", "moe", "deepseek", "qwen3.5", "granite4", "lfm2")
"""Models that are compared by default."""
