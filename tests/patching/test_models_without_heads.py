"""Decoders without a head for tokens: bare ones, classifiers, and models that are refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import torch_armllm
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config, tiny_ids
from torch_armllm.patching.state import patched_forward

CLASSES = {
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
    "tag": AutoModelForTokenClassification,
}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")  # no call runs module by module
        yield


def tiny(family: str, task: str, **overrides: Any) -> Any:
    config = tiny_config(family, **overrides)
    config.num_labels, config.pad_token_id = 3, 0
    return build_tiny(CLASSES[task], config)


def results(model: Any, padded_left: bool) -> list[Tensor]:
    """Results of two texts, of which one is padded."""
    ids, mask = tiny_ids(2, 40), torch.ones(2, 40, dtype=torch.int64)
    padding = slice(0, 9) if padded_left else slice(31, 40)
    ids[1, padding], mask[1, padding] = 0, 0
    out = model(input_ids=ids, attention_mask=mask)
    found: Tensor = out.logits if "logits" in out else out.last_hidden_state
    return [found[0], found[1] if found.dim() == 2 else found[1][mask[1].bool()]]


@pytest.mark.parametrize("padded_left", [False, True])
@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("qwen3", "classify"),
        ("qwen3", "embed"),
        ("llama", "tag"),
        ("gemma2", "embed"),
        ("mistral", "classify"),
    ],
)
def test_results_equal_transformers(
    family: str, task: str, padded_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family, task)
    expected = results(model, padded_left)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured and not report.notes
    forward = patched_forward(model)
    assert forward is not None
    monkeypatch.setattr(forward.calls, "module_forward", None)  # the plan computes all
    for found, value in zip(results(model, padded_left), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-4)
    assert task != "embed" or not hasattr(model, "generate")


def test_positions_that_a_model_counts_by_its_mask_are_not_guessed() -> None:
    model = tiny("opt", "classify")
    expected = [results(model, padded_left) for padded_left in (False, True)]
    torch_armllm.patch(model, None, progress=False)
    right = results(model, padded_left=False)
    with pytest.warns(UserWarning, match="padded on the left, and no position_ids are given"):
        left = results(model, padded_left=True)
    for found, value in zip((*right, *left), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-4)


def test_default_is_int8_and_unpatch_restores() -> None:
    model = tiny("qwen3", "classify")
    expected = results(model, padded_left=True)
    report = torch_armllm.patch(model, keep_original=True, progress=False)
    assert {layer.scheme for layer in report.quantized} == {"int8"} and report.share > 0.9
    found = results(model, padded_left=True)
    assert float((found[0] - expected[0]).norm()) < 0.1 * float(expected[0].norm())
    torch_armllm.unpatch(model)
    assert all(map(torch.equal, results(model, padded_left=True), expected))
    torch_armllm.quantize(model, "int8", progress=False)
    report = torch_armllm.patch(model, progress=False)  # keeps what is packed
    assert report.captured and {layer.scheme for layer in report.quantized} == {"int8"}
    model = tiny("qwen3", "classify")
    report = torch_armllm.patch(model, "int4", progress=False)
    assert "g32iz" in {layer.scheme for layer in report.quantized}


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_saved_folders_load_patched(task: str, tmp_path: Path) -> None:
    model = tiny("qwen3", task)
    torch_armllm.patch(model, progress=False)
    expected = results(model, padded_left=False)
    model.save_pretrained(tmp_path)
    loaded = CLASSES[task].from_pretrained(tmp_path)
    assert patched_forward(loaded) is not None
    assert all(map(torch.equal, results(loaded, padded_left=False), expected))


def test_models_of_two_stacks_are_refused() -> None:
    with pytest.raises(ValueError, match="T5Model is neither a causal language model nor a decoder"):
        torch_armllm.patch(AutoModel.from_config(tiny_config("t5")).eval())


def test_models_that_read_more_of_their_base_run_by_modules() -> None:
    model = tiny("bert", "classify", is_decoder=True)
    report = torch_armllm.patch(model, "int8", progress=False)
    assert not report.captured
    reason = "BertForSequenceClassification reads more than the last hidden states of its BertModel"
    assert report.capture_reason is not None and reason in report.capture_reason
    assert isinstance(results(model, padded_left=False)[0], Tensor)
    pooled = tiny("bert", "embed", is_decoder=True)
    report = torch_armllm.patch(pooled, "int8", progress=False)
    assert report.capture_reason == "BertModel returns pooler_output, which no plan computes"
    assert isinstance(pooled, nn.Module) and pooled(tiny_ids(1, 5)).pooler_output is not None
