"""Unquantized linear layers with few outputs, such as routers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.declare import op

__all__ = ["dense_linear", "reference_dense_linear"]


def _dense_linear_result(a: Any) -> Any:
    dtype = torch.float32 if a.wide else a.x.dtype
    return a.x.new_empty((*a.x.shape[:-1], a.weight.shape[0]), dtype=dtype)


@op(_dense_linear_result)
def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """Computes ``x · Wᵀ + b`` in float32, in a summation order that depends on the row only, and rounds once.

    Args:
        x: ``(..., K)`` in float32, bfloat16 or float16.
        weight: ``(N, K)`` in any of these dtypes.
        bias: ``(N,)`` in any of these dtypes, or None.
        wide: True to return float32, as routers need it.

    Returns:
        ``(..., N)`` in the dtype of ``x``, or in float32.

    Raises:
        RuntimeError: if shapes or dtypes do not match.
    """


def reference_dense_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False
) -> Tensor:
    """Reference of :func:`dense_linear` in float32 PyTorch."""
    terms = None if bias is None else bias.float()
    out = torch.nn.functional.linear(x.float(), weight.float(), terms)
    return out if wide else out.to(x.dtype)
