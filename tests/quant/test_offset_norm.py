"""Norms of 1 + weight are recognized by what they compute, and their new weights are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.offset_norm import divide, divides, is_wide, narrow, offset_factor, widen
from torch_armllm.quant.skeleton import build_skeleton

SIZE = 48


class PlusTwo(GemmaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (2.0 + self.weight.float())).type_as(x)


class Gated(GemmaRMSNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class Squared(GemmaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


class Widening(GemmaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * (1 + self.weight)


def random(norm: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A norm with random parameters."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(SIZE, generator=generator) * 0.7)
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_factor_of_a_norm_of_one_plus_weight_is_found(dtype: torch.dtype) -> None:
    norm = random(GemmaRMSNorm(SIZE), dtype)
    factor = offset_factor(norm)
    assert factor is not None and torch.equal(factor, 1 + norm.weight.float())
    norm = random(NemotronLayerNorm1P(SIZE), dtype)
    factor = offset_factor(norm)
    assert factor is not None and torch.equal(factor, (1 + norm.weight).float())


@pytest.mark.parametrize("kind", [LlamaRMSNorm, nn.LayerNorm, nn.RMSNorm, PlusTwo, Gated, Squared, Widening])
def test_other_norms_have_no_factor(kind: Any) -> None:
    norm = random(kind(SIZE))
    before = dict(norm.named_parameters())
    assert offset_factor(norm) is None
    assert {name: id(p) for name, p in norm.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert not is_wide(norm)


def test_a_norm_with_new_weights_computes_the_divided_factor() -> None:
    norm = random(GemmaRMSNorm(SIZE))
    x = torch.randn(7, SIZE, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected, original = norm(x), norm.weight
    powers = torch.exp2(torch.arange(SIZE) % 9 - 4.0)
    factor = offset_factor(norm)
    assert factor is not None
    powers = torch.where(divides(factor, powers), powers, 1.0)
    assert int((powers != 1).sum()) > SIZE // 2
    originals = widen(norm)
    divide(norm, factor, powers)
    assert is_wide(norm) and not list(norm.parameters())
    assert torch.equal(norm(x) * powers.bfloat16(), expected)
    narrow(norm, originals)
    assert norm.weight is original and not list(norm.buffers())
    assert torch.equal(norm(x), expected)


def test_factors_that_no_float32_weight_has_are_not_divided() -> None:
    factor = torch.tensor([1 + 2.0**-23, 1 + 2.0**-23, 1 + 2.0**-20, 1.5, 0.0, -3.0, float("inf")])
    powers = torch.tensor([2.0, 4.0, 4.0, 16.0, 16.0, 1 / 16, 2.0])
    exact = divides(factor, powers)
    assert exact.tolist() == [True, False, True, True, True, True, True]
    wide = 1 + (factor / powers - 1).double()
    assert torch.equal(wide.float()[exact], (factor / powers)[exact])


def test_parameters_follow_a_model_that_was_cast_meanwhile() -> None:
    norm = random(GemmaRMSNorm(SIZE))
    originals = widen(norm)
    norm.to(torch.float16)
    narrow(norm, originals)
    assert norm.weight.dtype == torch.float16


def test_a_folder_that_names_a_wide_norm_without_weights_is_rejected() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(8, elementwise_affine=False)})
    config = ArmInt4Config(modules={"norm": {"scheme": "float32"}})
    with pytest.raises(ValueError, match="says that the weight of norm is float32, but a LayerNorm has none"):
        build_skeleton(model, config)
