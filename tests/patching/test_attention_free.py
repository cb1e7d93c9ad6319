"""Models without attention: a cache of states only, under the names that transformers gives it."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch

import torch_armllm
from torch_armllm.hf.cache_names import cache_argument, cache_of
from torch_armllm.kv_cache.shapes import StatesOnlyShape
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.state import patched_forward

FAMILIES = ("mamba2", "mamba", "falcon_mamba")
IDS = tiny_ids(2, 20, seed=5)
PADDING = 7
MASK = torch.ones_like(IDS)
MASK[0, :PADDING] = 0


@functools.cache
def twins(family: str) -> tuple[Any, Any]:
    """Returns a patched float model and its unpatched twin."""
    model, own = tiny_model(family, seed=3), tiny_model(family, seed=3)
    torch_armllm.patch(model, None, progress=False)
    return model, own


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"use_cache": False}], ids=["greedy", "beams", "no cache"]
)
def test_generate_equals_the_unpatched_model(family: str, options: dict[str, Any]) -> None:
    model, own = twins(family)
    arguments = dict(attention_mask=MASK, max_new_tokens=9, min_new_tokens=9, do_sample=False, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")
        assert torch.equal(model.generate(IDS, **arguments), own.generate(IDS, **arguments))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_cache_goes_on_after_a_call_by_modules(family: str) -> None:
    model, own = twins(family)
    assert isinstance(patched_forward(model).shape, StatesOnlyShape)  # type: ignore[union-attr]
    logits = own(IDS[1:]).logits
    out = model(IDS[1:, :9], use_cache=True)
    cache = cache_of(out)
    assert isinstance(cache, PagedCache) and len(cache) == 0
    given = {cache_argument(model.forward): cache}
    with pytest.warns(UserWarning, match="output_hidden_states is requested"):
        later = model(IDS[1:, 9:10], **given, use_cache=True, output_hidden_states=True)
    torch.testing.assert_close(later.logits[0, 0], logits[0, 9], rtol=1e-3, atol=1e-4)
    assert not isinstance(cache_of(later), PagedCache)


def test_report_says_that_there_is_nothing_to_store() -> None:
    report = torch_armllm.patch(tiny_model("mamba2"), kv_cache_dtype="int8", progress=False)
    assert report.captured and report.kv_bytes == 0
    assert any("kv_cache_dtype has no effect" in note for note in report.notes)


def test_cache_without_layers_has_no_tensors() -> None:
    shape = StatesOnlyShape(torch.bfloat16)
    assert not shape.tensors(8) and shape.bytes_per_token == 0
    with pytest.raises(ValueError, match="all layers are recurrent"):
        shape.layer(shape.tensors(8), 0)


@torch.no_grad()
def test_positions_that_begin_a_sequence_in_the_middle_run_by_modules() -> None:
    model, own = twins("recurrent_gemma")
    restarted = {"position_ids": torch.arange(20)[None] % 12, "attention_mask": torch.ones(1, 20)}
    with pytest.warns(UserWarning, match="position_ids begin sequences where none begins"):
        logits = model(IDS[1:], **restarted, use_cache=False).logits
    torch.testing.assert_close(logits, own(IDS[1:], **restarted, use_cache=False).logits)
