"""Layers whose weight has diagonal blocks: detection, packing, saving and restoring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.compressed_models import compressed_model
from torch_armllm import load, patch, quantize
from torch_armllm.quant.layers import block_count
from torch_armllm.quant.modules.linear import QuantLinear

LAYER = "model.layers.1.self_attn.o_a_proj"


class Blocks(nn.Linear):
    """Multiplies part i of a token by block i of the rows."""

    def __init__(self, columns: int, rows: int, parts: int, bias: bool = False) -> None:
        super().__init__(columns, rows, bias)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...nk,nrk->...nr", x, self.weight.view(self.parts, -1, x.shape[-1]))


class Reversed(Blocks):
    """Multiplies the parts by the blocks in another order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(-2))


def test_blocks_are_found_by_what_a_layer_computes() -> None:
    assert block_count(Blocks(24, 96, 3)) == 3
    with torch.device("meta"):
        assert block_count(Blocks(24, 160, 5)) == 5
    assert block_count(Blocks(24, 72, 3)) == 1  # blocks of 24 rows are no whole panels
    assert block_count(Blocks(24, 96, 3, bias=True)) == 1
    assert block_count(Reversed(24, 96, 3)) == 1
    assert block_count(nn.Linear(24, 96)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_blocks_compute_what_the_layer_did(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = compressed_model(dtype, o_lora_rank=32)
    shell = model.get_submodule(LAYER)
    x = torch.randn(2, 5, 2, shell.in_features).to(dtype)
    expected = shell(x).float()
    quantize(model)
    layer = model.get_submodule(LAYER)
    assert isinstance(layer, QuantLinear) and (layer.blocks, layer.scheme) == (2, "int8")
    assert (layer(x).float() - expected).norm() < 0.02 * expected.norm()
    assert layer(x[:0]).shape == (0, 5, 2, 32)
    weights = layer.dequantize().view(2, 32, -1)
    exact = torch.einsum("...nk,nrk->...nr", x.float(), weights)
    assert (layer(x).float() - exact).norm() < 0.02 * exact.norm()


def test_blocks_are_saved_and_loaded(tmp_path: Path) -> None:
    model = compressed_model(o_lora_rank=32)
    quantize(model, progress=False)
    ids = torch.arange(1, 40)[None]
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path), fuse=False)
    assert torch.equal(loaded(ids).logits, expected)
    report = patch(loaded)
    assert report.ops["int8_heads_linear"] == 4 and not report.notes
    assert "blocks" in str(report)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"blocks": 2', '"blocks": 4'))
    with pytest.raises(ValueError, match="o_a_proj has 4 blocks of scheme 'int8'"):
        load(str(tmp_path), fuse=False)
