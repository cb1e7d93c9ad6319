"""gpt-oss checkpoints with experts in MXFP4, in the original layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support import saved_folders
from tests.support.models import tiny
from torch_armllm.checkpoint.formats.mxfp4 import decode
from torch_armllm.checkpoint.load import load_model
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.schemes.registry import SCHEMES

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def encode(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encodes rows of 32·n columns as blocks and scales; returns the equivalent floats, too."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-20))) - 2
    value = groups / torch.exp2(exponent)[..., None]
    code = (value.abs()[..., None] - LEVELS).abs().argmin(-1)
    stands_for = LEVELS[code] * value.sign() * torch.exp2(exponent)[..., None]
    code = (code + 8 * (value < 0)).to(torch.uint8)
    blocks = code[..., 0::2] | (code[..., 1::2] << 4)
    return blocks, (exponent + 127).to(torch.uint8), stands_for.flatten(-2)


def write(folder: Path, **settings: str) -> Any:
    model = tiny("gpt_oss", hidden_size=64, intermediate_size=32)
    model.save_pretrained(folder / "float")
    model.save_pretrained(folder / "quantized")
    state = load_file(folder / "float" / "model.safetensors")
    quantized = dict(state)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, value = encode(quantized.pop(name).float().transpose(1, 2))
        quantized |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales}
        state[name] = value.transpose(1, 2).contiguous().to(state[name].dtype)
    save_file(state, folder / "float" / "model.safetensors", {"format": "pt"})
    save_file(quantized, folder / "quantized" / "model.safetensors", {"format": "pt"})
    saved_folders.configure(folder / "quantized", {"quant_method": "mxfp4", **settings})
    return AutoModelForCausalLM.from_pretrained(folder / "float", dtype="auto")


def test_values_are_decoded_exactly() -> None:
    blocks, scales, value = encode(torch.randn(5, 96) * torch.logspace(-6, 3, 5)[:, None])
    found = decode(blocks, scales)
    assert torch.equal(SCHEMES[found.scheme].dequantize(found), value)


def test_experts_are_kept_exactly_on_request(tmp_path: Path) -> None:
    expected = write(tmp_path, scheme="int8g32")
    model = saved_folders.check(tmp_path, expected)
    assert {one.scheme for one in model.modules() if isinstance(one, QuantExperts)} == {"int8g32"}


def test_experts_are_rounded_by_default(tmp_path: Path) -> None:
    expected = write(tmp_path)
    model = saved_folders.check(tmp_path, expected, tolerance=0.2, error=0.1)
    assert {one.scheme for one in model.modules() if isinstance(one, QuantExperts)} == {"g32iz"}
    assert any(
        "of MXFP4 were rounded to g32iz: relative error 0.0" in n for n in model.hf_quantizer.report.notes
    )


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    saved_folders.change(tmp_path / "quantized", lambda state: state[name].fill_(255))
    with pytest.raises(ValueError, match="down_proj: a scale is NaN"):
        load_model(str(tmp_path / "quantized"))
    saved_folders.change(tmp_path / "quantized", lambda state: state.pop(name))
    with pytest.raises(ValueError, match="down_proj_scales is missing"):
        load_model(str(tmp_path / "quantized"))
