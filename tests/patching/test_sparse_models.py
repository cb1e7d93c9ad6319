"""Attention to selected tokens, and to selected blocks of them, compared with transformers' own forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_armllm
from tests.support.sparse_models import (
    BLOCKS,
    FAMILIES,
    SPAN,
    TOP_K,
    check_chunks_and_batches,
    own_logits,
    sparse_model,
)
from torch_armllm.model_survey.tiny_models import tiny_ids
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.state import patched_forward

TOKENS = "deepseek_v32"
COUNTS = {"glm_moe_dsa": (4, 2), "dots3_note_text": (2, 1)}
"""Layers and indexers; all other families that select tokens have two of each."""
DENSE_LAYERS: dict[str, dict[str, Any]] = {
    TOKENS: {"mlp_layer_types": ["dense"] * 2},
    BLOCKS: {"mlp_layer_types": ["dense"] * 3},
}
"""Float experts run by torch, whose summation order depends on the batch."""
ALL = {TOKENS: {"index_topk": 300}, BLOCKS: {"index_topk_blocks": 300}}
"""Settings by which a family selects everything."""
LONGEST = {TOKENS: TOP_K, BLOCKS: 2 * SPAN}
"""Tokens of texts of which everything is selected."""
ONE_LAYER: dict[str, dict[str, Any]] = {
    TOKENS: {"num_hidden_layers": 1},
    BLOCKS: {
        "num_hidden_layers": 1,
        "layer_types": ["minimax_m3_sparse"],
        "mlp_layer_types": ["dense"],
    },
}
"""For what a layer that selects shows alone."""


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


@pytest.mark.parametrize("family", [*FAMILIES, BLOCKS])
def test_long_sequences_equal_transformers(family: str) -> None:
    length, chunks = 75, [TOP_K - 1, 1, 1, 30, 1, 25, 2]
    layers, indexers = COUNTS.get(family, (2, 2))
    counts = {"mla_attention": layers, "select_tokens": indexers}
    counts |= {"mla_write": layers + indexers, "rope_": layers + indexers}
    if family == BLOCKS:
        length, chunks = 200, [2 * SPAN - 1, 1, 1, 30, 1, 1, 101, 2]
        counts = {"block_attention": 2, "paged_attention": 1, "kv_write": 3, "rope_": 5}
        counts |= {"select_blocks": 2, "mla_write": 2}
    ids, mask = tiny_ids(2, length), torch.ones(2, length, dtype=torch.long)
    mask[1, :19] = 0
    expected, alone = own_logits(sparse_model(family), ids), own_logits(sparse_model(family), ids[1:, 19:])
    model, report = patched(family)
    assert {name: report.ops[name] for name in counts} == counts
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[1, 19:], alone[0], rtol=1e-4, atol=1e-4)
    past, parts = None, []
    for part in ids.split(chunks, 1):
        out = model(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        parts.append(out.logits)
    assert isinstance(past, PagedCache)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (TOKENS, {"index_topk": 1}),
        (TOKENS, {"index_n_heads": 1}),
        (TOKENS, {"index_head_dim": 16}),
        (BLOCKS, {"index_topk_blocks": 3, "index_local_blocks": 0, "index_n_heads": 1}),
        (
            BLOCKS,
            {"index_topk_blocks": 3, "index_local_blocks": 2, "num_key_value_heads": 4, "index_n_heads": 4},
        ),
        (
            BLOCKS,
            {"index_block_size": 64, "index_topk_blocks": 1, "num_key_value_heads": 1, "index_n_heads": 1},
        ),
    ],
    ids=str,
)
def test_other_sizes_equal_transformers(family: str, options: dict[str, int]) -> None:
    ids, options = tiny_ids(1, 140 if family == BLOCKS else 50), {**ONE_LAYER[family], **options}
    expected = own_logits(sparse_model(family, **options), ids)
    model, report = patched(family, **options)
    assert report.ops["block_attention" if family == BLOCKS else "select_tokens"] == 1
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_blocks_that_the_cache_does_not_have_are_attended_to_up_to_their_number() -> None:
    _, report = patched(BLOCKS, **ONE_LAYER[BLOCKS], index_block_size=48)
    assert "block_attention" not in report.ops
    assert any("texts of more than 96 tokens run module by module" in note for note in report.notes)


@pytest.mark.parametrize("family", [*FAMILIES, BLOCKS])
def test_quantized_step_runs_as_a_native_plan(family: str) -> None:
    model, report = patched(family, "int4")
    assert not report.notes
    forward = patched_forward(model)
    assert forward is not None
    assert forward.calls.max_length is None
    layers, indexers = COUNTS.get(family, (2, 2))
    kept = {"dots3_note_text": 32 + 16 + 48 + 8, BLOCKS: 3 * 2 * 2 * 16}.get(family, layers * (32 + 16))
    assert report.kv_bytes == (kept + indexers * 24) * 4
    if family == "dots3_note_text":
        assert report.kv_bytes_expanded == (4 * (16 + 16 + 16) + 6 * (12 + 8 + 24)) * 4


@pytest.mark.parametrize(
    ("family", "quantization"),
    [(TOKENS, None), (BLOCKS, None), *((family, "int4") for family in (*FAMILIES, BLOCKS))],
)
def test_chunks_and_batches_are_bit_equal_to_one_prompt(family: str, quantization: str | None) -> None:
    model, _ = patched(family, quantization, **({} if quantization else DENSE_LAYERS[family]))
    length, chunks = 70, [15, 1, 1, 16, 35, 1, 1]
    if family == BLOCKS:
        length, chunks = 150, [63, 1, 1, 16, 67, 1, 1]
    check_chunks_and_batches(model, tiny_ids(2, length), chunks, padding=26)


@pytest.mark.parametrize("family", [TOKENS, BLOCKS])
def test_short_sequences_have_the_bits_of_dense_attention(family: str) -> None:
    ids = tiny_ids(2, LONGEST[family])
    sparse, _ = patched(family, **DENSE_LAYERS[family])
    dense, _ = patched(family, **DENSE_LAYERS[family], **ALL[family])
    assert torch.equal(sparse(ids).logits, dense(ids).logits)
    longer = tiny_ids(2, LONGEST[family] + 30)
    assert not torch.allclose(sparse(longer).logits, dense(longer).logits, atol=1e-2)


@pytest.mark.parametrize(("family", "length"), [(TOKENS, 40), (BLOCKS, 90)])
def test_beams_share_index_keys_and_prompts_are_reused(family: str, length: int) -> None:
    settings = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = tiny_ids(1, length)
    model, _ = patched(family, **DENSE_LAYERS[family])
    assert model.generate(ids, **settings).shape == (1, length + 8)
    prefix = model.model(ids, use_cache=True).past_key_values
    longer = torch.cat([ids, tiny_ids(1, 9, seed=5)], 1)
    whole = model.model(longer).last_hidden_state
    prefix.batch_repeat_interleave(2)
    for _ in range(2):
        behind = model.model(longer[:, length:].expand(2, -1), past_key_values=prefix).last_hidden_state
        assert torch.equal(behind[0], whole[0, length:]) and torch.equal(behind[1], whole[0, length:])
        prefix.crop(-9)


@pytest.mark.parametrize(("family", "begin", "end"), [(TOKENS, 30, 50), (BLOCKS, 80, 120)])
def test_modules_recompute_what_the_plan_cached(family: str, begin: int, end: int) -> None:
    ids = tiny_ids(1, end)
    expected = own_logits(sparse_model(family), ids)
    model, _ = patched(family)
    past = model(ids[:, :begin], use_cache=True).past_key_values
    with pytest.warns(UserWarning, match="output_hidden_states is requested"):
        last = own_logits(model, ids[:, begin:], past_key_values=past, output_hidden_states=True)
    torch.testing.assert_close(last, expected[:, begin:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "name", "tolerance", "kv_bytes"),
    [
        (TOKENS, "float16", 2e-2, 2 * (32 + 16 + 24) * 2),
        (TOKENS, "bfloat16", 1e-1, 2 * (32 + 16 + 24) * 2),
        (TOKENS, "int8", 5e-2, 2 * (32 + 16 + 8) + 2 * 24 * 4),  # latents; index keys stay floats
        (BLOCKS, "float16", 2e-2, 3 * 2 * (2 * 16 * 2) + 2 * 24 * 2),
        (BLOCKS, "bfloat16", 1e-1, 3 * 2 * (2 * 16 * 2) + 2 * 24 * 2),
        (BLOCKS, "int8", 1e-1, 3 * 2 * (2 * 16 + 2 * 4) + 2 * 24 * 4),
    ],
)
def test_caches_of_each_dtype(family: str, name: str, tolerance: float, kv_bytes: int) -> None:
    ids = tiny_ids(1, 150 if family == BLOCKS else 50)
    options = DENSE_LAYERS[family] if (family, name) == (TOKENS, "int8") else {}
    expected = own_logits(sparse_model(family, **options), ids)
    model = sparse_model(family, **options)
    report = torch_armllm.patch(model, None, progress=False, kv_cache_dtype=name)
    assert report.kv_bytes == kv_bytes and not (options and report.notes)
    # rounded keys select others here and there
    differences = (model(ids).logits - expected).abs().amax(-1) / expected.abs().max()
    assert float(differences.median()) < tolerance
