"""Gated activations, one program for each block of a row; see `torch_armllm.ops.activation`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_armllm.ops.activation import ACTIVATIONS, LIMIT
from torch_armllm.ops.triton.functions import at_most, gelu, sigmoid, silu, softcap
from torch_armllm.ops.triton.rows import block_of, check, check_dtype, rounded, rows_of

__all__ = ["gated_act"]

_MOST_COLUMNS = 1024


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, limit: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Computes an activation of ``gate``, times ``up``."""
    if ACTIVATION == "swiglu_clamped" or ACTIVATION == "silu_clamped":
        gate = at_most(gate, limit)
        up = -at_most(-at_most(up, limit), limit)
    if ACTIVATION == "swiglu_clamped":
        v = gate * sigmoid(1.702 * gate) * (up + 1.0)
    elif ACTIVATION == "silu_softcapped":
        v = softcap(gate, limit) * softcap(up, limit) * sigmoid(gate)
    elif ACTIVATION == "gelu":
        v = gelu(gate) * up
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is sigmoid(2u)
        v = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    elif ACTIVATION == "relu":
        v = tl.where(gate < 0.0, 0.0, gate) * up
    else:
        v = silu(gate) * up
    return v


@triton.jit
def gated_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    n: tl.tensor,
    limit: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes some columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * gate_stride + i, mask=i < n, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + i, mask=i < n, other=0.0).to(tl.float32)
    v = gated(g, u, limit, ACTIVATION)
    tl.store(out + row * n + i, rounded(v, out.dtype.element_ty), mask=i < n)


def gated_act(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See `torch_armllm.ops.activation.gated_act`."""
    alike = gate.dim() >= 1 and gate.shape == up.shape and gate.dtype == up.dtype
    check(alike, "gate and up must have the same shape and dtype")
    check_dtype(gate, "gate")
    known = ", ".join(ACTIVATIONS)
    check(activation in ACTIVATIONS, f"unknown activation '{activation}'; choose from: {known}")
    out = gate.new_empty(gate.shape)
    if out.numel() > 0:
        gates, ups, width = rows_of(gate), rows_of(up), gate.shape[-1]
        block = block_of(width, _MOST_COLUMNS)
        gated_kernel[(gates.shape[0], triton.cdiv(width, block))](
            gates,
            ups,
            out,
            gates.stride(0),
            ups.stride(0),
            width,
            LIMIT,
            ACTIVATION=activation,
            BLOCK=block,
        )
    return out
