"""Folders in the layouts of AutoGPTQ and GPTQModel."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.quant.formats import folders


def pack(values: Tensor, axis: int) -> Tensor:
    """Integers 0…15 as int32, eight along an axis, the first in the lowest bits."""
    lanes = values.long().unflatten(axis, (-1, 8))
    word = sum(lanes.select(axis + 1, place) << (4 * place) for place in range(8))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def encoder(group: int, symmetric: bool, version: int, ordered: bool) -> folders.Encode:
    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = torch.arange(columns)
        if ordered and "down_proj" not in name:  # what reads the same inputs has them in the same order
            shared = zlib.crc32(re.sub("[qkv]_proj|gate_proj|up_proj", "", name).encode())
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(shared))
        parts = weight[:, order].unflatten(1, (-1, size))
        if symmetric:
            scales = (parts.abs().amax(2) / 7).half()
            zeros = torch.full_like(scales, 8).float()
        else:
            low, high = parts.amin(2), parts.amax(2)
            scales = ((high - low) / 15).half()
            zeros = (-low / scales.float()).round().clamp(1, 15)
        q = (parts / scales.float()[..., None]).round().add(zeros[..., None]).clamp(0, 15)
        stands_for = torch.empty_like(weight)
        stands_for[:, order] = ((q - zeros[..., None]) * scales.float()[..., None]).flatten(1)
        inputs = torch.empty_like(weight)
        inputs[:, order] = q.flatten(1)
        groups = torch.empty(columns, dtype=torch.int32)
        groups[order] = (torch.arange(columns) // size).int()
        return {
            "qweight": pack(inputs.t(), 0),
            "qzeros": pack((zeros - float(version == 1)).t(), 1),
            "scales": scales.t(),
            "g_idx": groups,
        }, stands_for

    return encode


def settings(group: int, symmetric: bool, version: int, ordered: bool) -> dict[str, object]:
    form = {1: "gptq", 2: "gptq_v2"}[version]
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": symmetric,
        "desc_act": ordered,
        "checkpoint_format": form,
    }


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", (32, True, 1, False)),
        ("llama", (64, False, 2, False)),
        ("qwen3_moe", (-1, False, 1, False)),
        ("llama", (32, False, 1, True)),
    ],
)
def test_integers_and_scales_are_taken_as_they_are(
    family: str, options: tuple[int, bool, int, bool], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size" if "moe" in family else "intermediate_size": 192}
    expected = folders.write(tmp_path, family, encoder(*options), settings(*options), **sizes)
    folders.check(tmp_path, expected)
