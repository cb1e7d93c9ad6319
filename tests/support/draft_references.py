"""References of draft layers in plain float operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.support.draft_folders import is_qwen, merge_names, one_layer_of


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def mtp_reference(family: str, folder: Path, model: Any, number: int = 0) -> Any:
    """Returns a function from token ids and hidden states to the layer's hidden states and logits."""
    tensors = load_file(folder / "model.safetensors")
    first, second, joins, last = (tensors[f"{name}.weight"] for name in merge_names(family, number))
    if is_qwen(family):
        first, second, last = first + 1, second + 1, last + 1
    eps, layer = model.config.rms_norm_eps, one_layer_of(model, number)

    def compute(ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(ids, tensors["model.embed_tokens.weight"])
        x = torch.cat([rms(embedded, first, eps), rms(hidden, second, eps)], -1) @ joins.T
        out = layer(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        normed = rms(out, last, eps)
        return (normed if is_qwen(family) else out), normed @ tensors["lm_head.weight"].T

    return compute


def eagle3_reference(folder: Path, model: Any) -> Any:
    """Returns the same function of an EAGLE-3 draft; its hidden states have one third of the first width."""
    t = {name.removeprefix("midlayer."): x for name, x in load_file(folder / "model.safetensors").items()}
    config = model.config
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps = config.rms_norm_eps

    def turn(x: Tensor) -> Tensor:  # (heads, T, width)
        half = width // 2
        theta = config.rope_parameters["rope_theta"]
        frequencies = theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def attend(x: Tensor) -> Tensor:
        q, k, v = (
            (x @ t[f"self_attn.{name}_proj.weight"].T).view(len(x), count, width).transpose(0, 1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (turn(k), v))
        scores = turn(q) @ k.transpose(1, 2) * width**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1) @ t["self_attn.o_proj.weight"].T

    def compute(ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = model.get_input_embeddings()(ids)
        normed = (rms(embedded, t["input_layernorm.weight"], eps), rms(hidden, t["hidden_norm.weight"], eps))
        x = hidden + attend(torch.cat(normed, -1))
        y = rms(x, t["post_attention_layernorm.weight"], eps)
        gate, up = y @ t["mlp.gate_proj.weight"].T, y @ t["mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ t["mlp.down_proj.weight"].T
        drafted = rms(x, t["norm.weight"], eps) @ t["lm_head.weight"].T
        logits = drafted.new_full((len(ids), config.vocab_size), float("-inf"))
        logits[:, torch.arange(drafted.shape[1]) + t["d2t"]] = drafted
        return x, logits

    return compute
