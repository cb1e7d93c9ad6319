"""Per-head linear layers, such as the absorbed projections of multi-head latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.declare import op
from torch_armllm.ops.linear.reference import reference_int8_linear

__all__ = [
    "dense_heads_linear",
    "int8_heads_linear",
    "reference_dense_heads_linear",
    "reference_int8_heads_linear",
]


@op(lambda a: a.x.new_empty((a.x.shape[0], a.x.shape[1], a.out_features)))
def int8_heads_linear(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    """Computes ``y[t, h] = x[t, h] · W[h]ᵀ`` with INT8 weights (W8A8); activations are quantized per head.

    Args:
        x: ``(T, H, K)``, float32, bfloat16 or float16; heads and tokens may be strided, as in a slice of
            wider heads.
        weight: uint8 ``(H, ceil(N / 16), panel_bytes)``, as ``pack_int8`` returns it for ``(H, N, K)``.
        out_features: N.

    Returns:
        ``(T, H, N)`` in the dtype of ``x``, contiguous; the same bits for every kernel variant, batch size
        and thread count.  A head that holds a NaN or an infinity results in NaN.

    Raises:
        RuntimeError: if shapes or dtypes do not match; the message states the expected ones.
    """


@op(lambda a: a.x.new_empty((a.x.shape[0], a.x.shape[1], a.weight.shape[1])))
def dense_heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Computes :func:`int8_heads_linear` with unquantized weights, in float32, and rounds once.

    Args:
        x: ``(T, H, K)``, float32, bfloat16 or float16.
        weight: ``(H, N, K)`` in any of these dtypes.

    Returns:
        ``(T, H, N)`` in the dtype of ``x``.

    Raises:
        RuntimeError: if shapes or dtypes do not match.
    """


def reference_int8_heads_linear(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    """Reference of :func:`int8_heads_linear`, head by head and bit-identical."""
    heads = [reference_int8_linear(x[:, h], weight[h], out_features) for h in range(x.shape[1])]
    return torch.stack(heads, 1)


def reference_dense_heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Reference of :func:`dense_heads_linear` in float32 PyTorch."""
    return torch.einsum("thk,hnk->thn", x.float(), weight.float()).to(x.dtype)
