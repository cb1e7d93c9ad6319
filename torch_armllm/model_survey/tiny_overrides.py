"""Values of tiny configurations: by attribute name, and for a few families by hand."""

from __future__ import annotations

from typing import Any

EXACT: dict[str, int] = {
    "vocab_size": 97,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "embedding_size": 64, "embedding_dim": 64, "emb_dim": 64,
    "word_embed_proj_dim": 64, "attention_hidden_size": 64, "lru_width": 64, "d_inner": 96,
    "intermediate_size": 96, "moe_intermediate_size": 48, "ffn_dim": 96, "ffn_hidden_size": 96,
    "shared_expert_intermediate_size": 48, "shared_intermediate_size": 48,
    "shared_experts_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48, "intermediate_size_mlp": 96, "expert_ffn_hidden_size": 48,
    "dense_intermediate_size": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "dff": 96, "dim_ff": 96,
    "feed_forward_size": 96,
    "decoder_layers": 2, "encoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_blocks": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "swa_num_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "swa_num_key_value_heads": 2, "num_query_groups": 2,
    "head_dim": 16, "swa_head_dim": 16, "kv_channels": 16, "d_head": 16, "dim_head": 16,
    "global_head_dim": 16,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "n_group": 2, "num_expert_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_seq_len": 512,
    "sliding_window": 16, "sliding_window_size": 16, "window_size": 16, "attention_window_size": 16,
    "local_attention": 16, "attention_chunk_size": 16, "attention_window": 16,
    "query_pre_attn_scalar": 16,
    "type_vocab_size": 2, "entity_vocab_size": 97, "entity_emb_size": 24,
    "d_latents": 64, "num_latents": 8, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
    "num_cross_attention_heads": 4,
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 16, "mamba_d_ssm": 128,
    "state_size": 16, "chunk_size": 16, "time_step_rank": 8, "mamba_dt_rank": 8, "ssm_state_size": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64,
    "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16, "laurel_rank": 16,
    "shape_vocab_size": 97, "pronunciation_vocab_size": 97, "zero_expert_num": 2,
    "rotary_dim": 8, "block_size": 16, "mm_tokens_per_image": 16,
}  # fmt: skip
"""Attributes with these names get these values, unless their defaults are smaller."""

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Attributes with the number of layers."""

_HYBRID = ["linear_attention", "full_attention"]

_DECODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
    "xlm-roberta-xl",
)  # fmt: skip

_KOSMOS = {"layers": 2, "embed_dim": 64, "attention_heads": 4, "ffn_dim": 96}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_GEMMA4 = {
    "head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
}
"""Global layers have fewer, longer keys that double as values; the last layers read earlier layers' keys."""

_GRANITE = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.75,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
"""Multipliers that are not 1: it would hide where they apply."""

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_DECODERS, {"is_decoder": True}),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), _GRANITE),
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "apertus1p5": {"image_token_offset": 32, "audio_token_offset": 64},  # codes of images, then of sound
    "aria": {
        "vision_config": {
            "image_size": 490,
            "patch_size": 70,
        },  # its processor knows this size and its double
        "projector_patch_to_query_dict": {49: 128, 196: 256},
    },
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 97},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "chameleon": {
        "vocabulary_map": {"<image>": 95}  # a letter for each digit of a code
        | {f"IMGIMG{''.join('ABCDEFGHIJ'[int(digit)] for digit in str(n))}Z": 5 + n for n in range(32)}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
    },
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [40, 32]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 6,
        "swa_q_lora_rank": 40,
        "swa_kv_lora_rank": 48,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 24,
    },
    "fun_asr_nano": {
        "adaptor_config": {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 2}
    },
    "emu3": {
        "vocabulary_map": {"<image>": 95, "<|extra_200|>": 94}
        | {f"<|visual token {n:06}|>": 5 + n for n in range(32)}
    },
    "esm": {"pad_token_id": 1, "mask_token_id": 32},
    "esmc": {"num_key_value_heads": 4},
    "fast_vlm": {
        "vision_config": {"architecture": "test_efficientnet", "hidden_size": 256, "model_args": {}}
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_d_head": 16,
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.75,
        "attention_in_multiplier": 1.25,
        "attention_out_multiplier": 0.75,
        "key_multiplier": 0.5,
        "mlp_multipliers": [1.5, 0.75],
        "ssm_in_multiplier": 0.75,
        "ssm_out_multiplier": 1.25,
        "ssm_multipliers": [0.75, 1.25, 1.5, 0.5, 0.8],
    },
    "gemma3n": {"vision_soft_tokens_per_image": 1},
    "gemma3n_vision": {"architecture": "test_efficientnet", "hidden_size": 256},
    "gemma3n_text": {
        "num_kv_shared_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "activation_sparsity_pattern": [0.95, 0.0, 0.0],
    },
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
        }
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gemma4_unified": {"text_config": {"sliding_window": 300}},  # that of an image
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "got_ocr2": {"vision_config": {"image_size": 256}},  # its processor writes 256 tokens for an image
    "pp_chart2table": {"vision_config": {"image_size": 256}},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64},  # its heads are 64 wide
        "deepstack_layer_map": [[-1, 0]],
        "downsample_rate": "1/2",
    },
    "granitemoehybrid": {"layer_types": _HYBRID, **_GRANITE},
    "hrm_text": {"L_cycles": 1},
    "inkling2_loop_text": {
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 32,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kosmos-2.5": {"latent_query_num": 64},  # its processor writes as many tokens for an image
    **dict.fromkeys(("kosmos_2_text_model", "kosmos_2_5_text_model"), _KOSMOS),
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"text_config": {"attention_chunk_size": 64}},
    "llama4_vision_model": {
        "patch_size": 8,
        "pixel_shuffle_ratio": 0.5,
        "intermediate_size": 128,
        "vision_output_dim": 48,
        "projector_input_dim": 48,
        "projector_output_dim": 48,
    },
    "llama4_text": {"moe_layers": [1], "interleave_moe_layer_step": 2, "attention_chunk_size": 64},
    "mamba2": {"num_heads": 8},
    "minimax": {
        "full_attn_alpha_factor": 1.25,
        "full_attn_beta_factor": 0.75,
        "linear_attn_alpha_factor": 0.8,
        "linear_attn_beta_factor": 1.5,
        "mlp_alpha_factor": 0.9,
        "mlp_beta_factor": 1.2,
    },
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},  # height and width are interleaved
    },
    "mistral_large4_text": {"kv_source_layers": [0, 1]},
    "moonshine_streaming": {"num_key_value_heads": 4},  # which its defaults lack
    "mllama_vision_model": {"vision_output_dim": 96},
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 40},
    "muse_spark": {"out_hidden_size": 128, "projector_hidden_size": 40},
    "paddleocr_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
    "perception_lm": {
        "projector_pooling_ratio": 2,
        "vision_config": {
            "architecture": "test_vit",
            "patch_size": 4,
            "model_args": {"embed_dim": 64, "img_size": [32, 32], "patch_size": 4, "global_pool": ""},
        },
    },
    "paligemma": {"projection_dim": 64},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [40, 32]},
    "vipllava": {"vision_feature_layer": [-2, -1]},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 90},
    "qwen3_omni_moe_audio_encoder": {"max_source_positions": 1500},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 90},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "hc_lowrank": 32,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 48,
        "indexer_compress_ratio": 4,
        "ple_embed_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [24, 40]},
    "xlm": {"causal": True},
    "zamba": {"num_hidden_layers": 4, "attention_hidden_size": 128, "attention_head_dim": 32},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}
"""Further values by model type."""
