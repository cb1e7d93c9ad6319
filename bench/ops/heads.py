"""Linear layers with one weight per head, and PyTorch's batched product, on all cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.ops.timing import cold, in_turn, on_huge_pages
from bench.records import Record, record
from torch_armllm.ops import linear

INPUTS, OUTPUTS = 128, 512  # the absorbed queries of DeepSeek-V2 and V3
HEADS = (16, 128)
TOKENS = (1, 8, 128)


def _ours(op: Callable[..., Tensor], x: Tensor, first: Tensor, *sizes: int) -> Callable[[], Tensor]:
    weight = cold(partial(on_huge_pages, first), first.nbytes)
    return lambda: op(x, weight(), *sizes)


def _batched(x: Tensor, first: Tensor) -> Callable[[], Tensor]:
    weight = cold(partial(on_huge_pages, first), first.nbytes)
    return lambda: torch.bmm(x.transpose(0, 1), weight().transpose(1, 2))


def run(variant: str, cpu: str) -> list[Record]:
    """Measures both ops beside a batched product."""
    records = []
    for heads in HEADS:
        q = torch.randint(-127, 128, (heads, OUTPUTS, INPUTS), dtype=torch.int8)
        packed = linear.pack_int8(q, torch.rand(heads, OUTPUTS))
        dense = torch.randn(heads, OUTPUTS, INPUTS).bfloat16()
        for tokens in TOKENS:
            x = torch.randn(tokens, heads, INPUTS).bfloat16()
            sides: dict[str, Callable[[], Any]] = {
                "int8_heads_linear": _ours(linear.int8_heads_linear, x, packed, OUTPUTS),
                "dense_heads_linear": _ours(linear.dense_heads_linear, x, dense),
                "bmm": _batched(x, dense),
            }
            seconds = in_turn(sides)
            work = 2e-9 * tokens * heads * INPUTS * OUTPUTS
            gops = {name: work / spent for name, spent in seconds.items()}
            shape = f"M={tokens}, {heads} heads, N={OUTPUTS} K={INPUTS}"
            for name, dtype in (("int8_heads_linear", "i8"), ("dense_heads_linear", "bf16")):
                peers: dict[str, Any] = {"peer": "bmm bf16", "peer_value": gops["bmm"]}
                records.append(record(name, shape, dtype, variant, cpu, gops=gops[name], **peers))
    return records
