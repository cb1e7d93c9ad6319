"""Folders in AutoAWQ's layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.quant.formats import folders

NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(values: Tensor) -> Tensor:
    """Integers (…, N) as int32 (…, N/8), in AWQ's order of nibbles."""
    lanes = values.long().unflatten(-1, (-1, 8))
    word = sum(lanes[..., output] << (4 * place) for place, output in enumerate(NIBBLES))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def encoder(group: int) -> folders.Encode:
    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        parts = weight.unflatten(1, (-1, columns if group == -1 else group))
        low, high = parts.amin(2), parts.amax(2)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
        q = (parts / scales.float()[..., None]).round().add(zeros[..., None]).clamp(0, 15)
        stands_for = ((q - zeros[..., None]) * scales.float()[..., None]).flatten(1)
        return {
            "qweight": pack(q.flatten(1).t()),
            "qzeros": pack(zeros.t()),
            "scales": scales.t().contiguous(),
        }, stands_for

    return encode


def settings(group: int) -> dict[str, object]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize(("family", "group"), [("llama", 32), ("llama", -1), ("qwen2", 64), ("mixtral", 32)])
def test_integers_and_scales_are_taken_as_they_are(family: str, group: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    expected = folders.write(tmp_path, family, encoder(group), settings(group), **sizes)
    model = folders.check(tmp_path, expected)
    scheme = "rowz" if group == -1 else f"g{group}z"
    assert {record.scheme for record in model.hf_quantizer.report.quantised} == {scheme, "int8"}
