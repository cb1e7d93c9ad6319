"""Per-head linear layers against their references, on every variant."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops import linear, variants

RUNNABLE = variants.machine().runnable


def packed_heads(heads: int, rows: int, columns: int) -> Tensor:
    q = torch.randint(-127, 128, (heads, rows, columns), dtype=torch.int8)
    return linear.pack_int8(q, torch.rand(heads, rows) + 0.5)


def strided_input(tokens: int, heads: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns strided inputs: a slice of wider heads."""
    return torch.randn(tokens, heads, columns + 5).to(dtype)[..., 3 : columns + 3]


def test_result_is_independent_of_batch_and_threads() -> None:
    torch.manual_seed(0)
    x, weight, float_weight = strided_input(70, 3, 64), packed_heads(3, 48, 64), torch.randn(3, 48, 64)
    threads = torch.get_num_threads()
    for name in RUNNABLE:
        with variants.use(name):
            for heads_linear in (
                lambda rows: linear.int8_heads_linear(rows, weight, 48),
                lambda rows: linear.dense_heads_linear(rows, float_weight),
            ):
                whole = heads_linear(x)
                assert torch.equal(torch.cat([heads_linear(x[i : i + 1]) for i in range(70)]), whole)
                assert torch.equal(torch.cat([heads_linear(x[:13]), heads_linear(x[13:])]), whole)
                torch.set_num_threads(1)
                assert torch.equal(heads_linear(x), whole)
                torch.set_num_threads(threads)


def test_non_finite_values_affect_their_head_only() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 32)
    x[1, 2, 5], x[2, 0, 0] = float("nan"), float("inf")
    for name in RUNNABLE:
        with variants.use(name):
            y = linear.int8_heads_linear(x, packed_heads(4, 20, 32), 20)
        nan_rows = y.isnan().all(-1)
        assert nan_rows.nonzero().tolist() == [[1, 2], [2, 0]]
        assert y.isfinite().all(-1).sum() == 10
