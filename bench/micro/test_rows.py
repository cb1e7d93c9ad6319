"""Row-wise ops: norms, rotary embeddings, gated activations, routing and small dense layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_armllm.ops import activation, embedding, linear, lora, moe, norm, rope, sample

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
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("columns", "rows"), [(2048, 2048), (2048, 16384), (8192, 2048)])
def test_rotated_linear(measure: Any, columns: int, rows: int, rotated: bool, tokens: int) -> None:
    """A linear layer whose inputs are rotated, or not."""
    q = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
    multipliers = torch.randint(1, 17, (rows, columns // 32), dtype=torch.uint8)
    weight, x = linear.pack_int4(q, multipliers, torch.rand(rows)), torch.randn(tokens, columns).bfloat16()
    operations = 2 * tokens * rows * columns
    measure(lambda: linear.int4_linear(x, weight, rows, rotated=rotated), operations=operations)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("adapters", [1, 8])
@pytest.mark.parametrize(("columns", "rows"), [(2048, 2048), (2048, 8192), (8192, 2048)])
def test_lora_linear(measure: Any, columns: int, rows: int, adapters: int, integers: bool) -> None:
    """Adapters of rank 16 of eight tokens: the same one, or one for each."""
    base, x = torch.randn(8, rows).bfloat16(), torch.randn(8, columns).bfloat16()
    a = torch.randn(adapters, 16, columns).bfloat16()
    b = lora.lora_blocks(torch.randn(adapters, 16, rows).bfloat16())
    if integers:
        a, b = lora.lora_integers(a), lora.lora_integers(b)
    ranks = torch.full((adapters,), 16, dtype=torch.int32)
    slots = torch.arange(8, dtype=torch.int32) % adapters
    measure(lambda: lora.lora_linear(base, x, a, b, ranks, slots), read=a.nbytes + b.nbytes)


@pytest.mark.parametrize("adapters", [1, 8])
def test_lora_embedding(measure: Any, adapters: int) -> None:
    """Adapters of rank 16 of the embeddings of eight tokens."""
    base, ids = torch.randn(8, 2048).bfloat16(), torch.randint(0, 32000, (8,))
    table = torch.randn(adapters, 32000, 16).bfloat16()
    b = lora.lora_integers(lora.lora_blocks(torch.randn(adapters, 16, 2048)))
    ranks = torch.full((adapters,), 16, dtype=torch.int32)
    slots = torch.arange(8, dtype=torch.int32) % adapters
    measure(lambda: lora.lora_embedding(base, ids, table, b, ranks, slots), read=b.nbytes)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("quantized", [False, True])
def test_norm_and_linear(measure: Any, tokens: int, quantized: bool) -> None:
    """A norm and the linear layer after it, with rows of the model's dtype or of INT8 in between."""
    size = 2048
    x, norm_weight = torch.randn(tokens, size).bfloat16(), torch.rand(size).bfloat16()
    q = torch.randint(-8, 8, (size, size), dtype=torch.int8)
    multipliers = torch.randint(1, 17, (size, size // 32), dtype=torch.uint8)
    weight = linear.pack_int4(q, multipliers, torch.rand(size))

    def through_bfloat16() -> torch.Tensor:
        return linear.int4_linear(norm.rms_norm(x, norm_weight, 1e-6), weight, size)

    def through_int8() -> torch.Tensor:
        values, scales, _ = linear.rms_norm_int8(x, norm_weight, 1e-6)
        return linear.int4_linear_q(values, scales, weight, size)

    measure(through_int8 if quantized else through_bfloat16, operations=2 * tokens * size * size)


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


VOCABULARY = 151_936  # Qwen3's


def torch_sample(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Samples by torch's own ops, as the peer."""
    if top_k == 1:
        return logits.argmax(-1)
    logits = logits.float()
    if top_k > 0:
        bound = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < bound, float("-inf"))
    if top_p < 1:
        ordered, index = logits.sort(dim=-1)
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        logits = logits.masked_fill(dropped.scatter(-1, index, dropped), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("kind", ["greedy", "plain", "top_k", "top_p", "top_k_top_p"])
@pytest.mark.parametrize("peer", [False, True], ids=["armllm", "torch"])
def test_sample(measure: Any, rows: int, kind: str, peer: bool) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(rows, VOCABULARY) * 3).bfloat16()
    top_k = {"greedy": 1, "top_k": 50, "top_k_top_p": 50}.get(kind, 0)
    top_p = 0.9 if "top_p" in kind else 1.0
    temperature, mass = torch.full((rows,), 0.0 if kind == "greedy" else 1.0), torch.full((rows,), top_p)
    count, seeds, steps = torch.full((rows,), top_k), torch.arange(rows), torch.arange(rows)
    none = torch.zeros(rows)
    read = logits.numel() * BF16
    if peer:
        measure(lambda: torch_sample(logits, top_k, top_p), read=read)
    else:
        measure(lambda: sample.sample(logits, temperature, count, mass, none, seeds, steps), read=read)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("peer", [False, True], ids=["armllm", "torch"])
def test_sample_probabilities(measure: Any, rows: int, peer: bool) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(rows, VOCABULARY) * 3).bfloat16()
    one, none, all_tokens = torch.ones(rows), torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
    if peer:
        measure(lambda: logits.float().softmax(-1), read=logits.numel() * BF16)
    else:
        measure(
            lambda: sample.sample_probabilities(logits, one, all_tokens, one, none),
            read=logits.numel() * BF16,
        )


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("peer", [False, True], ids=["armllm", "torch"])
def test_best_tokens(measure: Any, rows: int, peer: bool) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(rows, VOCABULARY) * 3).bfloat16()
    if peer:
        measure(lambda: logits.argmax(-1), read=logits.numel() * BF16)
    else:
        measure(lambda: sample.best_tokens(logits), read=logits.numel() * BF16)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("peer", [False, True], ids=["armllm", "torch"])
def test_top_logprobs(measure: Any, rows: int, peer: bool) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(rows, VOCABULARY) * 3).bfloat16()
    ids = torch.arange(rows)
    if peer:
        measure(lambda: logits.float().log_softmax(-1).topk(5), read=logits.numel() * BF16)
    else:
        measure(lambda: sample.top_logprobs(logits, ids, 5), read=logits.numel() * BF16)
