"""Values of tiny towers: what reads images, videos and sound beside a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH = 32
"""Hidden size of a tower, which differs from a language model's 64."""
TEXT_WIDTH = 64
IMAGE_SIZE = 32
PATCH_SIZE = 4

PINPOINTS = [[IMAGE_SIZE, IMAGE_SIZE], [IMAGE_SIZE, 2 * IMAGE_SIZE], [2 * IMAGE_SIZE, IMAGE_SIZE]]
"""Sizes of images that are cut into tiles."""

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "hidden_dim", "encoder_hidden_size"), WIDTH),
    **dict.fromkeys(("attention_hidden_size", "adapter_in_dim"), WIDTH),
    "patch_embed_hidden_size": 3 * PATCH_SIZE**2,
    **dict.fromkeys(("adapter_input_size", "vision_hidden_size", "codebook_dim"), WIDTH),
    **dict.fromkeys(("projector_input_dim", "audio_hidden_size"), WIDTH),
    "mm_embed_dim": TEXT_WIDTH,
    **dict.fromkeys(("out_hidden_size", "output_dim", "output_proj_dims", "adapter_out_dim"), TEXT_WIDTH),
    **dict.fromkeys(("text_hidden_size", "projector_output_dim", "image_token_embed_dim"), TEXT_WIDTH),
    **dict.fromkeys(("projection_dim", "decoder_hidden_size"), TEXT_WIDTH),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "ffn_dim", "encoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("projector_hidden_size", "projection_hidden_size", "projection_hidden_dim"), 40),
    **dict.fromkeys(("moe_intermediate_size", "projection_intermediate_size", "downsample_hidden_size"), 24),
    **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "conf_num_attention_heads", "resampler_n_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_blocks", "conf_num_hidden_layers", "resampler_depth", "num_global_layers"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_kv", "resampler_head_dim"), 16),
    **dict.fromkeys(("num_mel_bins", "input_feat_size"), 16),
    **dict.fromkeys(("image_size", "resolution", "crop_size"), IMAGE_SIZE),
    "patch_size": PATCH_SIZE,
    "num_position_embeddings": (IMAGE_SIZE // PATCH_SIZE) ** 2,
    **dict.fromkeys(("num_patches", "num_image_tokens"), (IMAGE_SIZE // PATCH_SIZE) ** 2),
    **dict.fromkeys(("pos_emb_height", "pos_emb_width", "posemb_grid_size"), IMAGE_SIZE // PATCH_SIZE),
    **dict.fromkeys(("position_embedding_size", "mm_posemb_size"), 64),
    **dict.fromkeys(("base_channels", "latent_channels", "output_channels", "embedding_dim"), WIDTH),
    **dict.fromkeys(("codebook_size", "num_embeddings"), 32),
    **dict.fromkeys(("window_size", "context_size"), 8),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("num_query_tokens", "latent_query_num", "resampler_n_latents"), 4),
    **dict.fromkeys(("max_source_positions",), 50),
    **dict.fromkeys(("insert_layer_id",), 0),
    **dict.fromkeys(("n_window",), 10),
    **dict.fromkeys(("upsample_groups", "upsample_initial_channel", "decoder_dim"), WIDTH),
    **dict.fromkeys(("num_filters",), 4),
    **dict.fromkeys(("vocab_size",), 97),
}  # fmt: skip
"""Attributes with these names get these values, unless their defaults are smaller."""
_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "layers", "encoder_layers", "num_blocks")
_INDEXES = ("_indexes", "_indices")


def is_tower(name: str) -> bool:
    """True if a part of a configuration, by its name, is not that of a language model."""
    parts = ("vision", "audio", "vq_", "qformer", "perceiver", "adapter", "adaptor", "projector", "codec")
    others = ("sam_", "tokenizer", "dit_", "bigvgan", "2wav", "backbone", "speech")
    return any(part in name for part in parts + others)


def tower_values(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a tiny tower that differ from its defaults.

    Args:
        values: the defaults by attribute.
    """
    depth = next((values[name] for name in _DEPTHS if isinstance(values.get(name), int)), 0)
    layers = min(depth, 2)
    tiny: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int) and name in SIZES:
            tiny[name] = min(SIZES[name], value)
        elif not isinstance(value, Sequence) or isinstance(value, str) or not value:
            continue
        elif name in ("image_size", "patch_size") and len(value) == 2:
            tiny[name] = [SIZES[name]] * 2
        elif name.endswith(_INDEXES) and all(isinstance(index, int) for index in value) and depth:
            tiny[name] = sorted({index * layers // depth for index in value})
        elif len(value) == depth:
            kinds = list(dict.fromkeys(value))
            tiny[name] = [kinds[i % len(kinds)] for i in range(layers)]
    if "base_channels" in tiny and "hidden_size" in tiny and values.get("channel_multiplier"):
        tiny["hidden_size"] = tiny["base_channels"] * values["channel_multiplier"][-1]  # of the last stage
    if "embed_dim" in tiny and "depth" in tiny and "hidden_size" in tiny:
        tiny["hidden_size"] = TEXT_WIDTH  # a tower whose merger writes it
    return tiny
