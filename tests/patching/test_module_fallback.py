"""Models whose modules have another cache than the plan: the modules recompute the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import torch_armllm
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.patching.cache.paged_cache import PagedCache

LIMIT = 16


def sparse(patched: bool) -> Any:
    """DeepSeek 3.2 with indexers that select sixteen tokens by scores that capture does not know."""
    model = tiny_model("deepseek_v32", index_topk=LIMIT)
    for layer in model.model.layers:
        layer.self_attn.indexer.softmax_scale = torch.tensor(0.25)
    if patched:
        report = torch_armllm.patch(model, None, progress=False)
        assert report.captured, report.capture_reason
    return model


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return sparse(True), sparse(False)


def continued(model: Any, ids: Tensor, sizes: list[int], cache: Any, **options: Any) -> Tensor:
    begin, parts = 0, []
    for size in sizes:
        out = model(ids[:, begin : begin + size], past_key_values=cache, use_cache=True, **options)
        cache = out.past_key_values
        parts.append(out.logits)
        begin += size
    return torch.cat(parts, 1)


@pytest.mark.filterwarnings("ignore:torch_armllm")
@torch.no_grad()
def test_sequence_beyond_the_dense_length_continues_by_modules(models: tuple[Any, Any]) -> None:
    model, own = models
    ids = tiny_ids(2, 40)
    cache = DynamicCache(config=model.config)
    got = continued(model, ids, [10, 5, 1, 1, 8, 15], cache)
    # an indexer breaks ties between zero-weight tokens by their order, so the steps must be the modules'
    expected = continued(own, ids, [LIMIT, 1, 8, 15], DynamicCache(config=own.config))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert type(cache) is DynamicCache and cache.get_seq_length() == 40


@pytest.mark.filterwarnings("ignore:torch_armllm")
@torch.no_grad()
def test_short_sequences_run_by_the_plan(models: tuple[Any, Any]) -> None:
    model, own = models
    ids = tiny_ids(2, LIMIT)
    cache = DynamicCache(config=model.config)
    got = continued(model, ids, [9, 7], cache)
    assert isinstance(cache, PagedCache)
    torch.testing.assert_close(got, own(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:torch_armllm")
def test_beams_and_padding_survive_the_switch_to_modules(models: tuple[Any, Any]) -> None:
    model, own = models
    ids, mask = tiny_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    settings = {"num_beams": 2, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    got, expected = (m.generate(ids, attention_mask=mask, pad_token_id=0, **settings) for m in (model, own))
    assert torch.equal(got, expected)


def masking(patched: bool) -> Any:
    """Qwen4-Exp with an indexer that selects two blocks of four tokens, and those of an incomplete block."""
    model = tiny_model("qwen4_exp_text", indexer_budget=8)
    if patched:
        model.report = torch_armllm.patch(model, None, progress=False)
    return model


@pytest.mark.filterwarnings("ignore:torch_armllm")
@torch.no_grad()
def test_indexer_of_masks_is_left_out_of_texts_of_which_it_hides_nothing() -> None:
    model, own, ids = masking(True), masking(False), tiny_ids(2, 22)
    assert model.report.captured, model.report.capture_reason
    (note,) = [note for note in model.report.notes if "texts of more than 11 tokens" in note]
    assert "layers.1.self_attn.indexer" in note and "2 blocks of 4 tokens" in note
    cache = DynamicCache(config=model.config)
    got = [continued(model, ids[:, :11], [7, 4], cache)]
    assert isinstance(cache, PagedCache)
    got.append(continued(model, ids[:, 11:], [1, 10], cache))
    assert type(cache) is DynamicCache
    expected = continued(own, ids, [11, 11], DynamicCache(config=own.config))
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:torch_armllm")
@torch.no_grad()
def test_repeated_attention_has_its_own_cache_layer() -> None:
    model, own, ids = tiny_model("diffllama"), tiny_model("diffllama"), tiny_ids(1, 30)
    assert torch_armllm.patch(model, None, progress=False).captured
    whole = own(ids).logits
    cache = DynamicCache(config=model.config)
    first = continued(model, ids[:, :20], [12, 8], cache)
    assert isinstance(cache, PagedCache)
    # the modules run if an output is requested that the plan does not have
    last = continued(model, ids[:, 20:], [10], cache, output_hidden_states=True)
    torch.testing.assert_close(torch.cat([first, last], 1), whole, rtol=1e-3, atol=1e-3)


def doge(patched: bool, **options: Any) -> Any:
    model = tiny_model("doge", **options)
    if patched:
        model.report = torch_armllm.patch(model, None, progress=False)
    return model


@pytest.mark.filterwarnings("ignore:torch_armllm")
@torch.no_grad()
def test_longer_texts_with_other_operators_continue_by_modules() -> None:
    """Doge hides keys of low biases beyond ``keep_window_size``; its keys are longer than the modules'."""
    model, own, ids = doge(True, keep_window_size=256), doge(False, keep_window_size=256), tiny_ids(1, 270)
    assert model.report.captured
    (note,) = [note for note in model.report.notes if "texts of more than 256 tokens" in note]
    assert "DogeAttention, such as layers.0.self_attn" in note
    cache = DynamicCache(config=model.config)
    got = continued(model, ids, [200, 56, 14], cache)
    assert type(cache) is DynamicCache
    expected = continued(own, ids, [200, 56, 14], DynamicCache(config=own.config))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_a_plan_of_few_tokens_is_not_made() -> None:
    report = doge(True, keep_window_size=64).report
    assert not report.captured
    assert "DogeAttention, such as layers.0.self_attn" in str(report.capture_reason)
    assert "depends on the number of tokens in its choice of operators" in str(report.capture_reason)
