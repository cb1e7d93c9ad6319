"""Row-wise ops compared with the same ops in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.timing import in_turn
from bench.records import Record, record
from torch_armllm.ops import activation, moe, norm, rope, sample

TOKENS, WIDTH = 512, 4096


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _added(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return F.rms_norm(total, (WIDTH,), weight, 1e-6), total


def _chosen(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.float().softmax(-1).topk(8, -1)
    return weights / weights.sum(-1, keepdim=True), ids


def _drawn(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    best, ids = logits.float().topk(top_k, -1)
    probabilities = best.softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < top_p
    drawn = (probabilities * kept).multinomial(1)
    return ids.gather(-1, drawn)


def sides() -> dict[str, tuple[Callable[[], Any], Callable[[], Any], str, int]]:
    """Yields our call, PyTorch's, the shape, and the bytes that must be read and written."""
    x, y = torch.randn(2, TOKENS, WIDTH).bfloat16().unbind()
    weight, bias = torch.rand(2, WIDTH).bfloat16().unbind()
    q, k = torch.randn(TOKENS, 32, 128).bfloat16(), torch.randn(TOKENS, 8, 128).bfloat16()
    cos, sin = rope.rope_table(torch.arange(TOKENS), torch.rand(64))
    wide = cos[:, None].bfloat16(), sin[:, None].bfloat16()
    logits = torch.randn(TOKENS, 128).bfloat16()
    shape, row = f"{TOKENS} x {WIDTH}", x.nbytes
    rows, vocabulary, top_k, top_p = 8, 151936, 50, 0.9
    scores = torch.randn(rows, vocabulary).bfloat16() * 3
    temperature, zero = torch.ones(rows), torch.zeros(rows)
    ids = torch.arange(rows)
    return {
        "sample": (
            lambda: sample.sample(
                scores, temperature, torch.full((rows,), top_k), torch.full((rows,), top_p), zero, ids, ids
            ),
            lambda: _drawn(scores, top_k, top_p),
            f"{rows} x {vocabulary}, top-{top_k}, top-p {top_p}",
            scores.nbytes,
        ),
        "rms_norm": (
            lambda: norm.rms_norm(x, weight, 1e-6),
            lambda: F.rms_norm(x, (WIDTH,), weight, 1e-6),
            shape,
            2 * row,
        ),
        "add_rms_norm": (
            lambda: norm.add_rms_norm(x, y, weight, 1e-6),
            lambda: _added(x, y, weight),
            shape,
            4 * row,
        ),
        "layer_norm": (
            lambda: norm.layer_norm(x, weight, bias, 1e-6),
            lambda: F.layer_norm(x, (WIDTH,), weight, bias, 1e-6),
            shape,
            2 * row,
        ),
        "gated_act": (lambda: activation.gated_act(x, y, "silu"), lambda: F.silu(x) * y, shape, 3 * row),
        "rope_": (
            lambda: rope.rope_(q, k, cos, sin),
            lambda: (_turned(q, *wide), _turned(k, *wide)),
            f"{TOKENS} x 32/8x128",
            2 * (q.nbytes + k.nbytes),
        ),
        "moe_route": (
            lambda: moe.moe_route(logits, 8, "softmax", True),
            lambda: _chosen(logits),
            f"{TOKENS} x 128, top-8",
            logits.nbytes,
        ),
    }


def run(variant: str, cpu: str) -> list[Record]:
    """Measures each op beside PyTorch's."""
    records = []
    for name, (ours, theirs, shape, moved) in sides().items():
        rates = {side: moved / s / 1e9 for side, s in in_turn({"ours": ours, "torch": theirs}).items()}
        peers = {"peer": "torch", "peer_value": rates["torch"]}
        records.append(record(name, shape, "bf16", variant, cpu, gb_s=rates["ours"], **peers))
    return records
