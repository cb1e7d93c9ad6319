"""`patch`: `generate` in its variants, calls that the plan cannot serve, the report, error messages."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import torch_armllm
from tests.support.models import tiny, token_ids
from tests.support.patched_models import fresh, patched
from torch_armllm.patching.cache.paged_cache import PagedCache


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"repetition_penalty": 1.3},
    ],
    ids=lambda o: "+".join(o) or "greedy",
)
def test_generate_equals_the_unpatched_model(options: dict[str, Any]) -> None:
    ids = token_ids(1, 12)
    settings = {"max_new_tokens": 24, "do_sample": False, **options}
    torch.manual_seed(0)
    expected = tiny("llama").generate(ids, **settings)
    torch.manual_seed(0)
    assert torch.equal(patched("llama", quantization=None).generate(ids, **settings), expected)


@pytest.mark.parametrize("kv_cache", ["int8", "bfloat16", "float16", "float32"])
def test_every_cache_dtype_matches_the_model(kv_cache: str) -> None:
    model, ids = tiny("llama"), token_ids(1, 20)
    with torch.no_grad():
        expected = model(ids).logits
        report = torch_armllm.patch(model, None, progress=False, kv_cache_dtype=kv_cache)
        assert not any("node by node" in note for note in report.notes)
        cache = model(ids[:, :9], use_cache=True).past_key_values
        assert cache.pool.cache.k.dtype == getattr(torch, kv_cache)
        parts = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(9, 14)]
        with warnings.catch_warnings(action="ignore"):  # runs module by module, on the same cache
            parts.append(model(ids[:, 14:], past_key_values=cache, output_hidden_states=True).logits)
    error = (torch.cat(parts, 1) - expected[:, 9:]).norm() / expected[:, 9:].norm()
    assert error < {"int8": 0.02, "bfloat16": 0.01, "float16": 1e-3, "float32": 1e-5}[kv_cache]


def test_unknown_cache_dtype_raises() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of int4, int8"):
        torch_armllm.patch(tiny("llama"), kv_cache_dtype="int5")


def test_generate_with_left_padding_equals_the_unpatched_model() -> None:
    ids, mask = token_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    ids[0, :4], mask[0, :4] = 0, 0
    settings = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    expected = tiny("mixtral").generate(ids, **settings)
    assert torch.equal(patched("mixtral", quantization=None).generate(ids, **settings), expected)
    model = patched("mixtral")
    both = model.generate(ids, **settings)
    alone = model.generate(ids[:1, 4:], max_new_tokens=20, do_sample=False)
    assert torch.equal(both[0, 4 : 4 + alone.shape[1]], alone[0])


@pytest.mark.parametrize("given", ["caller's cache", "returned cache"])
def test_cache_is_reused_across_calls(given: str) -> None:
    first, second = token_ids(1, 10), token_ids(1, 7, seed=5)

    def talk(model: Any) -> tuple[Tensor, int]:
        cache = DynamicCache() if given == "caller's cache" else None
        settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
        out = model.generate(first, past_key_values=cache, **settings)
        cache = cache if cache is not None else out.past_key_values
        turn = torch.cat([out.sequences, second], 1)
        return model.generate(turn, past_key_values=cache, **settings).sequences, cache.get_seq_length()

    expected, length = talk(tiny("llama"))
    got, got_length = talk(patched("llama", quantization=None))
    assert torch.equal(got, expected) and got_length == length


def test_referenced_cache_keeps_its_memory() -> None:
    model, ids = fresh("llama"), token_ids(1, 20)
    with torch.no_grad():
        held = model(ids, use_cache=True).past_key_values
        first = held.pool.cache.k.data_ptr()
        for _ in range(3):
            passing = model(token_ids(1, 30, seed=4), use_cache=True).past_key_values
            assert passing.pool is not held.pool
            spare = passing.pool
            del passing
        assert model(ids, use_cache=True).past_key_values.pool is spare
        assert held.pool.cache.k.data_ptr() == first
        again = model(ids[:, :1], past_key_values=held).logits
        longer = torch.cat([ids, ids[:, :1]], 1)
        assert torch.equal(again[:, -1], model(longer).logits[:, -1])


def test_filled_dynamic_cache_is_converted() -> None:
    ids = token_ids(1, 20)
    plain, model = tiny("qwen3"), patched("qwen3", quantization=None)
    cache = DynamicCache()
    with torch.no_grad():
        plain(ids[:, :12], past_key_values=cache, use_cache=True)
        got = model(ids[:, 12:], past_key_values=cache).logits
        torch.testing.assert_close(got, plain(ids).logits[:, 12:], atol=1e-4, rtol=1e-4)
    assert isinstance(cache, PagedCache) and cache.get_seq_length() == 20


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_calls_unsupported_by_the_plan_run_by_module(family: str) -> None:
    ids = token_ids(2, 9)
    plain, model = tiny(family), fresh(family, quantization=None)
    embeds = plain.get_input_embeddings()(ids)
    calls: list[dict[str, Any]] = [
        {"input_ids": ids, "output_hidden_states": True},
        {"input_ids": ids, "output_attentions": True},
        {"inputs_embeds": embeds},
    ]
    for model_ in (plain, model):
        model_.set_attn_implementation("eager")
    for arguments in calls:
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            expected = plain(**arguments)
            got = [model(**arguments) for _ in range(2)][-1]
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-4)
        assert (got.hidden_states is None) == (expected.hidden_states is None)
        assert (got.attentions is None) == (expected.attentions is None)
        assert sum("torch_armllm" in str(w.message) for w in caught) == 1


def test_quantized_modules_run_calls_unsupported_by_the_plan() -> None:
    ids = token_ids(1, 9)
    model = fresh("mixtral")
    with torch.no_grad():
        fast = model(ids).logits
        with pytest.warns(UserWarning, match="output_hidden_states"):
            slow = model(ids, output_hidden_states=True).logits
    torch.testing.assert_close(slow, fast, atol=2e-3, rtol=2e-3)


def test_modules_continue_from_a_paged_cache() -> None:
    ids = token_ids(1, 15)
    plain, model = tiny("llama"), patched("llama", quantization=None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = model(ids[:, :8], use_cache=True).past_key_values
        middle = model(ids[:, 8:11], past_key_values=cache, output_hidden_states=True).logits
        end = model(ids[:, 11:], past_key_values=cache).logits
        expected = plain(ids).logits[:, 8:]
    torch.testing.assert_close(torch.cat([middle, end], 1), expected, atol=1e-4, rtol=1e-4)


def test_labels_return_the_models_loss() -> None:
    ids = token_ids(2, 9)
    with torch.no_grad():
        expected = tiny("llama")(ids, labels=ids).loss
        torch.testing.assert_close(patched("llama", quantization=None)(ids, labels=ids).loss, expected)


def test_unquantized_gradients_still_flow_with_labels() -> None:
    ids = token_ids(1, 9)
    model = fresh("llama", quantization=None)
    with pytest.warns(UserWarning, match="gradients"):
        model(ids, labels=ids).loss.backward()
    assert model.base_model.layers[0].mlp.down_proj.weight.grad is not None


def test_unpatch_restores_the_model() -> None:
    ids = token_ids(1, 9)
    for options in ({"quantization": None}, {"keep_original": True}):
        model = tiny("mixtral")
        with torch.no_grad():
            expected = model(ids).logits
            torch_armllm.patch(model, progress=False, **options)
            assert torch_armllm.is_patched(model)
            assert torch_armllm.unpatch(model) == [] and not torch_armllm.is_patched(model)
            assert torch.equal(model(ids).logits, expected)
    with pytest.raises(ValueError, match="not patched"):
        torch_armllm.unpatch(model)


def test_unpatch_without_originals_keeps_rounded_weights() -> None:
    ids = token_ids(1, 9)
    model = fresh("llama")
    with torch.no_grad():
        quantized = model(ids).logits
        rounded = torch_armllm.unpatch(model)
        assert len(rounded) == 15 and type(model.lm_head) is torch.nn.Linear
        difference = (model(ids).logits - quantized).norm() / quantized.norm()
    assert difference < 0.05  # same weights, but activations are no longer quantized
    torch_armllm.patch(model, progress=False)


def test_report_lists_ops_layers_and_sizes() -> None:
    model = tiny("mixtral")
    report = torch_armllm.patch(model, progress=False)
    assert report.captured and report.capture_reason is None and not report.notes
    assert (
        report.ops["int4_moe"] == 2 and report.ops["paged_attention"] == 2 and report.ops["add_rms_norm"] == 4
    )
    kinds = {layer.kind for layer in report.quantized}
    assert kinds == {"linear", "experts", "head"} and {layer.kind for layer in report.left} == {"router"}
    assert report.bytes_after < 0.4 * report.bytes_before
    assert "int4_moe" in str(report) and report.to_dict()["share"] == report.share > 0.95


def test_invalid_calls_raise() -> None:
    model = patched("llama")
    with pytest.raises(ValueError, match="patched already.*unpatch"):
        torch_armllm.patch(model)
    with pytest.raises(ValueError, match="training mode.*eval"):
        torch_armllm.patch(tiny("llama").train())
    with pytest.raises(ValueError, match="transformers model.*Linear"):
        torch_armllm.patch(torch.nn.Linear(2, 2))
    foreign = tiny("llama")
    foreign.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(ValueError, match="awq"):
        torch_armllm.patch(foreign)
    with pytest.raises(ValueError, match="int9"):
        torch_armllm.patch(tiny("llama"), "int9")
    with pytest.raises(IndexError, match="0 … 96"):
        model(torch.tensor([[97]]))


def test_batch_size_that_differs_from_the_cache_raises() -> None:
    model = patched("llama")
    cache = model(token_ids(2, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="2 sequences.*batch has 3"):
        model(token_ids(3, 1), past_key_values=cache)
