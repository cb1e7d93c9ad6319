"""Writing a Llama model as a GGUF file of float32 weights, without a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: Any, place: Path) -> None:
    """Writes a ``LlamaForCausalLM`` whose head is tied to its embedding."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(place, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        if parts[0] == "layers":
            rows = weight.float()
            if parts[2] in heads:
                rows = _pairs(rows, heads[parts[2]])
            writer.add_tensor(f"blk.{parts[1]}.{_NAMES[parts[2]]}.weight", rows.numpy())
        elif parts[0] in ("embed_tokens", "norm"):
            writer.add_tensor(
                {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[0]],
                weight.float().numpy(),
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows (N, K) with the two halves of each head interleaved, as llama.cpp rotates them."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
