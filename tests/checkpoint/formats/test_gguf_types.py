"""Every type of the ``gguf`` package: exact where a scheme holds it, rounded by name where none does."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from torch_armllm.checkpoint.formats.gguf_types import EXACT, decode
from torch_armllm.quant.schemes.registry import scheme_named

FLOATS = ("F32", "F16", "BF16", "F64")
SCHEMES = {
    "Q4_0": "g32",
    "Q4_1": "g32m",
    "Q4_K": "g32m",
    "TQ1_0": "g32",
    "TQ2_0": "g32",
    "IQ1_S": "g32m",
    "Q5_0": "int8g32",
    "Q5_1": "int8g32m",
    "Q5_K": "int8g32m",
    "Q8_0": "int8g32",
    "Q3_K": "int8g32",
    "IQ2_XXS": "int8g32",
    "IQ3_XXS": "int8g32",
    "IQ3_S": "int8g32",
    "IQ4_NL": "int8g32",
    "IQ4_XS": "int8g32",
    "MXFP4": "int8g32",
}
ROUNDED = {"Q2_K", "Q6_K", "IQ1_M", "IQ2_XS", "IQ2_S", "NVFP4"}
UNREADABLE = {"Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64"}
HALVES = {
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "Q3_K": (108,),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
}
"""Places of the float16 numbers of a block, where it has another than one at its beginning."""


def random_blocks(kind: str, rows: int = 4, columns: int = 512, seed: int = 0) -> np.ndarray:
    """Returns random bytes of a type, (rows, bytes), with scales of about 0.01 that may be negative."""
    random = np.random.default_rng(seed)
    length, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = random.integers(0, 256, (rows, columns // length, size), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = random.integers(0, 130, raw.shape[:-1])
        return raw.reshape(rows, -1)
    for place in HALVES.get(kind, (0,)):
        half = random.normal(0, 0.01, (*raw.shape[:-1], 1)).astype(np.float16)
        raw[..., place : place + 2] = half.view(np.uint8)
    return raw.reshape(rows, -1)


def test_every_type_has_a_place() -> None:
    known = {kind.name for kind in gguf.GGMLQuantizationType}
    assert known == set(SCHEMES) | ROUNDED | UNREADABLE | set(FLOATS)
    assert set(EXACT) == set(SCHEMES)


@pytest.mark.parametrize("kind", sorted(SCHEMES))
def test_integers_stand_for_the_values_of_the_package(kind: str) -> None:
    raw: Any = random_blocks(kind)
    expected = torch.from_numpy(np.array(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])))
    found = decode(kind, torch.from_numpy(raw))
    assert found.scheme == SCHEMES[kind]
    value = scheme_named(found.scheme).dequantize(found)
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):  # the sum of scale and offset is rounded once more
        assert torch.allclose(value, expected, rtol=1e-6, atol=1e-5)
    else:
        assert torch.equal(value, expected)
