"""Attention to compressed entries in whole models, compared with transformers' own forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

import torch_armllm
from tests.support.compressed_models import HEAVY, SPARSE, compressed_model
from tests.support.sparse_models import check_chunks_and_batches, own_logits
from torch_armllm.kv_cache.shapes import CompressedShape
from torch_armllm.model_survey.tiny_models import tiny_ids
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import NativePlan


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")  # no call runs module by module
        yield


def patched(quantization: str | None = None, **overrides: Any) -> tuple[Any, Any]:
    model = compressed_model(**overrides)
    report = torch_armllm.patch(model, quantization, progress=False)
    assert report.captured, report.capture_reason
    return model, report


def check_logits(model: Any, ids: torch.Tensor, expected: torch.Tensor, chunks: list[int]) -> None:
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    past, parts = None, []
    for part in ids.split(chunks, 1):
        out = model(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        parts.append(out.logits)
    assert isinstance(past, PagedCache)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


def test_logits_equal_transformers() -> None:
    ids, mask = tiny_ids(2, 175), torch.ones(2, 175, dtype=torch.long)
    mask[1, :19] = 0
    own = compressed_model()
    expected, alone = own_logits(own, ids), own_logits(own, ids[1:, 19:])
    model, report = patched()
    assert report.ops["entry_attention"] == 4
    assert report.ops["compress_windows"] == 5 and report.ops["select_entries"] == 2
    assert report.ops["moe_route"] == 4
    check_logits(model, ids, expected, [1, 2, 1, 35, 1, 60, 1, 1, 1, 41, 31])
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[1, 19:], alone[0], rtol=1e-4, atol=1e-4)


def random_options(seed: int) -> dict[str, Any]:
    draw = Random(seed)
    kinds = [draw.choice((SPARSE, HEAVY, "sliding_attention")) for _ in range(draw.randint(1, 2))]
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "mlp_layer_types": [draw.choice(("hash_moe", "moe")) for _ in kinds],
        "compress_rates": {SPARSE: draw.randint(1, 9), HEAVY: draw.randint(1, 40)},
        "sliding_window": draw.randint(1, 40),
        "index_topk": draw.randint(1, 20),
        "index_n_heads": draw.randint(1, 3),
        "index_head_dim": draw.choice((8, 24)),
        "head_dim": draw.choice((8, 40)),
        "partial_rotary_factor": draw.choice((0.25, 0.5, 1.0)),
        "hc_mult": draw.randint(1, 4),
        "scoring_func": draw.choice(("sqrtsoftplus", "sigmoid")),
    }


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_random_configurations_equal_transformers(seed: int) -> None:
    options, ids = random_options(seed), tiny_ids(1, 90)
    expected = own_logits(compressed_model(**options), ids)
    model, _ = patched(**options)
    chunk = seed + 1
    check_logits(model, ids, expected, [7, 1, 1, *[chunk] * (81 // chunk), *[81 % chunk][: 81 % chunk]])


def test_a_random_configuration_runs_as_a_native_plan() -> None:
    model, report = patched("int4", **random_options(0))
    forward = patched_forward(model)
    assert not report.notes and forward is not None and isinstance(forward.plan, NativePlan)
    check_chunks_and_batches(model, tiny_ids(2, 70), [15, 1, 1, 16, 35, 1, 1], padding=26)


def test_quantized_step_runs_as_a_native_plan() -> None:
    model, report = patched("int4")
    assert not report.notes
    forward = patched_forward(model)
    assert forward is not None and isinstance(forward.plan, NativePlan)
    assert isinstance(forward.shape, CompressedShape)
    # a block of 32 positions has 8 entries of 4 positions, and room for one of 40
    entries = (8 * (2 * 32 + 2 * 16) + 32) / 32
    assert report.kv_bytes == (4 * 32 + entries) * 4


def test_chunks_and_batches_are_bit_equal_to_one_prompt() -> None:
    kinds = {"layer_types": [SPARSE, HEAVY], "mlp_layer_types": ["moe", "hash_moe"], "num_hidden_layers": 2}
    model, _ = patched("int4", **kinds, o_lora_rank=32)  # the blocks of o_a_proj are whole panels
    check_chunks_and_batches(model, tiny_ids(2, 170), [15, 1, 1, 16, 35, 1, 1, 70, 30], padding=26)


def test_beams_have_entries_of_their_own() -> None:
    settings = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    model, _ = patched("int4")
    assert model.generate(tiny_ids(1, 40), **settings).shape == (1, 48)


def test_modules_recompute_what_the_plan_cached() -> None:
    ids = tiny_ids(1, 60)
    expected = own_logits(compressed_model(), ids)
    model, _ = patched()
    past = model(ids[:, :50], use_cache=True).past_key_values
    with pytest.warns(UserWarning, match="output_hidden_states is requested"):
        last = own_logits(model, ids[:, 50:], past_key_values=past, output_hidden_states=True)
    torch.testing.assert_close(last, expected[:, 50:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "tolerance"), [("float16", 2e-2), ("bfloat16", 1e-1)])
def test_caches_of_each_dtype(name: str, tolerance: float) -> None:
    ids = tiny_ids(1, 90)
    expected = own_logits(compressed_model(), ids)
    model = compressed_model()
    torch_armllm.patch(model, None, progress=False, kv_cache_dtype=name)
    # rounded entries select others here and there
    differences = (model(ids).logits - expected).abs().amax(-1) / expected.abs().max()
    assert float(differences.median()) < tolerance


def test_int8_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="not stored as int8"):
        torch_armllm.patch(compressed_model(), progress=False, kv_cache_dtype="int8")
