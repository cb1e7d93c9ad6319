"""Functions of float32 values that gated activations and elementwise programs share."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["at_most", "expm1", "gelu", "log1p", "sigmoid", "silu", "softcap", "softplus"]


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Computes 1 / (1 + e^−x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """Computes x · sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x: tl.tensor) -> tl.tensor:
    """Computes x · Φ(x); in float64, because 1 + erf cancels in the left tail."""
    wide = x.to(tl.float64)
    return (wide * 0.5 * (1.0 + tl.erf(wide * 0.7071067811865476))).to(tl.float32)


@triton.jit
def at_most(x: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Computes the smaller of both; NaN stays NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def softcap(x: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Computes cap · tanh(x / cap); tanh(u) is 2 · sigmoid(2u) − 1."""
    return cap * (2.0 * sigmoid(2.0 * (x / cap)) - 1.0)


@triton.jit
def log1p(x: tl.tensor) -> tl.tensor:
    """Computes ln(1 + x).  The error of u = 1 + x cancels in ln(u) / (u − 1), as W. Kahan found."""
    u = 1.0 + x
    less = tl.where(u == 1.0, 1.0, u - 1.0)  # u may round to 1
    return tl.where(u == 1.0, x, tl.where(tl.abs(x) < 1e7, tl.log(u) * (x / less), tl.log(u)))


@triton.jit
def expm1(x: tl.tensor) -> tl.tensor:
    """Computes e^x − 1, by the same cancellation."""
    u = tl.exp(x)
    near = tl.abs(x) < 17.0
    log = tl.where(near & (u != 1.0), tl.log(u), 1.0)
    return tl.where(u == 1.0, x, tl.where(near, (u - 1.0) * (x / log), u - 1.0))


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Computes ln(1 + e^x) = max(x, 0) + ln(1 + e^−|x|); NaN stays NaN."""
    return tl.where(x < 0.0, 0.0, x) + log1p(tl.exp(-tl.abs(x)))
