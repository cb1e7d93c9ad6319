"""Linear layers with a weight of each head's own, such as the absorbed projections of latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.linear.reference import reference_int8_linear

__all__ = [
    "dense_heads_linear",
    "int8_heads_linear",
    "reference_dense_heads_linear",
    "reference_int8_heads_linear",
]


def int8_heads_linear(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    """``y[t, h] = x[t, h] · W[h]ᵀ`` with INT8 weights (W8A8); each head of a token is quantized by itself.

    Args:
        x: ``(T, H, K)``, float32, bfloat16 or float16; heads and tokens may lie apart, as in a slice of wider
            heads.
        weight: uint8 ``(H, ceil(N / 16), panel_bytes)``, as ``pack_int8`` returns it for ``(H, N, K)``.
        out_features: N.

    Returns:
        ``(T, H, N)`` in the dtype of ``x``, contiguous; the same bits for every kernel variant, batch size
        and thread count.  A head that holds a NaN or an infinity gives NaN.

    Raises:
        RuntimeError: shapes or dtypes do not fit; the message says what was expected.
    """
    result: Tensor = torch.ops.armllm.int8_heads_linear(x, weight, out_features)
    return result


def dense_heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """:func:`int8_heads_linear` with unquantized weights, summed in float32 and rounded once.

    Args:
        x: ``(T, H, K)``, float32, bfloat16 or float16.
        weight: ``(H, N, K)`` in any of these dtypes.

    Returns:
        ``(T, H, N)`` in the dtype of ``x``.

    Raises:
        RuntimeError: a shape or dtype does not fit.
    """
    result: Tensor = torch.ops.armllm.dense_heads_linear(x, weight)
    return result


def reference_int8_heads_linear(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    """:func:`int8_heads_linear` head by head, with the kernels' bits."""
    heads = [reference_int8_linear(x[:, h], weight[h], out_features) for h in range(x.shape[1])]
    return torch.stack(heads, 1)


def reference_dense_heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """:func:`dense_heads_linear` in plain float32 torch."""
    return torch.einsum("thk,hnk->thn", x.float(), weight.float()).to(x.dtype)


@torch.library.register_fake("armllm::int8_heads_linear")
def _int8_heads_linear_fake(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], out_features))


@torch.library.register_fake("armllm::dense_heads_linear")
def _dense_heads_linear_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], weight.shape[1]))
