"""End to end on this machine's kernels: quantize, patch, generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_armllm
from tests.support.models import tiny, token_ids
from tests.support.reference_modules import emulate

FAMILIES = [pytest.param("llama", marks=pytest.mark.thorough), "mixtral"]
"""`families` has the steps of the other."""


def close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Every element within `tolerance` of the largest logit."""
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    out: Tensor = model(ids).logits
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantized_generation_equals_the_original(family: str) -> None:
    ids = token_ids(1, 19)
    model = tiny(family)
    expected = logits(model, ids), model.generate(ids, max_new_tokens=8, do_sample=False)
    torch_armllm.patch(model, None, progress=False)
    close(logits(model, ids), expected[0], 2e-4)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_int4_model_agrees_with_plain_pytorch(family: str) -> None:
    ids = token_ids(1, 19)
    model = tiny(family)
    torch_armllm.quantize(model, progress=False)
    expected = logits(emulate(model), ids)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured
    assert not report.notes
    # One activation that rounds the other way changes a logit by about this much; a wrong weight by far more.
    close(logits(model, ids), expected, 1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_int4_generation_is_deterministic(family: str) -> None:
    model = tiny(family)
    torch_armllm.patch(model, progress=False)
    ids = token_ids(2, 11)
    mask = torch.ones_like(ids)
    together = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for row in range(2):
        one = {"attention_mask": mask[:1], "max_new_tokens": 12, "do_sample": False}
        alone = model.generate(ids[row : row + 1], **one)
        assert torch.equal(together[row, : alone.shape[1]], alone[0])
        # Decoding and one prompt step over the same tokens give the same bits, so the same best token.
        best = logits(model, alone[:, :-1])[0, 10:].argmax(-1)
        assert torch.equal(best, alone[0, 11:])
