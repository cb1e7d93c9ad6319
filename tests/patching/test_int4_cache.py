"""Models whose keys and values are INT4: near the model, with the same bits in any batch."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import pytest
import torch

import torch_armllm
from tests.support.exact_outputs import exact_outputs, prompt, small_engine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.patching import build_plan
from torch_armllm.patching.patched_model import servable_model
from torch_armllm.patching.state import patched_forward

FAMILIES = ("llama", "gemma3_text", "qwen3_moe")
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, ignore_eos=True)


def made(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return tiny_model(family, dtype, head_dim=64)


@functools.cache
def served(family: str) -> Any:
    model = made(family, torch.bfloat16)
    report = torch_armllm.patch(model, kv_cache_dtype="int4", progress=False)
    assert report.captured and not report.notes, report
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_the_models(family: str) -> None:
    model, ids = made(family), tiny_ids(1, 60)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch_armllm.patch(model, None, progress=False, kv_cache_dtype="int4").captured
        out = model(ids[:, :29], use_cache=True)
        cache = out.past_key_values
        parts = [out.logits, *(model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(29, 35))]
        with warnings.catch_warnings(action="ignore"):  # runs module by module, on the same cache
            parts.append(model(ids[:, 35:], past_key_values=cache, output_hidden_states=True).logits)
    error = (torch.cat(parts, 1) - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.25


def test_bytes_are_a_quarter_and_the_factors() -> None:
    forward = patched_forward(served("llama"))
    assert forward is not None
    shape = forward.shape
    elements = shape.layers * shape.kv_heads * 64 * 2  # type: ignore[union-attr]
    assert shape.bytes_per_token == elements * 19 // 32 + shape.layers * shape.kv_heads * 8  # type: ignore[union-attr]
    assert shape.tensors(3).k.nbytes * 2 + 3 * 32 * shape.layers * shape.kv_heads * 8 == (  # type: ignore[union-attr]
        3 * 32 * shape.bytes_per_token
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_the_same_alone_batched_chunked_cached_and_preempted(family: str) -> None:
    model = served(family)
    assert servable_model(model) is not None
    texts = [prompt(length, seed) for seed, length in enumerate((30, 60, 1, 90, 25))]
    usual: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128}
    alone = [exact_outputs(small_engine(model, **usual), [text], PARAMS)[0] for text in texts]
    assert exact_outputs(small_engine(model, **usual), texts, PARAMS) == alone
    chunked = small_engine(model, **usual, max_num_batched_tokens=11)
    assert exact_outputs(chunked, texts, PARAMS) == alone
    assert exact_outputs(chunked, texts, PARAMS) == alone  # from the prefix cache
    forward = patched_forward(model)
    assert forward is not None
    block = forward.shape.block_size * forward.shape.bytes_per_token
    for swap in (0, 4 * block):
        few = small_engine(
            model, **usual, kv_cache_memory=4 * block, swap_space=swap, enable_prefix_caching=False
        )
        assert exact_outputs(few, texts, PARAMS) == alone
        assert few.scheduler.preemptions > 0


def test_models_that_lose_much_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_plan, "_LARGE_INT4_ERROR", 0.01)
    report = torch_armllm.patch(made("llama"), None, kv_cache_dtype="int4", progress=False)
    (note,) = report.notes
    found = re.search(
        r"by ([0-9.]+) \(relative\), INT8 ones by ([0-9.]+); choose kv_cache_dtype=\"int8\"", note
    )
    assert found is not None and float(found[1]) > 5 * float(found[2]) > 0


def test_heads_of_other_sizes_are_refused_before_anything_is_quantized() -> None:
    model = tiny_model("llama", head_dim=48)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="48 elements cannot be INT4, only multiples of 32 .* choose int8"):
        torch_armllm.patch(model, kv_cache_dtype="int4", progress=False)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
