"""Norms, rotary embeddings, gated activations, routing and small dense layers: ops that walk over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_armllm.ops import activation, embedding, linear, moe, norm, rope

TOKENS = [1, 16, 512]
BF16 = 2  # bytes


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("fused", ["rms_norm", "add_rms_norm", "layer_norm"])
def test_norm(measure: Any, tokens: int, fused: str) -> None:
    x, y = torch.randn(2, tokens, 2048).bfloat16().unbind()
    weight, bias = torch.rand(2, 2048).bfloat16().unbind()
    calls = {
        "rms_norm": (lambda: norm.rms_norm(x, weight, 1e-6), 2),
        "add_rms_norm": (lambda: norm.add_rms_norm(x, y, weight, 1e-6), 4),
        "layer_norm": (lambda: norm.layer_norm(x, weight, bias, 1e-6), 2),
    }
    call, rows = calls[fused]
    measure(call, read=rows * x.numel() * BF16)


@pytest.mark.parametrize("tokens", TOKENS)
def test_rope(measure: Any, tokens: int) -> None:
    q, k = torch.randn(tokens, 32, 64).bfloat16(), torch.randn(tokens, 8, 64).bfloat16()
    cos, sin = rope.rope_table(torch.arange(tokens), torch.rand(32))
    measure(lambda: rope.rope_(q, k, cos, sin), read=2 * (q.numel() + k.numel()) * BF16)


@pytest.mark.parametrize("tokens", TOKENS)
def test_rope_table(measure: Any, tokens: int) -> None:
    positions, inv_freq = torch.arange(tokens), torch.rand(32)
    measure(lambda: rope.rope_table(positions, inv_freq), read=2 * tokens * 32 * 4)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_gated_act(measure: Any, tokens: int, name: str) -> None:
    gate, up = torch.randn(2, tokens, 8192).bfloat16().unbind()
    measure(lambda: activation.gated_act(gate, up, name), read=3 * gate.numel() * BF16)


@pytest.mark.parametrize("tokens", TOKENS)
def test_moe_route(measure: Any, tokens: int) -> None:
    logits = torch.randn(tokens, 128).bfloat16()
    measure(lambda: moe.moe_route(logits, 8, "softmax", True), read=logits.numel() * BF16)


@pytest.mark.parametrize("tokens", TOKENS)
def test_dense_linear(measure: Any, tokens: int) -> None:
    x, weight = torch.randn(tokens, 2048).bfloat16(), torch.randn(128, 2048).bfloat16()
    measure(
        lambda: linear.dense_linear(x, weight),
        read=weight.numel() * BF16,
        operations=2 * tokens * weight.numel(),
    )


@pytest.mark.parametrize("tokens", TOKENS)
def test_split_embedding(measure: Any, tokens: int) -> None:
    q = torch.randint(-127, 128, (8192, 2048), dtype=torch.int8)
    packed, rest = linear.pack_int8(q, torch.rand(8192)), torch.randint_like(q, -127, 128)
    ids = torch.randint(0, 8192, (tokens,))
    measure(lambda: embedding.split_embedding(ids, packed, rest, torch.bfloat16), read=tokens * 2 * 2048)
