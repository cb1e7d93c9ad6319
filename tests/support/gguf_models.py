"""GGUF files of tiny float models, converted as llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.gguf_files import KINDS, encode

Rule = Callable[[Any, str, Tensor], Tensor]


def pairs(weight: Tensor, heads: int) -> Tensor:
    """Interleaves the two halves of each head's rows, as llama.cpp rotates them."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _llama(c: Any, name: str, weight: Tensor) -> Tensor:
    heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(name.split(".")[-2])
    return pairs(weight, heads) if heads else weight


def _plus_one(c: Any, name: str, weight: Tensor) -> Tensor:
    return weight + 1 if "norm.weight" in name else weight


def _gpt2(c: Any, name: str, weight: Tensor) -> Tensor:
    turned = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    return weight.t() if name.endswith(turned) else weight


def _bloom(c: Any, name: str, weight: Tensor) -> Tensor:
    if "attn_qkv" not in name:
        return weight
    parts = weight.view(c.n_head, 3, -1, *weight.shape[1:])
    return torch.cat([parts[:, part].reshape(-1, *weight.shape[1:]) for part in range(3)])


def _falcon(c: Any, name: str, weight: Tensor) -> Tensor:
    if "attn_qkv" not in name or not c.new_decoder_architecture:
        return weight
    heads, groups = c.num_attention_heads, c.num_kv_heads
    parts = weight.view(groups, heads // groups + 2, -1, weight.shape[1])
    split = parts[:, :-2], parts[:, [-2]], parts[:, [-1]]
    return torch.cat([part.reshape(-1, weight.shape[1]) for part in split])


def _mamba(c: Any, name: str, weight: Tensor) -> Tensor:
    weight = -weight.exp() if name.endswith("ssm_a") else weight
    return weight.squeeze(1) if name.endswith("ssm_conv1d.weight") else weight


def _lfm2(c: Any, name: str, weight: Tensor) -> Tensor:
    return weight.squeeze(1) if name.endswith("shortconv.conv.weight") else weight


def _qwen35(c: Any, name: str, weight: Tensor) -> Tensor:
    keys, values = c.linear_num_key_heads, c.linear_num_value_heads
    size, before = c.linear_value_head_dim, 2 * keys * c.linear_key_head_dim
    order = torch.arange(values).view(keys, -1).t().flatten()
    wide = (order[:, None] * size + torch.arange(size)).flatten()
    part = name.partition(".")[2].partition(".")[2] or name
    if "norm.weight" in name and "ssm_norm" not in name:
        return weight + 1
    if part == "ssm_a":
        return -weight.exp()[order]
    if part in ("ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
        return weight[order]
    if part == "attn_gate.weight":
        return weight[wide]
    if part == "ssm_out.weight":
        return weight[:, wide]
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        weight = weight.squeeze(1)
        return torch.cat((weight[:before], weight[before:][wide]))
    return weight.squeeze(0) if part == "ffn_gate_inp_shexp.weight" else weight


RULES: dict[str, Rule] = {
    "llama": _llama,
    "gemma2": _plus_one,
    "gemma3": _plus_one,
    "nemotron": _plus_one,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "falcon": _falcon,
    "mamba": _mamba,
    "lfm2": _lfm2,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
}
"""Changes of the converter, by llama.cpp's name of the architecture."""
_OWN_NAMES = {"linear_attn.dt_bias": "ssm_dt.bias", "e_score_correction_bias": "exp_probs_b.bias"}


def converted(model: PreTrainedModel, architecture: str) -> dict[str, Tensor]:
    """Returns the tensors of a model by their names in a file, float32."""
    config: Any = model.config
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    rule = RULES.get(architecture, lambda c, name, weight: weight)
    tied = config.tie_word_embeddings
    found: dict[str, Tensor] = {}
    for parameter, value in model.state_dict().items():
        if parameter == "lm_head.weight" and tied:
            continue
        layer = next((part for part in parameter.split(".") if part.isdigit()), "")
        if ".experts." in parameter:
            found.update(_experts(model, parameter, value, layer))
            continue
        stem, _, suffix = parameter.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = parameter, ""
        own = next((one for end, one in _OWN_NAMES.items() if parameter.endswith(end)), None)
        name = None if own is not None else names.get_name(stem) or names.get_name(stem.partition(".")[2])
        assert own is not None or name is not None, parameter
        target = f"blk.{layer}.{own}" if own is not None else f"{name}.{suffix}".rstrip(".")
        if target.endswith(("attn_sinks", "layer_output_scale")):
            target += ".weight"
        found[target] = rule(config, target, value.float()).contiguous()
    return found


def _experts(model: PreTrainedModel, parameter: str, value: Tensor, layer: str) -> dict[str, Tensor]:
    kind = "bias" if parameter.endswith("_bias") else "weight"
    gpt_oss = model.config.model_type == "gpt_oss"  # gates and ups alternate, inputs are rows
    value = value.transpose(1, 2) if gpt_oss and kind == "weight" else value
    if "gate_up" not in parameter:
        return {f"blk.{layer}.ffn_down_exps.{kind}": value.contiguous()}
    gate, up = (value[:, 0::2], value[:, 1::2]) if gpt_oss else value.chunk(2, 1)
    halves = {"gate": gate, "up": up}
    return {f"blk.{layer}.ffn_{half}_exps.{kind}": part.contiguous() for half, part in halves.items()}


def fields_of(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    """Returns the fields of a header that all architectures have, without the architecture in their names."""
    c: Any = model.config
    heads = c.num_attention_heads if hasattr(c, "num_attention_heads") else 0
    by_layer = c.model_type == "gemma4_text"
    size = 0 if not heads or by_layer else getattr(c, "head_dim", None) or c.hidden_size // heads
    rope = getattr(c, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    epsilons = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
    epsilon = float(next(getattr(c, name) for name in epsilons if hasattr(c, name)))
    rms = architecture in ("mamba", "lfm2") or hasattr(c, "rms_norm_eps")
    fields: dict[str, Any] = {
        "block_count": c.num_hidden_layers,
        "vocab_size": c.vocab_size,
        "embedding_length": c.hidden_size,
        "feed_forward_length": getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
        "attention.head_count": heads,
        f"attention.layer_norm_{'rms_' if rms else ''}epsilon": epsilon,
    }
    if length := getattr(c, "max_position_embeddings", None):
        fields["context_length"] = length
    if kv_heads := getattr(c, "num_key_value_heads", None):
        fields["attention.head_count_kv"] = kv_heads
    if rope:
        fields["rope.freq_base"] = float(rope["rope_theta"])
        fields["rope.dimension_count"] = int(size * float(rope.get("partial_rotary_factor") or 1.0))
        fields |= {"attention.key_length": size, "attention.value_length": size}
    return fields


def write_model(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
    tokens: int = 0,
    kind: str = "F32",
) -> None:
    """Writes a model in float32, or its matrices in another type.

    Args:
        path: the file.
        model: the model.
        architecture: llama.cpp's name.
        fields: of the header, in place of or in addition to `fields_of`; None leaves one out.
        tensors: in place of or in addition to the model's; None leaves one out.
        tokens: number of tokens in the vocabulary of the header.
        kind: the type of the matrices of layers and experts.
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in (fields_of(model, architecture) | dict(fields or {})).items():
        if value is not None:
            add_field(writer, name if name.startswith("tokenizer.") else f"{architecture}.{name}", value)
    if tokens:
        writer.add_token_list([f"t{number}" for number in range(tokens)])
    for name, weight in (converted(model, architecture) | dict(tensors or {})).items():
        if weight is None:
            continue
        matrix = (
            weight.dim() > 1
            and weight.shape[-1] % 32 == 0
            and name.startswith("blk.")
            and not name.endswith(_KEPT_FLOATS)
        )
        raw, own = encode(weight.detach().contiguous(), kind if matrix else "F32")[0], KINDS[kind]
        writer.add_tensor(name, raw, raw_dtype=own if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_KEPT_FLOATS = (
    "_gate_inp.weight",
    "conv1d.weight",
    "shexp.weight",
    "exps.bias",
    "ssm_alpha.weight",
    "ssm_beta.weight",
)
"""Tensors that llama.cpp leaves in floats, or that are too small here."""


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """Adds a field with the type of its value."""
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(name, value)
