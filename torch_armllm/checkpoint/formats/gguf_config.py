"""The configuration of a GGUF file's model, with the fields that transformers does not read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, MixtralConfig, PreTrainedConfig

from torch_armllm.checkpoint.formats.gguf_attention import apply_attention
from torch_armllm.checkpoint.formats.gguf_ends import apply_ends
from torch_armllm.checkpoint.formats.gguf_file import GgufFile
from torch_armllm.checkpoint.formats.gguf_header import Header
from torch_armllm.checkpoint.formats.gguf_rope import apply_rope
from torch_armllm.checkpoint.formats.gguf_settings import apply_settings
from torch_armllm.checkpoint.model_config import check_sizes, config_errors

_BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up"),
}
"""Settings that give layers biases, and the tensors of the first block that say so."""
_TYPES = {"gpt-oss": "gpt_oss", "gemma4": "gemma4_text"}
"""Architectures whose header transformers cannot read, or reads in part, and their model types."""


def read_config(file: GgufFile) -> tuple[PreTrainedConfig, Header]:
    """Reads the configuration of the model in a file.

    Returns:
        The configuration, and the header, which knows what nobody read.

    Raises:
        ValueError: transformers does not support the architecture, or a setting of the file.
    """
    path = file.path
    header = Header(path, file.architecture, file.fields)
    try:
        with config_errors(path):
            made = _transformers_config(file, header)
            check_sizes(path, made)
    except ValueError as error:
        raise ValueError(f"{path}: architecture {file.architecture!r} cannot be read ({error})") from error
    made = _with_experts(made, header)
    by_layer = (
        made.model_type == "gemma4_text"
    )  # its layers' sizes are computed of the values that are set here
    config: Any = SimpleNamespace(**_values(made)) if by_layer else made
    config.tie_word_embeddings = "output.weight" not in file.tensors
    _blocks(config, header)
    apply_settings(config, header)
    apply_attention(config, header)
    apply_rope(config, header, file)
    apply_ends(config, file.fields)
    _by_tensors(config, file)
    if by_layer:
        with config_errors(path):
            config = AutoConfig.for_model(**vars(config))
    return config, header


def _values(config: PreTrainedConfig) -> dict[str, Any]:
    values = {name: value for name, value in config.to_dict().items() if name != "per_layer_config"}
    return {"global_head_dim": None, "num_global_key_value_heads": None, **values}


def _transformers_config(file: GgufFile, header: Header) -> PreTrainedConfig:
    if file.architecture in _TYPES:
        blocks = header.integer("block_count")
        rows = file.shape("token_embd.weight")[0] if "token_embd.weight" in file.tensors else None
        if blocks is None or rows is None:
            raise ValueError("it has no block_count or no token_embd.weight: it is damaged")
        return AutoConfig.for_model(_TYPES[file.architecture], num_hidden_layers=blocks, vocab_size=rows)
    path = Path(file.path)
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        path.parent, gguf_file=path.name, trust_remote_code=False
    )
    return config


def extra_blocks(header: Header) -> int:
    """Returns the number of last blocks that predict further tokens, which transformers' models lack."""
    return header.integer("nextn_predict_layers") or 0


def _blocks(config: Any, header: Header) -> None:
    count = header.integer("block_count")
    if count is None:
        return
    count -= extra_blocks(header)
    if count != config.num_hidden_layers:
        raise header.unsupported("nextn_predict_layers", extra_blocks(header), config.model_type)


def _with_experts(config: PreTrainedConfig, header: Header) -> PreTrainedConfig:
    """Returns Mixtral's configuration: llama.cpp's header is a Llama with experts, read as one without."""
    count = header.integer("expert_count")
    if config.model_type not in ("llama", "mistral") or not count:
        return config
    active = header.integer("expert_used_count")
    if active is None:
        raise ValueError(f"{header.path} has {count} experts and no expert_used_count: it is damaged")
    values = {
        name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")
    }
    return MixtralConfig(**values, num_local_experts=count, num_experts_per_tok=active)


def _by_tensors(config: Any, file: GgufFile) -> None:
    """Sets what no field of the header says, and the tensors do."""
    for name, layers in _BIASES.items():
        if hasattr(config, name) and any(f"blk.0.{layer}.bias" in file.tensors for layer in layers):
            setattr(config, name, True)
    if config.model_type == "stablelm":
        config.use_qkv_bias = "blk.0.attn_q.bias" in file.tensors
        config.use_parallel_residual = "blk.0.ffn_norm.weight" not in file.tensors
    if config.model_type == "gemma4_text":
        full = [n for n, kind in enumerate(config.layer_types) if kind == "full_attention"]
        config.attention_k_eq_v = any(
            f"blk.{n}.attn_k.weight" in file.tensors and f"blk.{n}.attn_v.weight" not in file.tensors
            for n in full
        )
        config.vocab_size_per_layer_input = config.vocab_size
    if config.model_type == "falcon":
        grouped, two_norms = config.num_kv_heads > 1, "blk.0.attn_norm_2.weight" in file.tensors
        config.new_decoder_architecture, config.multi_query = grouped or two_norms, not grouped
        config.num_ln_in_parallel_attn = 1 + two_norms if config.new_decoder_architecture else None
    if config.model_type == "starcoder2":
        config.use_bias = "blk.0.attn_q.bias" in file.tensors
