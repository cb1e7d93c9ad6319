"""Values that no tool writes, as NaN in a scale, are refused by the name of their tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.damaged_folders import awq, compressed, edit_tensors, packed, refused
from tests.checkpoint.formats import test_gptq
from torch_armllm import ArmInt4Config, Recipe, load
from torch_armllm.checkpoint.load import load_model
from torch_armllm.ops import linear
from torch_armllm.ops.linear.packed_layout import unpack_multipliers
from torch_armllm.quant.packing import dequantize_matrix, panel_fault


def test_zero_points_of_another_version(tmp_path: Path) -> None:
    test_gptq.write(tmp_path, "llama", (32, True, 1, False), {"checkpoint_format": "gptq_v2"})
    refused(tmp_path / "quantized", "sym is true and all zero points are 7, where 8 is expected")


def spoil_scale(packed: Tensor, value: float = float("nan")) -> None:
    packed.view(-1)[:4] = torch.tensor([value]).view(torch.uint8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norms_that_are_not_finite(value: float, saved: Path, tmp_path: Path) -> None:
    name = "model.layers.1.input_layernorm.weight"
    folders = [saved, awq(tmp_path), tmp_path / "float"]
    for folder in folders:
        edit_tensors(folder, lambda state: state[name].view(-1)[3:4].fill_(value))
        refused(folder, rf"{name} in .* holds {value} at \(3,\), and finite values are")
    with pytest.raises(ValueError, match=f"{name} in .* holds {value}"):
        load_model(str(folders[-1]))


@pytest.mark.parametrize(
    "scheme", ["g32i", "int3", "g32", "g64zb", "g32m", "int8", "int8g32", "int8g32m", "row"]
)
def test_scales_that_are_not_finite(scheme: str, tmp_path: Path) -> None:
    packed(tmp_path, "llama", scheme)
    load(str(tmp_path), fuse=False)
    name = "model.layers.1.mlp.down_proj.weight_packed"
    start = 64 if scheme in ("g32", "g64zb", "g32m") else 0

    def spoil(state: dict[str, Tensor]) -> None:
        not_a_number = torch.full((2,), float("nan"), dtype=torch.bfloat16).view(torch.uint8)
        state[name][-1, start : start + 4] = not_a_number

    edit_tensors(tmp_path, spoil)
    refused(tmp_path, f"{name} in .*model.safetensors has a scale that is NaN, infinite or above")


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 8e37])
def test_scales_of_compressed_tensors(value: float, tmp_path: Path) -> None:
    folder, name = compressed(tmp_path), "model.layers.1.mlp.down_proj"
    edit_tensors(folder, lambda state: state[f"{name}.weight_scale"].view(-1)[3:4].fill_(value))
    refused(folder, rf"{name}: a scale is NaN, infinite or above 2\^100")


@pytest.mark.parametrize("value", [float("nan"), -3e38, 2.0**100])
def test_scales_of_experts(value: float, tmp_path: Path) -> None:
    packed(tmp_path, "qwen3_moe", "int4")
    name = "model.layers.1.mlp.experts.down_packed"
    edit_tensors(tmp_path, lambda state: spoil_scale(state[name][7, 2], value))
    refused(tmp_path, f"{name} in .* has a scale that is NaN, infinite or above")


@pytest.mark.parametrize("multiplier", [15, 16])
@pytest.mark.parametrize("row", [3, 11])  # low and high nibbles
def test_multipliers_that_overflow(multiplier: int, row: int, tmp_path: Path) -> None:
    packed(tmp_path, "llama", "g32iz")
    name = "model.layers.1.mlp.down_proj.weight_packed"

    def spoil(state: dict[str, Tensor]) -> None:
        pair = state[name][-1, 64 + 8 + row % 8]  # of the second group, behind the row scales
        pair.copy_((pair & 15) | (multiplier - 1) << 4 if row >= 8 else (pair & 240) | (multiplier - 1))

    edit_tensors(tmp_path, spoil)
    refused(
        tmp_path,
        f"{name} in .*model.safetensors has a multiplier of {multiplier}, and multipliers of scheme "
        "g32iz from 1 to 14 are expected: the checkpoint is damaged; get it anew",
    )


def test_multipliers_of_experts_that_overflow(tmp_path: Path) -> None:
    packed(tmp_path, "qwen3_moe", "g32iz")
    name = "model.layers.1.mlp.experts.gate_up_packed"
    edit_tensors(tmp_path, lambda state: state[name][7, 1, 64].fill_(0xF0))
    refused(tmp_path, f"{name} in .* has a multiplier of 16, and multipliers of scheme")


@pytest.mark.parametrize("scheme", ["g32iz", "g32i", "int6", "int3"])
def test_every_other_multiplier_and_zero_point_fits_int8(scheme: str) -> None:
    largest, columns = linear.traits_of(scheme).largest_multiplier, 64
    layout = linear.panel_layout(scheme, columns)
    panels = torch.randint(256, (4, layout.bytes), dtype=torch.uint8, generator=torch.manual_seed(0))
    panels[:, :64] = torch.ones(16).view(torch.uint8)  # the row scales
    if scheme == "g32iz":
        panels[:, 64 : layout.zero_points] &= 0x77  # multipliers up to 8 in any bits
        panels[1, 64 : layout.zero_points] = 0xDD
    assert panel_fault(panels, columns, scheme) is None
    multipliers = unpack_multipliers(panels, 64, columns, scheme).int().abs()
    assert 1 <= int(multipliers.min()) <= int(multipliers.max()) == largest
    weight = dequantize_matrix(panels, 64, columns, scheme)
    integers, _ = linear.unpack_int(panels, 64, columns, scheme)
    assert torch.equal(weight, integers.float())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (97, r"holds 97, and a permutation of 0 … 63"),
        (-1, "holds -1, and a perm"),
        (None, "2 times, and a perm"),
    ],
)
def test_orders_that_are_no_permutations(entry: int | None, message: str, tmp_path: Path) -> None:
    test_gptq.write(tmp_path, "llama", (32, True, 1, True))
    load(str(tmp_path / "quantized"), Recipe(head=None), fuse=False).save_pretrained(tmp_path / "saved")
    name = "model.layers.0.self_attn.q_proj.order"

    def damage(state: dict[str, Tensor]) -> None:
        state[name][5] = int(state[name][4]) if entry is None else entry

    edit_tensors(tmp_path / "saved", damage)
    refused(tmp_path / "saved", f"{name} in .*model.safetensors holds.*{message.removeprefix('holds')}")


def test_transformers_own_api_checks_too(saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    edit_tensors(saved, lambda state: state["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"model.norm.weight in .*model.safetensors holds nan at \(0,\)"):
        AutoModelForCausalLM.from_pretrained(saved)
    assert ArmInt4Config().stored is None
