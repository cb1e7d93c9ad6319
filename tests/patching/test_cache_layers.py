"""Layers of a patched model's cache, and the caches that transformers makes by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_armllm
from tests.support.models import tiny, token_ids

IDS = token_ids(2, 20)
MASK = torch.tensor([[1] * 20, [0] * 6 + [1] * 14])


@functools.cache
def twins(family: str) -> tuple[Any, Any]:
    model = tiny(family)
    assert torch_armllm.patch(model, None, progress=False).captured
    return model, tiny(family)


@torch.no_grad()
def cache_of(model: Any, mask: Tensor | None = None) -> Any:
    return model(IDS, attention_mask=mask, use_cache=True).past_key_values


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mask", [None, MASK, MASK.flip(1)], ids=["none", "left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_keys_and_values_are_those_of_modules(family: str, mask: Tensor | None) -> None:
    cache, own = (cache_of(model, mask) for model in twins(family))
    kept = torch.ones(2, 1, 20, 1) if mask is None else mask[:, None, :, None]
    assert len(cache) == len(cache.layers) == len(own.layers)
    for layer, expected, (keys, values, _) in zip(cache.layers, own.layers, cache, strict=True):
        close(layer.keys * kept, expected.keys * kept)
        close(layer.values * kept, expected.values * kept)
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
        for name in ("get_seq_length", "get_max_length"):
            assert getattr(layer, name)() == getattr(expected, name)()
        assert layer.get_mask_sizes(1) == expected.get_mask_sizes(1)
        for name in ("is_initialized", "is_sliding", "is_croppable", "is_compileable"):
            assert getattr(layer, name) == getattr(expected, name), name


@torch.no_grad()
def test_what_is_written_to_a_layer_is_read_by_steps() -> None:
    model, own = twins("llama")
    logits = []
    for each in (model, own):
        cache = cache_of(each)
        cache.layers[1].values = 2 * cache.layers[1].values
        cache.layers[0].keys = cache.layers[0].keys.flip(2)
        logits.append(each(IDS[:, :1], past_key_values=cache).logits)
    close(*logits)


def test_a_layer_alone_cannot_change_the_rows() -> None:
    cache = cache_of(twins("llama")[0])
    layer = cache.layers[0]
    with pytest.raises(ValueError, match="crop, batch_select_indices and reset of the cache itself"):
        layer.keys = layer.keys[:, :, :5]
    for method, argument in (
        ("crop", -1),
        ("batch_repeat_interleave", 2),
        ("reorder_cache", torch.tensor([1, 0])),
    ):
        with pytest.raises(ValueError, match=f"cannot {method} alone"):
            getattr(layer, method)(argument)
    with pytest.raises(ValueError, match="cannot be replaced"):
        cache.layers = [layer]


@torch.no_grad()
def test_a_layer_keeps_its_cache() -> None:
    model, _ = twins("llama")
    layer = cache_of(model).layers[0]
    before = layer.keys
    for seed in range(3):
        model(token_ids(2, 30, seed=seed), use_cache=True)
    assert torch.equal(layer.keys, before)


@torch.no_grad()
def test_unpatched_models_go_on_from_a_patched_models_cache() -> None:
    model, own = twins("llama")
    found = own(IDS[:, :3], past_key_values=cache_of(model)).logits
    close(found, own(IDS[:, :3], past_key_values=cache_of(own)).logits)


def test_states_of_hybrids_are_refused_by_name() -> None:
    cache = cache_of(twins("qwen3_next")[0])
    assert cache.layers[1].keys.shape == (2, 2, 20, 16)
    with pytest.raises(AttributeError, match="recurrent layer.*unpatch"):
        cache.layers[0].conv_states  # noqa: B018


@pytest.mark.filterwarnings("ignore:torch_armllm")
@pytest.mark.parametrize("cache", ["static", "dynamic", "hybrid", "sliding_window"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_caches_by_name(family: str, cache: str) -> None:
    settings = {"cache_implementation": cache, "max_new_tokens": 5, "do_sample": False}
    got, expected = (model.generate(IDS, attention_mask=MASK, **settings) for model in twins(family))
    assert torch.equal(got, expected)
