"""Layers that run several times: one weight, and keys and values of each time."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import torch_armllm
from tests.support.looped_models import looped
from tests.support.parity import TOLERANCE, differences, expected, steps, worst_differences
from tests.support.patched_models import chunked
from tests.support.reference_modules import emulate
from torch_armllm import Recipe
from torch_armllm.hf.cache_names import cache_argument
from torch_armllm.model_survey.tiny_models import tiny_ids
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import NativePlan
from torch_armllm.quant.inplace import quantize

SLOTS = {"dory": 6, "code": 6}
"""Cache layers: the times that layers run."""
MIXED = "inkling2_loop_text"
"""Convolutions and experts run several times, too; float experts have no instruction."""


@functools.cache
def patched(family: str) -> Any:
    model = looped(family)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured and not report.notes, report
    return model


def stored(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the bytes of the memory of packed weights, by its address."""
    memory = [t.untyped_storage() for t in tensors if t.dtype == torch.uint8]
    return {each.data_ptr(): each.nbytes() for each in memory}


@pytest.mark.parametrize("family", SLOTS)
def test_logits_equal_the_models(family: str) -> None:
    model = patched(family)
    forward = patched_forward(model)
    assert forward is not None and isinstance(forward.plan, NativePlan)
    assert forward.shape.layers == SLOTS[family]
    for name, (_, largest) in differences(steps(model), expected(looped(family))).items():
        assert largest < 3e-4, name


@pytest.mark.parametrize("family", [*SLOTS, pytest.param(MIXED, marks=pytest.mark.thorough)])
def test_quantized_weights_are_shared_by_all_times(family: str) -> None:
    model = looped(family)
    quantize(model, Recipe(importance=False), progress=False)
    twin = emulate(model)
    torch_armllm.patch(model, progress=False)
    for name, largest in worst_differences(model, twin, TOLERANCE).items():
        assert largest < TOLERANCE, name
    forward = patched_forward(model)
    assert forward is not None and isinstance(forward.plan, NativePlan)
    assert forward.shape.layers == SLOTS.get(family, 5)
    read = stored(forward.plan.program.constants)
    packed = list(model.base_model.buffers())
    assert read == stored(packed)
    assert sum(read.values()) == sum(t.nbytes for t in packed if t.dtype == torch.uint8)


@pytest.mark.parametrize("family", SLOTS)
def test_generate_is_the_models(family: str) -> None:
    model, own, ids = patched(family), looped(family), tiny_ids(2, 11)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")
        got = model.generate(ids, **settings)
    assert torch.equal(got, own.generate(ids, **settings))


@pytest.mark.filterwarnings("ignore:torch_armllm")
@torch.no_grad()
def test_modules_continue_from_the_tokens_of_a_plans_cache() -> None:
    model, own, ids = patched("dory"), looped("dory"), tiny_ids(1, 30)
    cache = DynamicCache(config=model.config)
    first = chunked(model, ids[:, :20], [12, 8], cache)
    assert isinstance(cache, PagedCache) and len(cache) == SLOTS["dory"]
    given = {cache_argument(model.forward): cache}
    last = model(ids[:, 20:], output_hidden_states=True, **given).logits
    torch.testing.assert_close(torch.cat([first, last], 1), own(ids).logits, rtol=1e-3, atol=1e-3)


def test_times_that_read_keys_of_a_later_one_are_refused_by_name() -> None:
    model, ids = looped("dory", recurrent_kv_cache_mode="last_loop"), tiny_ids(1, 12)
    own = model(ids).logits
    report = torch_armllm.patch(model, None, progress=False)
    assert not report.captured
    assert report.capture_reason == (
        "DoryModel runs one layer several times, and not each has keys of its own"
    )
    assert torch.equal(model(ids).logits, own)
