"""Helpers that the kernels share: checks of arguments, rows of tensors, and the rounding of results."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["block_of", "check", "check_dtype", "rounded", "rows_of"]


def check(holds: bool, message: str) -> None:
    """Raises a RuntimeError, as the compiled ops do, where a condition does not hold."""
    if not holds:
        raise RuntimeError(message)


def check_dtype(x: Tensor, name: str) -> None:
    """Raises a RuntimeError unless ``x`` has one of the dtypes that kernels read."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    check(x.dtype in floats, f"{name} must be float32, bfloat16 or float16")


def rows_of(x: Tensor) -> Tensor:
    """Returns ``x`` as ``(rows, width)`` with adjacent columns: a view where the strides allow one."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def block_of(width: int, most: int = 1 << 20) -> int:
    """Returns the columns of a kernel's block: the power of two that holds a row, at most ``most``."""
    return min(int(triton.next_power_of_2(width)), most)


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Rounds float32 to the nearest ``dtype``, ties to even; the interpreter's own bfloat16 is truncated."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        v = tl.where(x == x, upper, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        v = x.to(dtype)
    return v
