"""Checkpoints that transformers saved with torchao's tensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from tests.support import saved_folders
from tests.support.models import tiny
from torch_armllm.checkpoint.formats import torchao
from torch_armllm.checkpoint.formats.requantizer import Requantizer
from torch_armllm.checkpoint.load import load_model

quantization = pytest.importorskip("torchao.quantization")
granularity = pytest.importorskip("torchao.quantization.granularity")


def configuration(name: str) -> Any:
    if name == "int8":
        return quantization.Int8WeightOnlyConfig(version=2)
    if name == "int8 with int8 activations":
        return quantization.Int8DynamicActivationInt8WeightConfig(version=2)
    asymmetric = "asymmetric" in name
    return quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4,
        granularity=granularity.PerAxis(0) if "row" in name else granularity.PerGroup(32),
        mapping_type=quantization.MappingType.ASYMMETRIC
        if asymmetric
        else quantization.MappingType.SYMMETRIC,
    )


def save(folder: Path, name: str) -> Any:
    """Writes the checkpoint, and returns the equivalent float model."""
    tiny("llama", torch.bfloat16, hidden_size=128).save_pretrained(folder / "float")
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "float", quantization_config=TorchAoConfig(configuration(name)), dtype="auto"
    )
    model.save_pretrained(folder / "quantized")
    expected = AutoModelForCausalLM.from_pretrained(folder / "float", dtype="auto")
    for module_name, module in expected.named_modules():
        if isinstance(module, torch.nn.Linear) and module_name != "lm_head":
            weight = model.get_submodule(module_name).weight
            module.weight = torch.nn.Parameter(weight.dequantize(), requires_grad=False)
    return expected


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("int8", "int8"),
        ("int8 with int8 activations", "int8"),
        ("int4", "g32b"),
        ("int4, asymmetric", "g32zb"),
        ("int4, a scale a row", "row"),
    ],
)
def test_integers_and_scales_are_kept(name: str, packed: str, tmp_path: Path) -> None:
    expected = save(tmp_path, name)
    report = saved_folders.check(tmp_path, expected).hf_quantizer.report
    assert {record.scheme for record in report.quantized if record.kind != "head"} == {packed}


def pickle(folder: Path) -> None:
    """Pickles the weights, as older versions of transformers do."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(("name", "packed"), [("int8", "int8"), ("int4, asymmetric", "g32zb")])
def test_pickled_tensors_are_kept(name: str, packed: str, tmp_path: Path) -> None:
    expected = save(tmp_path, name)
    pickle(tmp_path / "quantized")
    report = saved_folders.check(tmp_path, expected).hf_quantizer.report
    assert {record.scheme for record in report.quantized if record.kind != "head"} == {packed}


def test_unknown_pickled_classes_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "int8")
    pickle(tmp_path / "quantized")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchao.quantization", None)
        with pytest.raises(ImportError, match="pip install torchao"):
            load_model(str(tmp_path / "quantized"))
    file = tmp_path / "quantized" / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    torch.save({name: Renamed(weight) for name, weight in state.items()}, file)
    with pytest.raises(ValueError, match="of classes that the installed torchao does not have"):
        load_model(str(tmp_path / "quantized"))


class Renamed:
    """A class that torch.load does not know."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


@pytest.mark.parametrize("minimum", [0.0, -0.11])
def test_int4_tensors_with_and_without_offsets(minimum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (16, 32), generator=generator).to(torch.uint8)
    scale = torch.rand(2, 16, generator=generator).bfloat16()
    zero = torch.full((2, 16), minimum, dtype=torch.bfloat16)
    parts = {"qdata": packed.view(torch.int8), "scale": scale, "zero_point": zero}
    found = torchao._int4({"block_size": [1, 32]}, parts, Requantizer())
    low, high = ((((packed >> shift) & 15).float() + 8) % 16 - 8 for shift in (0, 4))
    q = torch.stack([low, high], dim=-1).flatten(1)
    expected = q * scale.t().float().repeat_interleave(32, 1) + zero.t().float().repeat_interleave(32, 1)
    assert found.scheme == ("g32m" if minimum else "g32b")
    assert torch.equal(found.dequantize(), expected)


def test_unsupported_checkpoints_are_rejected_with_the_reason(tmp_path: Path) -> None:
    save(tmp_path, "int4")
    file = tmp_path / "quantized" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"IntxUnpackedToInt8Tensor", b"Int4TilePackedTo4dTensor"))
    with pytest.raises(ValueError, match="is a Int4TilePackedTo4dTensor; Int8Tensor, Intx"):
        load_model(str(tmp_path / "quantized"))
    file.write_bytes(whole.replace(b'\\"int4\\"', b'\\"int3\\"'))
    with pytest.raises(ValueError, match="its values are int3; int4 and int8 can be read"):
        load_model(str(tmp_path / "quantized"))
