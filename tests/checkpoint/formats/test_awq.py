"""Checkpoints in AutoAWQ's layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import saved_folders
from torch_armllm.checkpoint.load import load_model

NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(values: Tensor) -> Tensor:
    """Integers (…, N) as int32 (…, N/8), in AWQ's order of nibbles."""
    lanes = values.long().unflatten(-1, (-1, 8))
    word = sum(lanes[..., output] << (4 * place) for place, output in enumerate(NIBBLES))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def pack_inputs(values: Tensor) -> Tensor:
    """Integers (…, K) as int32 (…, K/8), the first in the lowest bits."""
    lanes = values.long().unflatten(-1, (-1, 8))
    word = sum(lanes[..., place] << (4 * place) for place in range(8))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def padded(values: Tensor, group: int) -> Tensor:
    """Returns one value per group (N, S), padded with zeros like AutoAWQ's ``gemv``."""
    words = -(-values.shape[1] // 8)
    multiple = {32: 4, 64: 2}.get(group, 1)
    width = 8 * (-(-words // multiple) * multiple)
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


def encoder(group: int, version: str = "gemm") -> saved_folders.Encode:
    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        parts = weight.unflatten(1, (-1, columns if group == -1 else group))
        low, high = parts.amin(2), parts.amax(2)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
        q = (parts / scales.float()[..., None]).round().add(zeros[..., None]).clamp(0, 15)
        stands_for = ((q - zeros[..., None]) * scales.float()[..., None]).flatten(1)
        if version == "gemv":
            return {
                "qweight": pack_inputs(q.flatten(1)),
                "qzeros": pack_inputs(padded(zeros, group)),
                "scales": padded(scales, group),
            }, stands_for
        return {
            "qweight": pack(q.flatten(1).t()),
            "qzeros": pack(zeros.t()),
            "scales": scales.t().contiguous(),
        }, stands_for

    return encode


def settings(group: int, version: str = "gemm") -> dict[str, object]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": version, "zero_point": True}


@pytest.mark.parametrize(
    ("family", "group", "version"),
    [
        ("llama", 32, "gemm"),
        ("llama", -1, "gemm"),
        ("qwen2", 64, "gemm"),
        ("mixtral", 32, "gemm"),
        ("llama", 32, "gemv"),
        ("mixtral", 64, "gemv"),
    ],
)
def test_integers_and_scales_are_kept(family: str, group: int, version: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    encode = encoder(group, version)
    expected = saved_folders.write(tmp_path, family, encode, settings(group, version), **sizes)
    model = saved_folders.check(tmp_path, expected)
    scheme = "rowz" if group == -1 else f"g{group}z"
    assert {record.scheme for record in model.hf_quantizer.report.quantized} == {scheme, "int8"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "gemv_fast"}, "version 'gemv_fast': the layouts of gemm and gemv can be read"),
        ({"bits": 3}, "weights of 3 bits: AWQ of 4 bits can be read"),
        ({"zero_point": False}, "zero_point is off"),
    ],
)
def test_unsupported_checkpoints_are_rejected_with_the_reason(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    saved_folders.write(tmp_path, "llama", encoder(32), {**settings(32), **change}, hidden_size=128)
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path / "quantized"))


def test_groups_of_16_are_requantized_and_reported(tmp_path: Path) -> None:
    expected = saved_folders.write(tmp_path, "llama", encoder(16), settings(16), hidden_size=128)
    report = saved_folders.check(tmp_path, expected, error=0.008).hf_quantizer.report
    assert {record.scheme for record in report.quantized} == {"int8g32", "int8"}
    assert any("groups of 16 were rounded to int8g32: relative error 0.00" in note for note in report.notes)
