"""Float weights to the packed panels that the kernels read, and back, a few rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops import linear
from torch_armllm.quant.scheme import PANEL, Quantised, Scheme, relative_error, row_chunks
from torch_armllm.quant.workers import each


def pack(quantised: Quantised) -> Tensor:
    """Packs integers of N rows into panels: uint8 (⌈N/16⌉, bytes)."""
    if quantised.scheme == "int8":
        return linear.pack_int8(quantised.q, quantised.scales)
    return linear.pack_int4(
        quantised.q, quantised.multipliers, quantised.scales, quantised.scheme, quantised.zeros
    )


def quantize_matrix(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> tuple[Tensor, float]:
    """Quantises and packs a float matrix (N, K); errors count by ``importance`` (K,), where it is given.

    Returns:
        The panels, uint8 (⌈N/16⌉, bytes), and the relative round-trip error ‖W − Ŵ‖ / ‖W‖.
    """
    packed, error = quantize_matrices([weight], scheme, importance)
    return packed[0], error


def quantize_matrices(
    weights: list[Tensor], scheme: Scheme, importance: Tensor | None = None
) -> tuple[Tensor, float]:
    """Quantises and packs E float matrices of the same shape (N, K), such as views of one large parameter.

    Returns:
        The panels, uint8 (E, ⌈N/16⌉, bytes), and the relative round-trip error of all of them together.
    """
    rows, columns = weights[0].shape
    jobs = [(index, part) for index in range(len(weights)) for part in row_chunks(rows, columns)]
    layout = linear.panel_layout(_op_name(scheme.name), columns)
    packed = torch.empty(len(weights), linear.panel_count(rows), layout.bytes, dtype=torch.uint8)

    def work(job: tuple[int, slice]) -> tuple[float, float]:
        index, part = job
        found, error, energy = scheme.quantise_chunk(weights[index][part], importance)
        panels = slice(part.start // PANEL, linear.panel_count(part.stop))
        packed[index, panels] = pack(found)
        return error, energy

    sums = each(work, jobs)
    return packed, relative_error(sum(s[0] for s in sums), sum(s[1] for s in sums))


def dequantize_matrix(packed: Tensor, out_features: int, in_features: int, scheme: str) -> Tensor:
    """The float32 matrix (N, K), or (E, N, K) for packed experts, that the panels stand for."""
    return linear.unpack_weight(packed, out_features, in_features, _op_name(scheme))


def split_panels(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gate and up panels (…, P, bytes) of (…, 2·P, bytes) where they alternate."""
    return gate_up[..., 0::2, :].contiguous(), gate_up[..., 1::2, :].contiguous()


def _op_name(scheme: str) -> str:
    return "i8" if scheme == "int8" else scheme
