"""GGUF files of tiny models with random blocks of any type, written by the ``gguf`` package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

KINDS = gguf.GGMLQuantizationType


def encode(weight: Tensor, kind: str, seed: int = 0) -> tuple[np.ndarray, Tensor]:
    """Encodes a matrix, or stacked matrices, in a GGUF type; returns its bytes and the equivalent floats.

    Types that the ``gguf`` package cannot write, such as K-quants, have random blocks of the shape of
    ``weight``.
    """
    type_ = KINDS[kind]
    if kind in ("F32", "F16"):
        raw = weight.numpy().astype(np.float32 if kind == "F32" else np.float16)
        return raw, torch.from_numpy(raw.astype(np.float32))
    if kind in ("Q4_K", "Q5_K", "Q6_K"):
        raw = _k_blocks(weight, kind, seed)
    else:
        try:
            raw = gguf.quantize(weight.numpy(), type_)
        except NotImplementedError:
            raw = _any_blocks(weight, kind, seed)
    return raw, torch.from_numpy(gguf.dequantize(raw, type_))


def _k_blocks(weight: Tensor, kind: str, seed: int) -> np.ndarray:
    """Returns random Q4_K, Q5_K or Q6_K blocks with weights of about 0.05."""
    random = np.random.default_rng(seed)
    columns, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    raw = random.integers(0, 256, (*weight.shape[:-1], weight.shape[-1] // columns, size), dtype=np.uint8)
    step = {"Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 4e-5}[kind]
    scales = {"Q4_K": (0, step), "Q5_K": (0, step), "Q6_K": (208, step)}[kind]
    floats = [scales] if kind == "Q6_K" else [scales, (2, step * (7.5 if kind == "Q4_K" else 15.5))]
    for place, value in floats:
        half = np.full((*raw.shape[:-1], 1), value, dtype=np.float16)
        raw[..., place : place + 2] = half.view(np.uint8)
    return raw.reshape(*weight.shape[:-1], -1)


SCALES = {"TQ1_0": 52, "TQ2_0": 64, "Q3_K": 108, "Q6_K": 208}
"""Place of the float16 scale in a block, where it does not begin the block."""


def _any_blocks(weight: Tensor, kind: str, seed: int) -> np.ndarray:
    """Returns random blocks with one float16 scale each, and weights of about 0.05."""
    random = np.random.default_rng(seed)
    columns, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    raw = random.integers(0, 256, (*weight.shape[:-1], weight.shape[-1] // columns, size), dtype=np.uint8)
    place = SCALES.get(kind, 0)
    for scale in (1.0, None):
        if scale is None:
            scale = 0.05 / float(gguf.dequantize(raw.reshape(-1, size), KINDS[kind]).std())
        half = np.full((*raw.shape[:-1], 1), scale, dtype=np.float16)
        raw[..., place : place + 2] = half.view(np.uint8)
    return raw.reshape(*weight.shape[:-1], -1)


def save(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]
) -> None:
    """Writes a GGUF file; the names of metadata omit the architecture, and each tensor has a type."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in metadata.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{name}", value)
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
