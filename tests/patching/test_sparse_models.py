"""Attention to selected tokens in whole models, compared with transformers' own forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_armllm
from tests.support.sparse_models import FAMILIES, TOP_K, check_chunks_and_batches, own_logits, sparse_model
from torch_armllm.model_survey.tiny_models import tiny_ids
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.state import patched_forward

COUNTS = {"glm_moe_dsa": (4, 2), "dots3_note_text": (2, 1)}
"""Layers and indexers; all other families have two of each."""
DENSE_LAYERS = {"mlp_layer_types": ["dense"] * 2}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")  # no call runs module by module
        yield


def patched(family: str, quantization: str | None = None, **overrides: Any) -> tuple[Any, Any]:
    model = sparse_model(family, **overrides)
    report = torch_armllm.patch(model, quantization, progress=False)
    assert report.captured, report.capture_reason
    return model, report


@pytest.mark.parametrize("family", FAMILIES)
def test_long_sequences_equal_transformers(family: str) -> None:
    ids, mask = tiny_ids(2, 75), torch.ones(2, 75, dtype=torch.long)
    mask[1, :19] = 0
    expected, alone = own_logits(sparse_model(family), ids), own_logits(sparse_model(family), ids[1:, 19:])
    model, report = patched(family)
    layers, indexers = COUNTS.get(family, (2, 2))
    found = {name: report.ops[name] for name in ("mla_attention", "mla_write", "rope_", "select_tokens")}
    assert found == {
        "mla_attention": layers,
        "mla_write": layers + indexers,
        "rope_": layers + indexers,
        "select_tokens": indexers,
    }
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[1, 19:], alone[0], rtol=1e-4, atol=1e-4)
    past, parts = None, []
    for part in ids.split([TOP_K - 1, 1, 1, 30, 1, 25, 2], 1):
        out = model(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        parts.append(out.logits)
    assert isinstance(past, PagedCache)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"index_topk": 1}, {"index_n_heads": 1}, {"index_head_dim": 16}])
def test_other_sizes_equal_transformers(options: dict[str, int]) -> None:
    ids = tiny_ids(1, 50)
    expected = own_logits(sparse_model("deepseek_v32", **options), ids)
    model, _ = patched("deepseek_v32", **options)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_step_runs_as_a_native_plan(family: str) -> None:
    model, report = patched(family, "int4")
    assert not report.notes
    forward = patched_forward(model)
    assert forward is not None
    assert forward.calls.max_length is None
    layers, indexers = COUNTS.get(family, (2, 2))
    latents = 32 + 16 + 48 + 8 if family == "dots3_note_text" else layers * (32 + 16)
    assert report.kv_bytes == (latents + indexers * 24) * 4
    if family == "dots3_note_text":
        assert report.kv_bytes_expanded == (4 * (16 + 16 + 16) + 6 * (12 + 8 + 24)) * 4


@pytest.mark.parametrize(
    ("family", "quantization"), [("deepseek_v32", None), *((f, "int4") for f in FAMILIES)]
)
def test_chunks_and_batches_are_bit_equal_to_one_prompt(family: str, quantization: str | None) -> None:
    # float experts run by torch, whose summation order depends on the batch
    model, _ = patched(family, quantization, **({} if quantization else DENSE_LAYERS))
    check_chunks_and_batches(model, tiny_ids(2, 70), [15, 1, 1, 16, 35, 1, 1], padding=26)


def test_short_sequences_have_the_bits_of_dense_attention() -> None:
    ids = tiny_ids(2, TOP_K)
    sparse, _ = patched("deepseek_v32", **DENSE_LAYERS)
    dense, _ = patched("deepseek_v32", **DENSE_LAYERS, index_topk=300)
    assert torch.equal(sparse(ids).logits, dense(ids).logits)
    longer = tiny_ids(2, TOP_K + 30)
    assert not torch.allclose(sparse(longer).logits, dense(longer).logits, atol=1e-2)


def test_beams_share_index_keys_and_prompts_are_reused() -> None:
    settings = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = tiny_ids(1, 40)
    model, _ = patched("deepseek_v32", **DENSE_LAYERS)
    assert model.generate(ids, **settings).shape == (1, 48)
    prefix = model.model(ids, use_cache=True).past_key_values
    longer = torch.cat([ids, tiny_ids(1, 9, seed=5)], 1)
    whole = model.model(longer).last_hidden_state
    prefix.batch_repeat_interleave(2)
    for _ in range(2):
        behind = model.model(longer[:, 40:].expand(2, -1), past_key_values=prefix).last_hidden_state
        assert torch.equal(behind[0], whole[0, 40:]) and torch.equal(behind[1], whole[0, 40:])
        prefix.crop(-9)


def test_modules_recompute_what_the_plan_cached() -> None:
    ids = tiny_ids(1, 50)
    expected = own_logits(sparse_model("deepseek_v32"), ids)
    model, _ = patched("deepseek_v32")
    past = model(ids[:, :30], use_cache=True).past_key_values
    with pytest.warns(UserWarning, match="output_hidden_states is requested"):
        last = own_logits(model, ids[:, 30:], past_key_values=past, output_hidden_states=True)
    torch.testing.assert_close(last, expected[:, 30:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "tolerance"), [("float16", 2e-2), ("bfloat16", 1e-1)])
def test_caches_of_each_dtype(name: str, tolerance: float) -> None:
    ids = tiny_ids(1, 50)
    expected = own_logits(sparse_model("deepseek_v32"), ids)
    model = sparse_model("deepseek_v32")
    report = torch_armllm.patch(model, None, progress=False, kv_cache_dtype=name)
    assert report.kv_bytes == 2 * (32 + 16 + 24) * 2
    # rounded keys select other tokens here and there
    differences = (model(ids).logits - expected).abs().amax(-1) / expected.abs().max()
    assert float(differences.median()) < tolerance


def test_int8_latents_stand_beside_index_keys_of_floats() -> None:
    ids = tiny_ids(1, 50)
    expected = own_logits(sparse_model("deepseek_v32", **DENSE_LAYERS), ids)
    model = sparse_model("deepseek_v32", **DENSE_LAYERS)
    report = torch_armllm.patch(model, None, progress=False, kv_cache_dtype="int8")
    assert not report.notes
    assert report.kv_bytes == 2 * (32 + 16 + 8) + 2 * 24 * 4
    differences = (model(ids).logits - expected).abs().amax(-1) / expected.abs().max()
    assert float(differences.median()) < 5e-2
