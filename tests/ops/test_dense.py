"""The unquantized linear layer against its reference, on every variant."""

from __future__ import annotations

import pytest
import torch

from torch_armllm.ops import linear, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
RUNNABLE = variants.machine().distinct("dense")
BFMMLA = tuple(name for name in RUNNABLE if variants.machine().tables[name]["dense"] == "i8mm")
"""Variants that multiply bfloat16 by bfloat16 with the BFMMLA instruction, which rounds differently."""


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_wide_output_is_float32(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 70).to(dtype), torch.randn(21, 70).to(dtype)
    for name in RUNNABLE:
        with variants.use(name):
            output = linear.dense_linear(x, weight, wide=True)
            if dtype != torch.bfloat16 or name not in BFMMLA:
                assert torch.equal(output, linear.dense_linear(x.float(), weight))
            assert torch.equal(output.to(dtype), linear.dense_linear(x, weight))


@pytest.mark.parametrize("dtype", FLOATS)
def test_result_is_independent_of_outputs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(11, 301).to(dtype), torch.randn(37, 301).to(dtype)
    for name in RUNNABLE:
        with variants.use(name):
            whole = linear.dense_linear(x, weight)
            assert torch.equal(linear.dense_linear(x, weight[5:23]), whole[:, 5:23])
