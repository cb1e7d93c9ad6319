"""Loops of patched models as users write them: the cache by each name, outputs of the family's own class."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_armllm
from tests.support.models import tiny
from tests.support.plan_steps import names_of_cache, plan_steps
from torch_armllm.hf.cache_names import cache_field, cache_of, usual_name
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.generation.decode_steps import DecodeSteps
from torch_armllm.patching.state import patched_forward

FAMILIES = ["llama", "mamba2", "granitemoehybrid", "gpt_neo"]
"""Attention, states, both; and a forward that declares another class than it returns."""
IDS = tiny_ids(1, 12, seed=3)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@functools.cache
def twins(family: str) -> tuple[Any, Any]:
    """Returns a patched float model and its unpatched twin."""
    model, own = tiny_model(family), tiny_model(family)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured, report.capture_reason
    return model, own


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loop_continues_from_the_returned_cache_by_each_name(family: str) -> None:
    model, own = twins(family)
    expected = own(IDS).logits
    for name in names_of_cache(model):
        with plan_steps(model) as steps, warnings.catch_warnings():
            warnings.filterwarnings("ignore", f"`{name}` is deprecated")
            cache, found = None, []
            for begin, end in ((0, 8), (8, 9), (9, 12)):
                out = model(IDS[:, begin:end], use_cache=True, **{name: cache})
                cache = getattr(out, name)
                found.append(out.logits)
        assert type(cache) is PagedCache and steps.count == 3
        torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_of_the_familys_own_class(family: str) -> None:
    model, own = twins(family)
    for use_cache in (False, True):
        found, expected = (m.base_model(input_ids=IDS, use_cache=use_cache) for m in (model, own))
        assert type(found) is type(expected)
        assert (cache_of(found) is not None) == use_cache
        found, expected = (
            m.base_model(input_ids=IDS, use_cache=use_cache, return_dict=False) for m in (model, own)
        )
        assert type(found) is tuple and len(found) == len(expected)


def test_a_patched_forward_has_the_models_own_arguments() -> None:
    model, own = twins("llama")
    assert inspect.signature(model.base_model.forward) == inspect.signature(own.base_model.forward)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_generate_runs_the_plan_from_the_second_token_on(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    torch_armllm.patch(model, progress=False)
    ran: list[int] = []
    decode = DecodeSteps.decode

    def count(self: DecodeSteps, token_ids: Any) -> Any:
        ran.append(len(token_ids))
        return decode(self, token_ids)

    monkeypatch.setattr(DecodeSteps, "decode", count)
    with plan_steps(model) as steps:
        out = model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        result = model.generate(IDS, max_new_tokens=5, min_new_tokens=5, return_dict_in_generate=True)
    assert out.shape[1] == IDS.shape[1] + 5
    assert steps.count == 2 and ran == [1] * 8  # a prompt for each call; then one step a token
    assert cache_field(type(result)) == usual_name() and type(cache_of(result)) is PagedCache


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_generate_goes_on_from_what_modules_computed_of_the_prompt(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = twins(family)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    expected = own.generate(IDS, output_logits=True, **options)
    forward = patched_forward(model)
    assert forward is not None
    monkeypatch.setattr(type(model.generate._loop), "serves", lambda *_: True)  # also with a float head
    with forward.by_modules("a test"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(IDS, output_logits=True, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for logits, others in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, others, rtol=0, atol=1e-6)
