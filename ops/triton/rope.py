"""Rotary position embedding, one program for each head of a token; see `torch_armllm.ops.rope`."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from torch_armllm.ops.triton.rows import block_of, check, check_dtype, rounded

__all__ = ["rope_"]


@triton.jit
def rope_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    stride: tl.tensor,
    half: tl.tensor,
    INTERLEAVED: tl.constexpr,
    UNZIP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rotates the pairs of a head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    x += token * token_stride + head * head_stride
    i = tl.arange(0, BLOCK)
    inside = i < half
    c = tl.load(cos + token * half + i, mask=inside, other=0.0)
    s = tl.load(sin + token * half + i, mask=inside, other=0.0)
    first, second = i, i + half
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    a = tl.load(x + first * stride, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + second * stride, mask=inside, other=0.0).to(tl.float32)
    if UNZIP:
        first, second = i, i + half
    tl.store(x + first * stride, rounded(a * c - b * s, x.dtype.element_ty), mask=inside)
    tl.store(x + second * stride, rounded(b * c + a * s, x.dtype.element_ty), mask=inside)


def _table(t: Tensor, tokens: int, name: str) -> Tensor:
    check(t.dtype.is_floating_point and t.dtype.itemsize == 4, f"{name} must be float32")
    check(t.dim() >= 2, f"{name} must have shape (..., tokens, rotary / 2); it has {t.dim()} dimensions")
    rows = math.prod(t.shape[:-1])
    check(
        rows == tokens or t.shape[-1] == 0,
        f"{name} must have one row of rotary / 2 values per token; there are {tokens} tokens, but the number "
        f"of rows is {rows}",
    )
    return t.contiguous()


def _check_no_overlap(x: Tensor, name: str) -> None:
    last = 0  # distance of the farthest element of the dimensions so far
    for step, n in sorted((step, n) for step, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        check(
            step > last or x.numel() == 0,
            f"{name} is written, but its elements overlap in memory, as in an expanded tensor; "
            f"pass {name}.contiguous()",
        )
        last += (n - 1) * step


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, unzip: bool) -> None:
    half = cos.shape[-1]
    if x.numel() == 0 or half == 0:
        return
    heads = x.reshape(-1, *x.shape[-2:])
    rope_kernel[(heads.shape[0], heads.shape[1])](
        heads,
        cos,
        sin,
        *heads.stride(),
        half,
        INTERLEAVED=interleaved,
        UNZIP=unzip,
        BLOCK=block_of(half),
    )
    if heads.data_ptr() != x.data_ptr():  # tokens that are not evenly strided were copied
        x.copy_(heads.view(x.shape))


def rope_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, unzip: bool = False
) -> None:
    """See `torch_armllm.ops.rope.rope_`."""
    for x, name in ((q, "q"), (k, "k")):
        shape = "(..., tokens, heads, head size)"
        check(x.dim() >= 3, f"{name} must have shape {shape}; it has {x.dim()} dimensions")
        check_dtype(x, name)
        _check_no_overlap(x, name)
    (tokens, k_tokens), size = (math.prod(x.shape[:-2]) for x in (q, k)), q.shape[-1]
    check(
        size == k.shape[-1] and tokens == k_tokens and q.dtype == k.dtype,
        f"q and k must agree in tokens, head size and dtype; q has {tokens} tokens of head size {size}, "
        f"k has {k_tokens} of {k.shape[-1]}",
    )
    cos, sin = _table(cos, tokens, "cos"), _table(sin, tokens, "sin")
    rotary = 2 * cos.shape[-1]
    check(2 * sin.shape[-1] == rotary, "cos and sin must have the same shape")
    check(
        rotary <= size,
        f"cos must have at most head size / 2 columns: it has angles for {rotary} dimensions, but the head "
        f"size is {size}",
    )
    check(interleaved or not unzip, "unzip needs interleaved=True")
    _rotate(q, cos, sin, interleaved, unzip)
    _rotate(k, cos, sin, interleaved, unzip)
