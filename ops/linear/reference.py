"""PyTorch references of the quantized linear ops, bit-identical to the kernels for the exact schemes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_armllm.ops.declare import reference
from torch_armllm.ops.linear import packed_layout, schemes
from torch_armllm.ops.linear.rotation import rotate_groups
from torch_armllm.ops.linear.schemes import GROUP

SMALLEST_AMAX = 1e-30


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes rows to symmetric INT8 with one scale per row, as the kernels do.

    Args:
        x: float ``(..., K)``.

    Returns:
        int8 ``(..., K)`` and float32 scales ``(..., 1)``; a row that holds a NaN or an infinity has scale NaN
        and zeros, one below 1e-30 has scale 0 and zeros.
    """
    rows = x.to(torch.float32)
    amax = rows.abs().amax(-1, keepdim=True)
    finite = rows.isfinite().all(-1, keepdim=True)
    usable = finite & (amax >= SMALLEST_AMAX)
    # Tensor / tensor: `127.0 / amax` would be torch's reciprocal times 127, which rounds twice.
    inverse = torch.full_like(amax, 127.0) / torch.where(usable, amax, 1.0)
    q = torch.where(usable, torch.round(rows * inverse), 0.0).to(torch.int8)
    scale = torch.where(usable, amax / 127.0, 0.0)
    return q, torch.where(finite, scale, torch.nan)


def quantize_digits(x: Tensor, digits: int, rotated: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Quantizes rows to one or two INT8 digits.

    Returns:
        For each digit, values and scales as of `quantize_activations`; the second digit is made of the
        rounding errors of the first.
    """
    if rotated:
        x = rotate_groups(x) / GROUP
    q, scale = quantize_activations(x)
    if digits == 1:
        return [(q, scale)]
    # Halves, as in the kernels, keep scale · q finite for every finite row.
    errors = (x.to(torch.float32) * 0.5 - (scale * 0.5) * q.to(torch.float32)) * 2.0
    return [(q, scale), quantize_activations(errors)]


def finish(
    sums: list[tuple[Tensor, Tensor]], dtype: torch.dtype, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Adds each digit's sums times its activation scale, then bias and residual, and converts to ``dtype``.

    Each step is rounded to float32.
    """
    y, *more = [acc * scale for acc, scale in sums]
    for part in more:
        y = y + part
    if bias is not None:
        y = y + bias.to(torch.float32)
    if residual is not None:
        y = y + residual.to(torch.float32)
    return y.to(dtype)


def reference_int_linear(
    x: Tensor,
    w: Tensor,
    row_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    digits: int = 1,
    rotated: bool = False,
) -> Tensor:
    """Computes ``x · (w · row_scale)ᵀ (+ bias) (+ residual)`` with INT8 activations and exact integer sums.

    Args:
        x: float ``(..., K)``.
        w: int8 ``(N, K)``, as :func:`unpack_int` returns it.
        row_scale: float32 ``(N,)``.
        bias: ``(N,)``.
        residual: ``(..., N)``.
        digits: INT8 digits of each activation, 1 or 2.
        rotated: as in :func:`int4_linear`.
    """
    # float64 represents every such sum exactly, and its matmul is much faster than int64's.
    w64 = w.to(torch.float64).t()
    sums = [
        (torch.matmul(q.to(torch.float64), w64).to(torch.float32) * row_scale, scale)
        for q, scale in quantize_digits(x, digits, rotated)
    ]
    return finish(sums, x.dtype, bias, residual)


@reference("int4_linear")
def reference_int4_linear(a: Any) -> Tensor:
    """Reference of :func:`int4_linear` from the packed weight; float groups agree up to rounding."""
    in_features = a.x.shape[-1]
    if not schemes.traits_of(a.scheme).span:
        w, row_scale = packed_layout.unpack_int(a.weight, a.out_features, in_features, a.scheme)
        return reference_int_linear(a.x, w, row_scale, a.bias, a.residual, a.digits, a.rotated)
    values, scales = packed_layout.unpack_groups(a.weight, a.out_features, in_features, a.scheme)
    w64 = (values.to(torch.float64) * scales.to(torch.float64)[..., None]).flatten(1)[:, :in_features]
    sums = []
    for q, scale in quantize_digits(a.x, a.digits, a.rotated):
        total = torch.matmul(q.to(torch.float64), w64.t()) + _offset_sums(
            q, a.weight, a.out_features, a.scheme
        )
        sums.append((total.to(torch.float32), scale))
    return finish(sums, a.x.dtype, a.bias, a.residual)


def _offset_sums(q: Tensor, weight: Tensor, out_features: int, scheme: str) -> Tensor:
    """Returns the offset term of int8 activations ``(..., K)``: float64 ``(..., N)``."""
    if not schemes.traits_of(scheme).offsets:
        return torch.zeros((), dtype=torch.float64)
    in_features = q.shape[-1]
    offsets = packed_layout.unpack_offsets(weight, out_features, in_features, scheme).to(torch.float64)
    spread = offsets.repeat_interleave(schemes.traits_of(scheme).span, 1)[:, :in_features]
    return torch.matmul(q.to(torch.float64), spread.t())


@reference("int4_linear")
def reference_folded_linear(a: Any) -> Tensor:
    """Reference of float-group schemes for many tokens: scales folded to INT8, then exact sums."""
    in_features = a.x.shape[-1]
    w, row_scale = packed_layout.fold_scales(
        *packed_layout.unpack_groups(a.weight, a.out_features, in_features, a.scheme)
    )
    if not schemes.traits_of(a.scheme).offsets:
        return reference_int_linear(
            a.x, w[:, :in_features], row_scale, a.bias, a.residual, a.digits, a.rotated
        )
    w64, sums = w[:, :in_features].to(torch.float64).t(), []
    for q, scale in quantize_digits(a.x, a.digits, a.rotated):
        total = torch.matmul(q.to(torch.float64), w64) * row_scale
        total = total + _offset_sums(q, a.weight, a.out_features, a.scheme)
        sums.append((total.to(torch.float32), scale))
    return finish(sums, a.x.dtype, a.bias, a.residual)


@reference("int8_linear")
def reference_int8_linear(a: Any) -> Tensor:
    """Reference of :func:`int8_linear` from the packed weight."""
    return reference_int4_linear(a.x, a.weight, a.out_features, "i8", a.bias, a.residual, a.digits, a.rotated)


def activate(gate: Tensor, up: Tensor, activation: str, limit: float = 7.0, up_limit: float = 7.0) -> Tensor:
    """Computes ``act(gate) · up`` in float32."""
    if activation == "silu":
        return F.silu(gate) * up
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
    if activation == "relu":
        return F.relu(gate) * up
    if activation == "swiglu_clamped":  # gpt-oss: alpha 1.702
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
    if activation == "silu_clamped":
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if activation == "silu_softcapped":
        capped = limit * torch.tanh(gate / limit) * (up_limit * torch.tanh(up / up_limit))
        return capped * torch.sigmoid(gate)
    raise ValueError(
        f"unknown activation {activation!r}; "
        "choose from: silu, gelu, gelu_tanh, relu, swiglu_clamped, silu_clamped, silu_softcapped"
    )


@reference("int4_gated_linear")
def reference_int4_gated_linear(a: Any) -> Tensor:
    """Reference of :func:`int4_gated_linear`; the activation differs from the kernels' in the last bits."""
    rows = a.x.to(torch.float32)
    gate = reference_int4_linear(
        rows, a.weight[0::2], a.out_features, a.scheme, a.gate_bias, None, a.digits, a.rotated
    )
    up = reference_int4_linear(
        rows, a.weight[1::2], a.out_features, a.scheme, a.up_bias, None, a.digits, a.rotated
    )
    return activate(gate, up, a.activation).to(a.x.dtype)
