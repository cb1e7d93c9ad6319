"""Values that random configurations choose from, by the names of fields."""

from __future__ import annotations

from typing import Any

HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
SIZES: dict[str, tuple[Any, ...]] = {
    "hidden_size": (32, 64, 96, 128),
    "n_embd": (32, 64, 96),
    "d_model": (32, 64, 96),
    "intermediate_size": (48, 80, 96, 160),
    "moe_intermediate_size": (32, 48, 80),
    "shared_intermediate_size": (32, 48, 80),
    "head_dim": (8, 16, 32),
    "num_experts": (4, 8, 16),
    "num_local_experts": (4, 8, 16),
    "n_routed_experts": (4, 8, 16),
    "zero_expert_num": (0, 2, 5),
    "num_experts_per_tok": (1, 2, 3),
    "num_experts_per_token": (1, 2, 3),
    "n_group": (1, 2),
    "sliding_window": (3, 7, 16),
    "window_size": (3, 7, 16),
    "attention_window_size": (3, 7, 16),
    "rotary_dim": (4, 8),
    "attention_chunk_size": (16, 64),
    "rms_norm_eps": (1e-6, 1e-5, 1e-3),
    "layer_norm_epsilon": (1e-5, 1e-3),
    "layer_norm_eps": (1e-5, 1e-3),
    "norm_eps": (1e-5, 1e-3),
    "final_logit_softcapping": (None, 5.0),
    "attn_logit_softcapping": (None, 5.0),
    "n_shared_experts": (1, 2),
    "num_shared_experts": (1, 2),
    "kv_lora_rank": (16, 32),
    "q_lora_rank": (None, 32, 48),
    "qk_rope_head_dim": (8, 16),
    "qk_nope_head_dim": (8, 16, 32),
    "v_head_dim": (8, 16, 32),
    "expand": (1, 2),
    "mamba_expand": (1, 2),
    "conv_kernel": (2, 3, 4),
    "mamba_d_conv": (2, 3, 4),
    "linear_conv_kernel_dim": (2, 3, 4),
    "short_conv_kernel_size": (2, 3, 4),
    "conv1d_width": (2, 3, 4),
    "conv_L_cache": (2, 3, 5),
    "state_size": (4, 16, 20),
    "mamba_d_state": (4, 16, 20),
    "ssm_state_size": (4, 16, 20),
    "time_step_rank": (4, 8),
    "mamba_dt_rank": (4, 8),
    "time_step_limit": ((0.0, float("inf")), (0.01, 0.6), (0.4, 0.8)),
    "n_groups": (1, 2, 4),
    "mamba_n_groups": (1, 2, 4),
    "mamba_ngroups": (1, 2, 4),
    "linear_num_key_heads": (1, 2, 3),
    "linear_key_head_dim": (8, 16, 24),
    "linear_value_head_dim": (8, 16, 24),
    "linear_num_heads": (1, 3, 4),
    "linear_head_dim": (8, 16, 24),
    "lru_width": (32, 64, 96),
    "block_size": (3, 16, 64),
    "sliding_window_size": (3, 7, 16),
    "rel_extent": (2, 9, 70),
    "d_rel": (1, 4, 16),
    "log_scaling_n_floor": (None, 4),
    "conv_kernel_size": (2, 3, 4),
    "num_mem_blocks": (1, 2),
}
"""Values by the field's name; a field keeps the tiny model's value in half of the draws."""
ACTIVATIONS = {
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": ("silu", "gelu", "gelu_pytorch_tanh"),
    "activation_function": ("gelu_new", "gelu", "relu", "silu"),
    "mlp_hidden_act": ("relu2", "silu", "gelu"),
}
SWITCHES = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "norm_topk_prob", "clip_qkv",
    "use_qk_norm", "qk_layernorm", "alibi", "parallel_attn", "new_decoder_architecture", "multi_query",
    "bias", "use_parallel_residual", "rope_interleave", "scale_attn_by_inverse_layer_idx", "mup_enabled",
    "use_sliding_window", "do_layer_norm_before", "use_conv_bias", "mamba_conv_bias", "mamba_proj_bias",
    "residual_in_fp32", "projectors_bias", "mamba_norm_before_gate", "mamba_rms_norm", "add_bias_linear",
    "use_mem_rope", "use_shared_attention_adapter", "moe_renormalize", "kda_safe_gate", "conv_bias",
    "use_sandwich_norm", "use_attention_gate", "linear_allow_neg_eigval", "attention_out_bias",
)  # fmt: skip
FACTORS = ("multiplier", "multipliers", "scaling", "scaling_factor", "scale", "alpha_factor", "beta_factor")
"""Ends of the names of fields that multiply something; 1 would hide where."""
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)
