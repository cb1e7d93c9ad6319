"""The quantized linears, one thread: N = K = 2048, and the shapes of SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_armllm.ops import linear

COLD_BYTES = 96 << 20  # copies of a weight that together exceed the last-level cache


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def packed(rows: int, columns: int, scheme: str) -> Tensor:
    if scheme == "i8":
        q = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        return linear.pack_int8(q, torch.rand(rows))
    q = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
    groups = -(-columns // 32)
    if scheme == "g32i":
        multipliers = torch.randint(1, 17, (rows, groups), dtype=torch.uint8)
        return linear.pack_int4(q, multipliers, torch.rand(rows))
    return linear.pack_int4(q, None, torch.rand((rows, groups) if scheme == "g32" else (rows,)), scheme)


def product(scheme: str, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    if scheme == "i8":
        return lambda x, weight: linear.int8_linear(x, weight, rows)
    return lambda x, weight: linear.int4_linear(x, weight, rows, scheme)


@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
@pytest.mark.parametrize("scheme", ["g32i", "g32", "i8"])
def test_square(measure: Callable[..., Any], scheme: str, tokens: int) -> None:
    size = 2048
    x, multiply = torch.randn(tokens, size, dtype=torch.bfloat16), product(scheme, size)
    first = packed(size, size, scheme)
    # For one token the time is that of reading the weight, so every round reads another copy.
    weights = cycle(
        [first] + [first.clone() for _ in range(COLD_BYTES // first.numel() if tokens <= 8 else 0)]
    )
    read = first.numel() if tokens <= 8 else 0
    measure(lambda: multiply(x, next(weights)), read=read, operations=2 * tokens * size * size)


@pytest.mark.parametrize("tokens", [1, 512])
@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (576, 576), (576, 1536)])
def test_smollm2(measure: Callable[..., Any], rows: int, columns: int, tokens: int) -> None:
    x, weight = torch.randn(tokens, columns, dtype=torch.bfloat16), packed(rows, columns, "g32i")
    read = weight.numel() if tokens == 1 else 0
    measure(lambda: linear.int4_linear(x, weight, rows), read=read, operations=2 * tokens * rows * columns)


@pytest.mark.parametrize("tokens", [1, 512])
def test_smollm2_gate_and_up(measure: Callable[..., Any], tokens: int) -> None:
    rows, columns = 1536, 576
    x = torch.randn(tokens, columns, dtype=torch.bfloat16)
    weight = linear.interleave_panels(packed(rows, columns, "g32i"), packed(rows, columns, "g32i"))
    read = weight.numel() if tokens == 1 else 0
    measure(
        lambda: linear.int4_gated_linear(x, weight, rows), read=read, operations=4 * tokens * rows * columns
    )


def test_smollm2_head(measure: Callable[..., Any]) -> None:
    rows, columns = 49152, 576
    x, weight = torch.randn(1, columns, dtype=torch.bfloat16), packed(rows, columns, "i8")
    measure(lambda: linear.int8_linear(x, weight, rows), read=weight.numel(), operations=2 * rows * columns)
