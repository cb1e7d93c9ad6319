"""Attention to selected blocks of tokens in whole models, compared with transformers' own forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_armllm
from tests.support.sparse_models import BLOCKS, SPAN, check_chunks_and_batches, own_logits, sparse_model
from torch_armllm.model_survey.tiny_models import tiny_ids
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.state import patched_forward

DENSE_LAYERS = {"mlp_layer_types": ["dense"] * 3}
ONE_LAYER = {
    "num_hidden_layers": 1,
    "layer_types": ["minimax_m3_sparse"],
    "mlp_layer_types": ["dense"],
}
"""For what a layer that selects blocks shows alone."""


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")  # no call runs module by module
        yield


def patched(quantization: str | None = None, **overrides: Any) -> tuple[Any, Any]:
    model = sparse_model(BLOCKS, **overrides)
    report = torch_armllm.patch(model, quantization, progress=False)
    assert report.captured, report.capture_reason
    return model, report


def test_long_sequences_equal_transformers() -> None:
    ids, mask = tiny_ids(2, 200), torch.ones(2, 200, dtype=torch.long)
    mask[1, :19] = 0
    expected, alone = own_logits(sparse_model(BLOCKS), ids), own_logits(sparse_model(BLOCKS), ids[1:, 19:])
    model, report = patched()
    found = {name: report.ops[name] for name in ("block_attention", "paged_attention", "kv_write", "rope_")}
    assert found == {"block_attention": 2, "paged_attention": 1, "kv_write": 3, "rope_": 5}
    assert report.ops["select_blocks"] == report.ops["mla_write"] == 2
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[1, 19:], alone[0], rtol=1e-4, atol=1e-4)
    past, parts = None, []
    for part in ids.split([2 * SPAN - 1, 1, 1, 30, 1, 1, 101, 2], 1):
        out = model(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        parts.append(out.logits)
    assert isinstance(past, PagedCache)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"index_topk_blocks": 3, "index_local_blocks": 0, "index_n_heads": 1},
        {"index_topk_blocks": 3, "index_local_blocks": 2, "num_key_value_heads": 4, "index_n_heads": 4},
        {"index_block_size": 64, "index_topk_blocks": 1, "num_key_value_heads": 1, "index_n_heads": 1},
    ],
    ids=str,
)
def test_other_sizes_equal_transformers(options: dict[str, int]) -> None:
    ids = tiny_ids(1, 140)
    expected = own_logits(sparse_model(BLOCKS, **ONE_LAYER, **options), ids)
    model, report = patched(**ONE_LAYER, **options)
    assert report.ops["block_attention"] == 1
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_blocks_that_the_cache_does_not_have_are_attended_to_up_to_their_number() -> None:
    _, report = patched(**ONE_LAYER, index_block_size=48)
    assert "block_attention" not in report.ops
    assert any("texts of more than 96 tokens run module by module" in note for note in report.notes)


def test_quantized_step_runs_as_a_native_plan() -> None:
    model, report = patched("int4")
    assert not report.notes
    forward = patched_forward(model)
    assert forward is not None
    assert forward.calls.max_length is None
    assert report.kv_bytes == (3 * 2 * 2 * 16 + 2 * 24) * 4


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_chunks_and_batches_are_bit_equal_to_one_prompt(quantization: str | None) -> None:
    # float experts run by torch, whose summation order depends on the batch
    model, _ = patched(quantization, **({} if quantization else DENSE_LAYERS))
    check_chunks_and_batches(model, tiny_ids(2, 150), [63, 1, 1, 16, 67, 1, 1], padding=26)


def test_short_sequences_have_the_bits_of_dense_attention() -> None:
    ids = tiny_ids(2, 2 * SPAN)
    sparse, _ = patched(**DENSE_LAYERS)
    dense, _ = patched(**DENSE_LAYERS, index_topk_blocks=300)
    assert torch.equal(sparse(ids).logits, dense(ids).logits)
    longer = tiny_ids(2, 2 * SPAN + 30)
    assert not torch.allclose(sparse(longer).logits, dense(longer).logits, atol=1e-2)


def test_beams_share_index_keys_and_prompts_are_reused() -> None:
    settings = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = tiny_ids(1, 90)
    model, _ = patched(**DENSE_LAYERS)
    assert model.generate(ids, **settings).shape == (1, 98)
    prefix = model.model(ids, use_cache=True).past_key_values
    longer = torch.cat([ids, tiny_ids(1, 9, seed=5)], 1)
    whole = model.model(longer).last_hidden_state
    prefix.batch_repeat_interleave(2)
    for _ in range(2):
        behind = model.model(longer[:, 90:].expand(2, -1), past_key_values=prefix).last_hidden_state
        assert torch.equal(behind[0], whole[0, 90:]) and torch.equal(behind[1], whole[0, 90:])
        prefix.crop(-9)


def test_modules_recompute_what_the_plan_cached() -> None:
    ids = tiny_ids(1, 120)
    expected = own_logits(sparse_model(BLOCKS), ids)
    model, _ = patched()
    past = model(ids[:, :80], use_cache=True).past_key_values
    with pytest.warns(UserWarning, match="output_hidden_states is requested"):
        last = own_logits(model, ids[:, 80:], past_key_values=past, output_hidden_states=True)
    torch.testing.assert_close(last, expected[:, 80:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "tolerance", "size"), [("float16", 2e-2, 2), ("bfloat16", 1e-1, 2), ("int8", 1e-1, 1)]
)
def test_caches_of_each_dtype(name: str, tolerance: float, size: int) -> None:
    ids = tiny_ids(1, 150)
    expected = own_logits(sparse_model(BLOCKS), ids)
    model = sparse_model(BLOCKS)
    report = torch_armllm.patch(model, None, progress=False, kv_cache_dtype=name)
    scales, index = (2 * 4, 4) if size == 1 else (0, size)
    assert report.kv_bytes == 3 * 2 * (2 * 16 * size + scales) + 2 * 24 * index
    # rounded keys select other blocks here and there
    differences = (model(ids).logits - expected).abs().amax(-1) / expected.abs().max()
    assert float(differences.median()) < tolerance
