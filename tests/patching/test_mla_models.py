"""Absorbed latent attention in whole models, compared with transformers' own forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_armllm
from tests.support.models import LATENT, tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.capture.export import capture
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.passes import run_passes
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.quant.report import Report


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def patched(family: str, quantize: str | None = None, **overrides: Any) -> tuple[Any, Report]:
    model = tiny(family, **overrides)
    return model, torch_armllm.patch(model, quantize, progress=False)


def hidden(model: Any, ids: Tensor, past: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
    """Returns the last hidden states and the cache."""
    out = model.model(ids, past_key_values=past, attention_mask=mask, use_cache=True)
    return out.last_hidden_state, out.past_key_values


@pytest.mark.parametrize("family", LATENT)
def test_absorbed_attention_equals_transformers(family: str) -> None:
    model = tiny(family)
    ids = token_ids(2, 45)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    expected, padded = model(ids).logits, model(ids, attention_mask=mask).logits
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured, report.capture_reason
    assert (report.ops["mla_attention"], report.ops["mla_write"], report.ops["rope_"]) == (2, 2, 2)
    assert "paged_attention" not in report.ops and "expand_kv" not in report.ops
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], padded[mask.bool()], rtol=1e-4, atol=1e-4)
    past = model(ids[:, :33], use_cache=True).past_key_values
    steps = [model(ids[:, i : i + 1], past_key_values=past).logits for i in range(33, 45)]
    torch.testing.assert_close(torch.cat(steps, 1), expected[:, 33:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "quantize"),
    [("deepseek_v2", None), ("youtu", None), ("deepseek_v2", "int4"), ("deepseek_v3", "int4")],
)
def test_chunks_and_batches_are_bit_equal_to_one_prompt(family: str, quantize: str | None) -> None:
    # float experts run by torch, whose summation order depends on the batch
    dense = {} if quantize or family == "youtu" else {"first_k_dense_replace": 2}
    model, _ = patched(family, quantize, **dense)
    ids = token_ids(2, 70)
    together, _ = hidden(model, ids)
    past, chunks = None, []
    for begin, end in ((0, 31), (31, 32), (32, 33), (33, 68), (68, 69), (69, 70)):
        states, past = hidden(model, ids[:, begin:end], past)
        chunks.append(states)
    assert torch.equal(torch.cat(chunks, 1), together)
    mask = torch.ones_like(ids)
    mask[0, :26] = 0
    mixed, _ = hidden(model, ids, mask=mask)
    assert torch.equal(mixed[1], together[1])
    alone = model.model(ids[:1, 26:], position_ids=torch.arange(26, 70)[None]).last_hidden_state
    assert torch.equal(mixed[0, 26:], alone[0])


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_quantized_plan_agrees_with_its_modules(family: str) -> None:
    model, report = patched(family, "int4")
    assert not report.notes  # a step runs as a native plan
    layers = {layer.name: layer for layer in report.layers}
    up = layers["model.layers.0.self_attn.kv_b_proj"]
    assert (up.kind, up.scheme) == ("latent", "int8")
    assert report.ops["int8_heads_linear"] == 4
    ids = token_ids(1, 40)
    by_plan, _ = hidden(model, ids)
    forward: Any = model.model.forward
    with forward.by_modules("to compare"):
        by_modules, _ = hidden(model, ids)
    # The plan rounds queries and results to INT8, the modules latents.
    assert (by_plan - by_modules).norm() < 0.05 * by_modules.norm()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_plan_and_modules_share_one_cache(family: str) -> None:
    model = tiny(family)
    ids = token_ids(2, 40)
    expected = model(ids).logits
    own = model(ids[:, :20], use_cache=True).past_key_values
    torch_armllm.patch(model, None, progress=False)
    # the plan continues from a cache of the modules, and the modules from a cache of the plan
    states = [model(ids[:, 20:30], past_key_values=own).logits]
    assert isinstance(own, PagedCache)
    states.append(model(ids[:, 30:35], past_key_values=own, output_hidden_states=True).logits)
    states.append(model(ids[:, 35:], past_key_values=own).logits)
    torch.testing.assert_close(torch.cat(states, 1), expected[:, 20:], rtol=1e-4, atol=1e-4)


def test_beams_share_latents_and_prompts_are_reused() -> None:
    model = tiny("deepseek_v3", first_k_dense_replace=2)
    ids = token_ids(1, 20)
    settings = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **settings)
    torch_armllm.patch(model, None, progress=False)
    assert torch.equal(model.generate(ids, **settings), expected)
    _, prefix = hidden(model, ids)
    longer = torch.cat([ids, token_ids(1, 9, seed=5)], 1)
    whole, _ = hidden(model, longer)
    prefix.batch_repeat_interleave(2)
    behind, _ = hidden(model, longer[:, 20:].expand(2, -1), prefix)
    prefix.crop(-9)
    again, _ = hidden(model, longer[:, 20:].expand(2, -1), prefix)
    for states in (behind, again):
        assert torch.equal(states[0], whole[0, 20:])
        assert torch.equal(states[1], whole[0, 20:])


@pytest.mark.parametrize(("name", "tolerance"), [("float32", 1e-4), ("float16", 5e-3), ("bfloat16", 5e-2)])
def test_caches_of_each_dtype(name: str, tolerance: float) -> None:
    model = tiny("deepseek_v3")
    ids = token_ids(1, 40)
    expected = model(ids).logits
    report = torch_armllm.patch(model, None, progress=False, kv_cache_dtype=name)
    size = getattr(torch, name).itemsize
    assert report.kv_bytes == 2 * (32 + 16) * size
    assert report.kv_bytes_expanded == 2 * 4 * (24 + 16 + 20) * size
    assert f"KV cache       {report.kv_bytes} bytes a token as latents" in str(report)
    torch.testing.assert_close(model(ids).logits, expected, rtol=tolerance, atol=tolerance)
    past = model(ids[:, :30], use_cache=True).past_key_values
    found = model(ids[:, 30:], past_key_values=past).logits
    torch.testing.assert_close(found, expected[:, 30:], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_int8_latents(family: str) -> None:
    model = tiny(family)
    ids = token_ids(2, 45)
    expected = model(ids).logits
    report = torch_armllm.patch(model, None, progress=False, kv_cache_dtype="int8")
    assert report.captured, report.capture_reason
    assert report.kv_bytes == 2 * (32 + 16 + 8)
    assert f"KV cache       {report.kv_bytes} bytes a token as latents" in str(report)
    found = model(ids).logits
    assert (found - expected).norm() < 2e-2 * expected.norm()
    past = model(ids[:, :30], use_cache=True).past_key_values
    rest = [
        model(ids[:, 30:33], past_key_values=past).logits,
        model(ids[:, 33:], past_key_values=past).logits,
    ]
    torch.testing.assert_close(torch.cat(rest, 1), found[:, 30:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_chunks_and_batches_on_int8_latents_are_bit_equal_to_one_prompt(quantize: str | None) -> None:
    model = tiny("deepseek_v3", first_k_dense_replace=2)
    report = torch_armllm.patch(model, quantize, progress=False, kv_cache_dtype="int8")
    assert not report.notes
    ids = token_ids(2, 70)
    together, _ = hidden(model, ids)
    past, chunks = None, []
    for begin, end in ((0, 31), (31, 32), (32, 68), (68, 70)):
        states, past = hidden(model, ids[:, begin:end], past)
        chunks.append(states)
    assert torch.equal(torch.cat(chunks, 1), together)
    assert torch.equal(hidden(model, ids[1:])[0][0], together[1])


def test_modules_continue_from_int8_latents() -> None:
    model = tiny("deepseek_v3")
    ids = token_ids(2, 40)
    expected = model(ids).logits
    torch_armllm.patch(model, None, progress=False, kv_cache_dtype="int8")
    past = model(ids[:, :30], use_cache=True).past_key_values
    modules = model(ids[:, 30:35], past_key_values=past, output_hidden_states=True).logits
    found = torch.cat([modules, model(ids[:, 35:], past_key_values=past).logits], 1)
    assert (found - expected[:, 30:]).norm() < 2e-2 * expected[:, 30:].norm()


def test_int4_latents_raise_and_leave_the_model_unchanged() -> None:
    model = tiny("deepseek_v2")
    with pytest.raises(ValueError, match="caches latents, which are not stored as int4; .* or to int8"):
        torch_armllm.patch(model, progress=False, kv_cache_dtype="int4")
    assert not torch_armllm.is_patched(model)
    assert type(model.model.layers[0].self_attn.kv_b_proj) is torch.nn.Linear


def test_bfloat16_model() -> None:
    model = tiny("deepseek_v3", torch.bfloat16)
    ids = token_ids(2, 33)
    expected = model.float()(ids).logits
    model.bfloat16()
    report = torch_armllm.patch(model, None, progress=False)
    assert report.ops["rope_"] == 2
    assert (model(ids).logits.float() - expected).norm() < 0.05 * expected.norm()


def test_without_query_compression_and_with_yarn() -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    }
    for family in ("deepseek_v2", "deepseek_v3"):
        model = tiny(family, q_lora_rank=None, rope_parameters=yarn)
        ids = token_ids(1, 90)
        expected = model(ids).logits
        report = torch_armllm.patch(model, None, progress=False)
        assert report.ops["mla_attention"] == 2
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_other_expansion_is_not_absorbed() -> None:
    model = tiny("deepseek_v2")
    ids = token_ids(1, 12)
    kind = type(model.model.layers[0].self_attn)
    own = kind.expand_kv

    def scaled(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = own(self, kv_nope, k_rot)
        return keys, 2 * values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "expand_kv", scaled)
        expected = model(ids).logits
        report = torch_armllm.patch(model, None, progress=False)
        assert report.capture_reason is not None
        assert "expands its latents in an unknown way" in report.capture_reason
        torch.testing.assert_close(model(ids).logits, expected)


def test_a_rotated_expansion_is_named() -> None:
    model = tiny("deepseek_v2")
    calibration = token_ids(2, 12)
    torch_armllm.quantize(model, Recipe(method="gptq"), progress=False, calibration=calibration)
    attention = model.model.layers[1].self_attn
    assert attention.q_a_proj.rotated and not attention.kv_b_proj.rotated
    attention.kv_b_proj.rotated = True
    report = torch_armllm.patch(model, progress=False)
    assert report.capture_reason is not None
    assert "layers.1.self_attn.kv_b_proj is rotated" in report.capture_reason


def test_expansion_with_two_digits_is_named() -> None:
    model = tiny("deepseek_v2")
    torch_armllm.quantize(model, Recipe(importance=False), progress=False)
    model.model.layers[1].self_attn.kv_b_proj.digits = 2
    ids = token_ids(1, 12)
    expected = model(ids).logits
    report = torch_armllm.patch(model, progress=False)
    assert report.capture_reason is not None
    assert "layers.1.self_attn.kv_b_proj quantizes activations to two digits" in report.capture_reason
    torch.testing.assert_close(model(ids).logits, expected)


def test_graph_before_and_after_absorption() -> None:
    model = tiny("deepseek_v3")
    captured = capture(kind_of(model))
    ids, positions = token_ids(1, 11), torch.arange(11)[None]
    expected = model.model(ids).last_hidden_state
    torch.testing.assert_close(captured.graph_module(ids, positions), expected, rtol=1e-5, atol=1e-5)
    code = captured.graph_module.code
    assert code.count("armllm.expand_kv") == 2 and code.count("armllm.attention") == 2
    context = run_passes(captured.graph_module)
    assert context.counts["mla"] == 2
    code = captured.graph_module.code
    assert "expand_kv" not in code and "armllm.attention" not in code
    # rotated in place: queries and keys are not copied
    assert "cat" not in code.split("return")[0].replace("concat", "")
    assert "expand_kv" not in model.model.layers[0].self_attn.__dict__
