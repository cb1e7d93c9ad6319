"""RMSNorm and LayerNorm, one program for each row; see `torch_armllm.ops.norm`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torch_armllm.ops.triton.rows import block_of, check, check_dtype, rounded, rows_of

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]


@triton.jit
def load_row(
    x: tl.tensor,
    residual: tl.tensor,
    total: tl.tensor,
    stride: tl.tensor,
    residual_stride: tl.tensor,
    n: tl.tensor,
    i: tl.tensor,
) -> tl.tensor:
    """Loads a row of x; with a residual, stores their sum and returns it, rounded as it is stored."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.load(x + row * stride + i, mask=i < n, other=0.0).to(tl.float32)
    if residual is not None:
        v += tl.load(residual + row * residual_stride + i, mask=i < n, other=0.0).to(tl.float32)
        sums = rounded(v, total.dtype.element_ty)
        tl.store(total + row * n + i, sums, mask=i < n)
        v = sums.to(tl.float32)
    return v


@triton.jit
def rms_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    stride: tl.tensor,
    residual_stride: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    weight_offset: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Normalizes a row by its root mean square."""
    i = tl.arange(0, BLOCK)
    v = load_row(x, residual, total, stride, residual_stride, n, i)
    v = v / tl.sqrt(tl.sum(v * v) / n + eps)
    w = tl.load(weight + i, mask=i < n, other=0.0).to(tl.float32) + weight_offset
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row * n + i, rounded(v * w, out.dtype.element_ty), mask=i < n)


@triton.jit
def layer_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    stride: tl.tensor,
    residual_stride: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Normalizes a row by its mean and its standard deviation."""
    i = tl.arange(0, BLOCK)
    v = load_row(x, residual, total, stride, residual_stride, n, i)
    v = tl.where(i < n, v - tl.sum(v) / n, 0.0)
    v = v / tl.sqrt(tl.sum(v * v) / n + eps)
    if weight is not None:
        v *= tl.load(weight + i, mask=i < n, other=0.0).to(tl.float32)
    if bias is not None:
        v += tl.load(bias + i, mask=i < n, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row * n + i, rounded(v, out.dtype.element_ty), mask=i < n)


def _run(
    kernel: Any, x: Tensor, residual: Tensor | None, parameters: dict[str, Tensor | None], *numbers: float
) -> tuple[Tensor, Tensor]:
    """Runs a kernel on each row; returns the normalized rows and, with a residual, the sum."""
    check(x.dim() >= 1, "x must have at least one dimension")
    check_dtype(x, "x")
    width = x.shape[-1]
    given = {name: p.contiguous() for name, p in parameters.items() if p is not None}
    for name, p in given.items():
        check_dtype(p, name)
        check(
            p.shape == (width,),
            f"{name} must have shape ({width},) to match the last dimension of x; it has {p.numel()} values "
            f"in {p.dim()} dimensions",
        )
    check(len({p.dtype for p in given.values()}) < 2, "weight and bias must have the same dtype")
    alike = residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    check(alike, "residual must have the shape and the dtype of x")
    out = x.new_empty(x.shape)
    total = out if residual is None else x.new_empty(x.shape)
    if out.numel() > 0:
        rows = rows_of(x)
        added = None if residual is None else rows_of(residual)
        kernel[(rows.shape[0],)](
            rows,
            added,
            total,
            out,
            *(given.get(name) for name in parameters),
            rows.stride(0),
            0 if added is None else added.stride(0),
            width,
            *numbers,
            BLOCK=block_of(width),
        )
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """See `torch_armllm.ops.norm.rms_norm`."""
    return _run(rms_kernel, x, None, {"weight": weight}, eps, weight_offset)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `torch_armllm.ops.norm.add_rms_norm`."""
    return _run(rms_kernel, x, residual, {"weight": weight}, eps, weight_offset)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See `torch_armllm.ops.norm.layer_norm`."""
    return _run(layer_kernel, x, None, {"weight": weight, "bias": bias}, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `torch_armllm.ops.norm.add_layer_norm`."""
    return _run(layer_kernel, x, residual, {"weight": weight, "bias": bias}, eps)
