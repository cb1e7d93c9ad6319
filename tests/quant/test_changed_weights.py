"""A family whose first forward rescales some weights in place: RWKV, which then needs them as floats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, RwkvConfig

import torch_armllm
from tests.support.models import token_ids
from torch_armllm import ArmInt4Config, Recipe
from torch_armllm.quant.report import Report

REASON = "RwkvModel changes its weight as it runs"


def rwkv() -> PreTrainedModel:
    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=97, hidden_size=64, attention_hidden_size=64, num_hidden_layers=3, rescale_every=1
    )
    return AutoModelForCausalLM.from_config(config).eval()


def check(model: PreTrainedModel, report: Report, expected: torch.Tensor) -> None:
    left = {layer.name.split(".", 3)[-1] for layer in report.layers if layer.reason == REASON}
    assert left == {"attention.output", "feed_forward.value"}
    assert all(layer.quantized or layer.reason == REASON for layer in report.layers if layer.kind != "other")
    for _ in range(2):
        found = model(token_ids()).logits
        assert (
            float((found - expected).norm() / expected.norm()) < 0.25
        )  # 0.5 and more with one rescaling too many or too few


@torch.no_grad()
@pytest.mark.parametrize("importance", [True, False])
def test_patch_leaves_rescaled_weights_unquantized(importance: bool) -> None:
    model, expected = rwkv(), rwkv()(token_ids()).logits
    check(model, torch_armllm.patch(model, Recipe(importance=importance), progress=False), expected)


@torch.no_grad()
def test_loading_leaves_rescaled_weights_unquantized(tmp_path: Path) -> None:
    rwkv().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ArmInt4Config())
    check(model, model.hf_quantizer.report, rwkv()(token_ids()).logits)
