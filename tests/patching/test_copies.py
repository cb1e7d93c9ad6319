"""Copies of a patched model compute with weights of their own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_armllm
from tests.support.models import tiny, token_ids

IDS = token_ids(2, 12)


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), by_torch_save]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS, use_cache=False).logits


def patched(quantization: str | None, family: str = "llama") -> Any:
    model = tiny(family)
    assert torch_armllm.patch(model, quantization, progress=False).captured
    return model


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_weights_of_its_own(way: Callable[[Any], Any], quantization: str | None) -> None:
    model = patched(quantization)
    expected = logits(model)
    with pytest.warns(UserWarning, match=r"runs module by module: call torch_armllm.patch\(copy\)"):
        other = way(model)
    assert not torch_armllm.is_patched(other) and torch_armllm.is_patched(model)
    torch.testing.assert_close(logits(other), expected, atol=1e-3, rtol=1e-3)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(-2)
    assert float((logits(other) - expected).norm()) > 0.5 * float(expected.norm())
    assert torch.equal(logits(model), expected)
    torch_armllm.patch(other, "auto" if quantization else None, progress=False)
    assert float((logits(other) - expected).norm()) > 0.5 * float(expected.norm())


@pytest.mark.filterwarnings("ignore:torch_armllm")
def test_a_copy_of_a_part_and_a_shallow_copy() -> None:
    model = patched(None)
    expected = logits(model)
    assert torch.equal(logits(copy.copy(model)), expected)
    inner = copy.deepcopy(model.base_model)
    with torch.no_grad():
        before = model.base_model(IDS).last_hidden_state
        torch.testing.assert_close(inner(IDS).last_hidden_state, before, atol=1e-5, rtol=1e-5)
        inner.layers[0].mlp.up_proj.weight.zero_()
        assert not torch.allclose(inner(IDS).last_hidden_state, before, atol=1e-2)


def test_unpatched_models_are_copied_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    model = patched(None)
    torch_armllm.unpatch(model)
    assert "__getstate__" not in model.__dict__ and torch.equal(logits(copy.deepcopy(model)), logits(model))
    assert not [w for w in recwarn if "torch_armllm" in str(w.message)]
