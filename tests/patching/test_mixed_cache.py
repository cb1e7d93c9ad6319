"""Models whose layers have keys and values of different shapes, or share those of other layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_armllm
from torch_armllm.kv_cache.block_pool import BlockPool, CacheShape, MixedShape
from torch_armllm.kv_cache.shapes import MixedCache
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.state import patched_forward

FAMILIES = ["gemma4_text", "gemma3n_text", "mimo_v2_flash"]


def cache_of(model: Any) -> Any:
    forward = patched_forward(model)
    assert forward is not None
    return forward.shape


@pytest.fixture(autouse=True)
def by_the_plan(recwarn: pytest.WarningsRecorder) -> Any:
    yield
    unserved = [str(w.message) for w in recwarn if "torch_armllm: " in str(w.message)]
    assert all("output_hidden_states" in message for message in unserved)


def test_layers_that_share_keys_and_values_need_no_memory() -> None:
    model = tiny_model("gemma4_text")
    report = torch_armllm.patch(model, None, progress=False)
    shape = cache_of(model)
    # two sliding layers of two heads of 16, two global ones of one head of 32; the latter two share
    assert [(g.layers, g.kv_heads, g.head_size, g.value_size) for g in shape.groups] == [
        (1, 2, 16, 16),
        (1, 1, 32, 32),
    ]
    assert shape.positions == ((0, 0), (1, 0), (0, 0), (1, 0))
    assert report.kv_bytes == 2 * (2 * 16 + 32) * 4


def test_layers_with_different_head_counts_form_groups() -> None:
    model = tiny_model("mimo_v2_flash", head_dim=32, v_head_dim=16, num_key_value_heads=1)
    torch_armllm.patch(model, None, progress=False)
    shape = cache_of(model)
    assert {(g.kv_heads, g.head_size, g.value_size) for g in shape.groups} == {(1, 32, 16), (2, 32, 16)}


def test_equal_layers_form_no_groups() -> None:
    model = tiny_model("gemma3_text")
    torch_armllm.patch(model, None, progress=False)
    assert isinstance(cache_of(model), CacheShape)


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_and_modules_share_one_cache(family: str) -> None:
    model, ids = tiny_model(family), tiny_ids(2, 40)
    with torch.no_grad():
        expected = model(ids).logits
        own = model(ids[:, :12], use_cache=True).past_key_values
        torch_armllm.patch(model, None, progress=False)
        states = [model(ids[:, 12:30], past_key_values=own).logits]
        assert isinstance(own, PagedCache)
        states.append(model(ids[:, 30:35], past_key_values=own, output_hidden_states=True).logits)
        states.append(model(ids[:, 35:], past_key_values=own).logits)
    torch.testing.assert_close(torch.cat(states, 1), expected[:, 12:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "bound"), [("bfloat16", 2e-2), ("int8", 1e-1)])
def test_every_cache_dtype_supports_groups(kind: str, bound: float) -> None:
    model, own, ids = tiny_model("gemma4_text"), tiny_model("gemma4_text"), tiny_ids(1, 40)
    torch_armllm.patch(model, None, kv_cache_dtype=kind, progress=False)
    with torch.no_grad():
        expected = own(ids).logits
        out = model(ids[:, :30], use_cache=True)
        got = torch.cat([out.logits, model(ids[:, 30:], past_key_values=out.past_key_values).logits], 1)
    assert float((got - expected).abs().max() / expected.abs().max()) < bound


def test_beams_copy_the_blocks_of_every_group() -> None:
    model, own, ids = tiny_model("gemma4_text"), tiny_model("gemma4_text"), tiny_ids(1, 20)
    torch_armllm.patch(model, None, progress=False)
    settings = {"num_beams": 3, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **settings), own.generate(ids, **settings))


def test_growing_a_cache_keeps_every_group() -> None:
    wide, narrow = (CacheShape(2, heads, 4, 8, torch.float32, 16) for heads in (3, 1))
    pool = BlockPool(MixedShape((wide, narrow), ((0, 0), (1, 0), (0, 1), (1, 1))), blocks=1)
    (first,) = pool.allocate(1)
    for layer in range(4):
        pool.layer(layer).k[first] = layer + 1.0
    pool.allocate(3)
    assert isinstance(pool.cache, MixedCache)
    for layer, heads in enumerate((3, 1, 3, 1)):
        keys = pool.layer(layer).k
        assert keys.shape[:2] == (len(pool), heads) and bool((keys[first] == layer + 1.0).all())
