"""Ops on rows: norms, rotary embeddings, gated activations, routing, lookups, sampling, search for steps."""

from __future__ import annotations

import torch

from bench.micro.call import BF16, Call, over
from torch_armllm.ops import activation, embedding, linear, moe, norm, rope, sample
from torch_armllm.ops.rounding import search_steps as search

TOKENS = (1, 16, 512)
VOCABULARY = 151_936  # Qwen3's
KINDS = {
    "greedy": (0.0, 1, 1.0),
    "plain": (1.0, 0, 1.0),
    "top_k": (1.0, 50, 1.0),
    "top_p": (1.0, 0, 0.9),
    "top_k_top_p": (1.0, 50, 0.9),
}
"""Temperature, top-k and top-p."""


@over(op=("rms_norm", "add_rms_norm", "layer_norm"), tokens=TOKENS)
def norms(op: str, tokens: int) -> Call:
    x, y = torch.randn(2, tokens, 2048).bfloat16().unbind()
    weight, bias = torch.rand(2, 2048).bfloat16().unbind()
    calls = {
        "rms_norm": (lambda: norm.rms_norm(x, weight, 1e-6), 2),
        "add_rms_norm": (lambda: norm.add_rms_norm(x, y, weight, 1e-6), 4),
        "layer_norm": (lambda: norm.layer_norm(x, weight, bias, 1e-6), 2),
    }
    call, moved = calls[op]
    return Call(call, read=moved * x.nbytes)


@over(tokens=TOKENS)
def rope_(tokens: int) -> Call:
    q, k = torch.randn(tokens, 32, 64).bfloat16(), torch.randn(tokens, 8, 64).bfloat16()
    cos, sin = rope.rope_table(torch.arange(tokens), torch.rand(32))
    return Call(lambda: rope.rope_(q, k, cos, sin), read=2 * (q.nbytes + k.nbytes))


@over(tokens=TOKENS)
def rope_table(tokens: int) -> Call:
    positions, inv_freq = torch.arange(tokens), torch.rand(32)
    return Call(lambda: rope.rope_table(positions, inv_freq), read=2 * tokens * 32 * 4)


@over(name=("silu", "gelu", "gelu_tanh"), tokens=TOKENS)
def gated_act(name: str, tokens: int) -> Call:
    gate, up = torch.randn(2, tokens, 8192).bfloat16().unbind()
    return Call(lambda: activation.gated_act(gate, up, name), read=3 * gate.nbytes)


@over(tokens=TOKENS)
def moe_route(tokens: int) -> Call:
    logits = torch.randn(tokens, 128).bfloat16()
    return Call(lambda: moe.moe_route(logits, 8, "softmax", True), read=logits.nbytes)


@over(tokens=TOKENS)
def split_embedding(tokens: int) -> Call:
    q = torch.randint(-127, 128, (8192, 2048), dtype=torch.int8)
    packed, rest = linear.pack_int8(q, torch.rand(8192)), torch.randint_like(q, -127, 128)
    ids = torch.randint(0, 8192, (tokens,))
    return Call(
        lambda: embedding.split_embedding(ids, packed, rest, torch.bfloat16), read=tokens * BF16 * 2048
    )


@over(kind=KINDS, rows=(1, 16))
def sampled(kind: str, rows: int) -> Call:
    heat, top_k, top_p = KINDS[kind]
    logits = (torch.randn(rows, VOCABULARY) * 3).bfloat16()
    temperature, mass, none = (torch.full((rows,), value) for value in (heat, top_p, 0.0))
    count, ids = torch.full((rows,), top_k), torch.arange(rows)
    return Call(lambda: sample.sample(logits, temperature, count, mass, none, ids, ids), read=logits.nbytes)


@over(op=("sample_probabilities", "best_tokens", "top_logprobs"), rows=(1, 16))
def of_logits(op: str, rows: int) -> Call:
    logits = (torch.randn(rows, VOCABULARY) * 3).bfloat16()
    one, none = torch.ones(rows), torch.zeros(rows)
    calls = {
        "sample_probabilities": lambda: sample.sample_probabilities(logits, one, none.long(), one, none),
        "best_tokens": lambda: sample.best_tokens(logits),
        "top_logprobs": lambda: sample.top_logprobs(logits, torch.arange(rows), 5),
    }
    return Call(calls[op], read=logits.nbytes)


@over(candidates=(12,))
def search_steps(candidates: int) -> Call:
    """The search for steps with the groups and candidates of the default scheme."""
    values, factors = torch.randn(64, 64, 32), torch.rand(64, 32)
    steps = 0.2 + 0.1 * torch.rand(candidates, 64, 64)
    zeros = torch.randint(6, 10, steps.shape).float()
    # a product, two bounds, a rounding, an error, its factor and its square
    operations = 8 * candidates * values.numel()
    return Call(
        lambda: search(values, steps, zeros, factors, 0, 15), read=values.nbytes, operations=operations
    )
