"""Layers of hybrid models in GGUF files, under the names that llama.cpp gives their tensors."""

from __future__ import annotations

from typing import Any

from bench.gguf_tensors import RandomTensors

ARCHITECTURES = {"qwen3_5_moe_text": "qwen35moe", "granitemoehybrid": "granitehybrid", "lfm2": "lfm2"}
RECURRENT = ("linear_attention", "conv")
"""Layer types whose layers keep a state."""

Config = dict[str, Any]


def settings(writer: RandomTensors, c: Config) -> None:
    """Add the settings that describe the recurrent layers, beside those of all models."""
    file = writer.file
    if c["model_type"] == "lfm2":
        file.add_shortconv_l_cache(c["conv_L_cache"])
        return
    qwen = c["model_type"] == "qwen3_5_moe_text"
    heads, size = (
        (c["linear_num_value_heads"], c["linear_value_head_dim"])
        if qwen
        else (c["mamba_n_heads"], c["mamba_d_head"])
    )
    file.add_ssm_conv_kernel(c["linear_conv_kernel_dim"] if qwen else c["mamba_d_conv"])
    file.add_ssm_inner_size(heads * size)
    file.add_ssm_state_size(c["linear_key_head_dim"] if qwen else c["mamba_d_state"])
    file.add_ssm_time_step_rank(heads)
    file.add_ssm_group_count(c["linear_num_key_heads"] if qwen else c["mamba_n_groups"])
    if qwen:
        file.add_full_attention_interval(1 + c["layer_types"].index("full_attention"))
        file.add_rope_dimension_sections([11, 11, 10, 0])
        file.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
        return
    file.add_rope_scaling_finetuned(c["position_embedding_type"] != "nope")
    file.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])
    file.add_embedding_scale(c["embedding_multiplier"])
    file.add_residual_scale(c["residual_multiplier"])
    file.add_attention_scale(c["attention_multiplier"])
    file.add_logit_scale(c["logits_scaling"])


def recurrent_layer(writer: RandomTensors, at: str, c: Config) -> None:
    """Add the token mixer of a layer that keeps a state."""
    {"qwen3_5_moe_text": _gated_delta_rule, "granitemoehybrid": _mamba2, "lfm2": _short_convolution}[
        c["model_type"]
    ](writer, at, c)


def _gated_delta_rule(writer: RandomTensors, at: str, c: Config) -> None:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    writer.blocks(f"{at}.attn_qkv", 2 * keys + values, hidden)
    writer.blocks(f"{at}.attn_gate", values, hidden)
    writer.floats(f"{at}.ssm_conv1d", 2 * keys + values, c["linear_conv_kernel_dim"])
    writer.vector(f"{at}.ssm_dt.bias", heads)
    writer.vector(f"{at}.ssm_a", heads, sign=-1)
    writer.blocks(f"{at}.ssm_beta", heads, hidden)
    writer.blocks(f"{at}.ssm_alpha", heads, hidden)
    writer.ones(f"{at}.ssm_norm", c["linear_value_head_dim"])
    writer.blocks(f"{at}.ssm_out", hidden, values)


def _mamba2(writer: RandomTensors, at: str, c: Config) -> None:
    hidden, heads, groups = c["hidden_size"], c["mamba_n_heads"], c["mamba_n_groups"]
    inner, state = heads * c["mamba_d_head"], groups * c["mamba_d_state"]
    writer.blocks(f"{at}.ssm_in", 2 * inner + 2 * state + heads, hidden)
    writer.floats(f"{at}.ssm_conv1d", inner + 2 * state, c["mamba_d_conv"])
    writer.vector(f"{at}.ssm_conv1d.bias", inner + 2 * state)
    writer.vector(f"{at}.ssm_dt.bias", heads)
    writer.vector(f"{at}.ssm_a", heads, 1, sign=-1)
    writer.vector(f"{at}.ssm_d", heads, 1)
    writer.vector(f"{at}.ssm_norm.weight", groups, inner // groups, sign=1)
    writer.blocks(f"{at}.ssm_out", hidden, inner)


def _short_convolution(writer: RandomTensors, at: str, c: Config) -> None:
    hidden = c["hidden_size"]
    writer.floats(f"{at}.shortconv.conv", hidden, c["conv_L_cache"])
    writer.blocks(f"{at}.shortconv.in_proj", 3 * hidden, hidden)
    writer.blocks(f"{at}.shortconv.out_proj", hidden, hidden)
