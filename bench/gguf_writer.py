"""GGUF files for llama.cpp: random weights as ``Q4_0``, or a model's own weights as float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

from bench import gguf_hybrid as hybrid
from bench.gguf_tensors import RandomTensors, close
from bench.peers.shapes import Shape

Array = Any

ARCHITECTURES = {
    "llama": "llama",
    "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2",
    **hybrid.ARCHITECTURES,
}
POST_NORMS = {"qwen3_5_moe_text": "post_attention_norm"}
"""Name of the norm before the experts, where it is not ``ffn_norm``."""
FINAL_NORMS = {"lfm2": "token_embd_norm"}
HEAD_NORMS = ("qwen3_moe", "qwen3_5_moe_text", "lfm2")
"""Models that normalize queries and keys."""


def write_random(path: Path, shape: Shape, tokenizer: Path | None = None) -> None:
    """Write a ``Q4_0`` file of random weights of a shape.

    Args:
        path: the new file.
        shape: the model.
        tokenizer: a GGUF file whose tokenizer the new one has, too, of as many tokens; None: it has none.
    """
    c = shape.config
    writer = RandomTensors(path, ARCHITECTURES[c["model_type"]])
    writer.file.add_name("random")
    _settings(writer.file, c)
    if tokenizer is None:
        writer.file.add_tokenizer_model("none")
    else:
        _copy_tokenizer(writer.file, tokenizer)
    if c["model_type"] in hybrid.ARCHITECTURES:
        hybrid.settings(writer, c)
    hidden, vocabulary = c["hidden_size"], c["vocab_size"]
    tied = c["tie_word_embeddings"]
    writer.blocks("token_embd", vocabulary, hidden, head=tied)
    writer.ones(FINAL_NORMS.get(c["model_type"], "output_norm"), hidden)
    if not tied:
        writer.blocks("output", vocabulary, hidden, head=True)
    for layer in range(c["num_hidden_layers"]):
        at = f"blk.{layer}"
        writer.ones(f"{at}.attn_norm", hidden)
        writer.ones(f"{at}.{POST_NORMS.get(c['model_type'], 'ffn_norm')}", hidden)
        if _is_recurrent(c, layer):
            hybrid.recurrent_layer(writer, at, c)
        else:
            (_latent_attention if "kv_lora_rank" in c else _attention)(writer, at, c)
        experts = _experts_of(c)
        if experts and layer >= c.get("first_k_dense_replace", 0):
            _experts(writer, at, c, experts)
        else:
            _mlp(writer, at, hidden, c["intermediate_size"])
    writer.close()


def _copy_tokenizer(file: gguf.GGUFWriter, source: Path) -> None:
    for name, field in gguf.GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            kinds = field.types
            file.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)


def _is_recurrent(c: dict[str, Any], layer: int) -> bool:
    return "layer_types" in c and c["layer_types"][layer] in hybrid.RECURRENT


def _experts_of(c: dict[str, Any]) -> int:
    """Return the number of routed experts in a layer; 0 if it has none."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((int(c[name]) for name in names if c.get(name)), 0)


def _head_size(c: dict[str, Any]) -> int:
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


LLAMA_NAMES = {
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


def write_float(path: Path, model: Any) -> None:
    """Write a ``LlamaForCausalLM`` with tied embeddings, in float32 and without a tokenizer."""
    c = model.config.to_dict()
    c["rope_theta"] = model.config.rope_parameters["rope_theta"]
    c["head_dim"] = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    file = gguf.GGUFWriter(path, "llama")
    _settings(file, c)
    file.add_tokenizer_model("none")
    file.add_file_type(gguf.LlamaFileType.ALL_F32)
    heads = {"self_attn.q_proj": c["num_attention_heads"], "self_attn.k_proj": c["num_key_value_heads"]}
    roots = {"embed_tokens": "token_embd", "norm": "output_norm"}
    for name, weight in model.state_dict().items():
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        rows = weight.float()
        if parts[0] == "layers":
            rows = _pairs(rows, heads[parts[2]]) if parts[2] in heads else rows
            file.add_tensor(f"blk.{parts[1]}.{LLAMA_NAMES[parts[2]]}.weight", rows.numpy())
        elif parts[0] in roots:
            file.add_tensor(f"{roots[parts[0]]}.weight", rows.numpy())
    close(file)


def _pairs(weight: Tensor, heads: int) -> Tensor:
    """Interleave the two halves of each head's rows ``(N, K)``, as llama.cpp rotates them."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _settings(file: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    file.add_vocab_size(c["vocab_size"])
    file.add_block_count(c["num_hidden_layers"])
    file.add_context_length(c["max_position_embeddings"])
    file.add_embedding_length(c["hidden_size"])
    file.add_feed_forward_length(c["intermediate_size"])
    file.add_head_count(c["num_attention_heads"])
    file.add_layer_norm_rms_eps(c["rms_norm_eps"])
    file.add_rope_freq_base(c["rope_theta"])
    if "num_experts_per_tok" in c:
        file.add_expert_count(_experts_of(c))
        file.add_expert_used_count(c["num_experts_per_tok"])
        file.add_expert_feed_forward_length(_expert_size(c))
    if "kv_lora_rank" not in c:
        size, kv_heads = _head_size(c), c["num_key_value_heads"]
        counted = "layer_types" in c and c["model_type"] != "qwen3_5_moe_text"
        by_layer = [0 if _is_recurrent(c, i) else kv_heads for i in range(c["num_hidden_layers"])]
        file.add_head_count_kv(by_layer if counted else kv_heads)
        file.add_key_length(size)
        file.add_value_length(size)
        file.add_rope_dimension_count(size // 4 if c["model_type"] == "qwen3_5_moe_text" else size)
        return
    file.add_head_count_kv(1)
    file.add_q_lora_rank(c["q_lora_rank"] or 0)
    file.add_kv_lora_rank(c["kv_lora_rank"])
    file.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    file.add_value_length(c["kv_lora_rank"])
    file.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    file.add_value_length_mla(c["v_head_dim"])
    file.add_rope_dimension_count(c["qk_rope_head_dim"])
    file.add_leading_dense_block_count(c["first_k_dense_replace"])
    file.add_expert_shared_count(c["n_shared_experts"])
    file.add_expert_weights_scale(c["routed_scaling_factor"])
    file.add_expert_weights_norm(c["norm_topk_prob"])
    file.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def _expert_size(c: dict[str, Any]) -> int:
    return int(c.get("moe_intermediate_size") or c["intermediate_size"])


def _attention(writer: RandomTensors, at: str, c: dict[str, Any]) -> None:
    hidden, dim = c["hidden_size"], _head_size(c)
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    gated = c["model_type"] == "qwen3_5_moe_text"  # its query projection computes gates of the output too
    writer.blocks(f"{at}.attn_q", 2 * queries if gated else queries, hidden)
    writer.blocks(f"{at}.attn_k", keys, hidden)
    writer.blocks(f"{at}.attn_v", keys, hidden)
    writer.blocks(f"{at}.attn_output", hidden, queries)
    if c["model_type"] in HEAD_NORMS:
        writer.ones(f"{at}.attn_q_norm", dim)
        writer.ones(f"{at}.attn_k_norm", dim)


def _latent_attention(writer: RandomTensors, at: str, c: dict[str, Any]) -> None:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    writer.blocks(f"{at}.attn_q", heads * (nope + rope), hidden)
    writer.blocks(f"{at}.attn_kv_a_mqa", rank + rope, hidden)
    writer.ones(f"{at}.attn_kv_a_norm", rank)
    writer.blocks(f"{at}.attn_k_b", heads, rank, nope)
    writer.blocks(f"{at}.attn_v_b", heads, value, rank)
    writer.blocks(f"{at}.attn_output", hidden, heads * value)


def _mlp(writer: RandomTensors, at: str, hidden: int, inner: int, suffix: str = "") -> None:
    writer.blocks(f"{at}.ffn_gate{suffix}", inner, hidden)
    writer.blocks(f"{at}.ffn_up{suffix}", inner, hidden)
    writer.blocks(f"{at}.ffn_down{suffix}", hidden, inner)


def _experts(writer: RandomTensors, at: str, c: dict[str, Any], experts: int) -> None:
    hidden, inner = c["hidden_size"], _expert_size(c)
    writer.floats(f"{at}.ffn_gate_inp", experts, hidden)
    writer.blocks(f"{at}.ffn_gate_exps", experts, inner, hidden)
    writer.blocks(f"{at}.ffn_up_exps", experts, inner, hidden)
    writer.blocks(f"{at}.ffn_down_exps", experts, hidden, inner)
    if shared := c.get("n_shared_experts"):
        _mlp(writer, at, hidden, inner * shared, "_shexp")
    elif shared := c.get("shared_expert_intermediate_size") or c.get("shared_intermediate_size"):
        _mlp(writer, at, hidden, shared, "_shexp")
    if "shared_expert_intermediate_size" in c:
        writer.floats(f"{at}.ffn_gate_inp_shexp", hidden)
