"""Quantizing models in place, untouched parts, and dequantization."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import FAMILIES, logits, tiny, token_ids
from tests.support.reference_modules import emulate
from torch_armllm.ops.linear import rotate_groups
from torch_armllm.quant import packing
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.layers import find_layers
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.modules.tied_embedding import TiedEmbedding
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.report import LayerRecord, Report
from torch_armllm.quant.restore import restore
from torch_armllm.quant.spill_file import SpillFile


def run(model: nn.Module, quantization: str | Recipe = "int4", **options: bool) -> list[LayerRecord]:
    return quantize(model, quantization, progress=False, **options)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@cache
def quantized(family: str) -> tuple[Any, list[LayerRecord]]:
    """A quantized model, which is not to be changed, and its records."""
    model = tiny(family)
    return model, run(model)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_and_expert_is_quantized(family: str) -> None:
    original = tiny(family)
    weights = [p for name, p in original.named_parameters() if p.dim() >= 2 and not name.endswith("bias")]
    before = sum(p.numel() for p in weights)
    embeddings = sum(m.weight.numel() for m in original.modules() if isinstance(m, nn.Embedding))
    model, records = quantized(family)
    assert sum(r.parameters for r in records) == before - embeddings
    assert {r.kind for r in records if not r.quantized} <= {"router"}
    assert all(0.005 < (r.error or 0) < (0.01 if r.kind == "head" else 0.1) for r in records if r.quantized)
    head = next(r for r in records if r.kind == "head")
    assert (head.op, head.scheme) == ("int8_linear", "int8")
    assert not any(type(m) is nn.Linear for m in model.modules())
    assert any(isinstance(m, QuantExperts) for m in model.modules()) == any(
        r.kind == "experts" for r in records
    )


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_model_matches_its_emulation(family: str) -> None:
    model, _ = quantized(family)
    assert distance(logits(model), logits(emulate(model))) < 2e-3


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "tolerance"), [("row", 1e-5), ("int3", 1e-5), ("g32", 2e-2)])
@pytest.mark.parametrize("tokens", [3, 40])
def test_quantized_layers_match_their_emulation_in_other_schemes(
    scheme: str, tolerance: float, tokens: int
) -> None:
    # Layer by layer: in a whole model, a rounding error that changes a router's choice changes everything.
    # For long inputs g32's float scales are folded into the integers: results are close, not equal.
    model = tiny("gpt_oss")
    run(model, scheme)
    twin = emulate(model)
    rows = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(2 * tokens).reshape(tokens, 2) % 4
    weights = torch.full((tokens, 2), 0.5)
    for ours, theirs in zip(model.model.layers, twin.model.layers, strict=True):
        assert distance(ours.self_attn.q_proj(rows), theirs.self_attn.q_proj(rows)) < tolerance
        got = ours.mlp.experts(rows, ids, weights)
        assert distance(got, theirs.mlp.experts(rows, ids, weights)) < tolerance


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_restore_returns_dequantized_weights(family: str) -> None:
    original, (model, records) = tiny(family), copy.deepcopy(quantized(family))
    assert sorted(restore(model)) == sorted(r.name for r in records if r.quantized)
    assert repr(model) == repr(original)
    for (name, a), (_, b) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        assert a.dtype == b.dtype
        assert distance(a, b) < 0.1, name
    assert logits(model).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_restore_returns_kept_originals_bitwise(family: str) -> None:
    model, ids = tiny(family), token_ids(1, 7)
    expected = model(ids).logits
    run(model, keep_original=True)
    assert restore(model) == []
    assert torch.equal(model(ids).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize(("head", "steps"), [("int8", 2**-16), ("int6", 2**-14)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tied_embeddings_share_the_packed_head(dtype: torch.dtype, head: str, steps: float) -> None:
    model, ids = tiny("llama", dtype, tie_word_embeddings=True), token_ids(1, 40)
    before = model.get_input_embeddings().weight.clone()
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    run(model, Recipe(head=head))
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, TiedEmbedding)
    assert embeddings.weight_packed is model.get_output_embeddings().weight_packed
    assert sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values()) < size
    assert embeddings.rotated == (head == "int8")
    packed = rotate_groups(before) if embeddings.rotated else before.float()
    bound = packed.abs().amax(1, keepdim=True) * (1.1 * steps) + before.float().abs() * 2**-9
    assert bool(((embeddings(ids).float() - before[ids].float()).abs() <= bound[ids]).all())
    model(ids)
    rounded = restore(model)
    assert "model.embed_tokens" in rounded
    assert "lm_head" not in rounded
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    torch.testing.assert_close(model.get_input_embeddings().weight, before, atol=2 * steps, rtol=2**-8)


@torch.no_grad()
def test_layers_are_packed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny("llama", torch.bfloat16, tie_word_embeddings=True)
    cut = copy.deepcopy(whole)
    expected = run(whole)
    largest = 0
    put = SpillFile._put

    def watched(spill: SpillFile, rows: torch.Tensor) -> object:
        nonlocal largest
        largest = max(largest, rows.nbytes)
        return put(spill, rows)

    monkeypatch.setattr(packing, "_PIECE", 32 * 64)
    monkeypatch.setattr(SpillFile, "_put", watched)
    found = run(cut)
    assert largest < 32 * 64 + 32 * 8  # rows of INT8 and their scales
    assert [replace(record, error=0.0) for record in found] == [replace(r, error=0.0) for r in expected]
    assert all(a.error == pytest.approx(b.error) for a, b in zip(found, expected, strict=True))
    for (name, a), (_, b) in zip(whole.named_buffers(), cut.named_buffers(), strict=True):
        assert torch.equal(a, b), name


@torch.no_grad()
def test_tied_float32_embeddings_are_unchanged() -> None:
    model, ids = tiny("llama", tie_word_embeddings=True), token_ids(1, 7)
    embeddings = model.get_input_embeddings().weight
    values = embeddings.clone()
    run(model)
    assert isinstance(model.get_output_embeddings(), QuantLinear)
    assert torch.equal(model.get_input_embeddings().weight, values)
    model(ids)
    assert "lm_head" not in restore(model)
    assert model.get_output_embeddings().weight is embeddings


def test_float_weights_are_freed_one_by_one() -> None:
    model = tiny("mixtral")
    alive = [weakref.ref(p) for p in model.parameters() if p.dim() >= 2]
    records = run(model)
    left = sum(r.parameters for r in records if not r.quantized)
    embeddings = model.get_input_embeddings().weight.numel()
    assert sum(p().numel() for p in alive if p() is not None) == left + embeddings


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe(head=None), {"lm_head"}),
        (Recipe(ignore=["*.down_proj"]), {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}),
        (Recipe(ignore=["model.layers.0.self_attn.*", "lm_head"]), {"lm_head"}),
    ],
)
def test_ignored_layers_are_unchanged(recipe: Recipe, expected: set[str]) -> None:
    model = tiny("llama")
    left = {r.name for r in run(model, recipe) if not r.quantized}
    assert expected <= left
    assert all(type(model.get_submodule(name)) is nn.Linear for name in left)


def test_routers_and_narrow_layers_are_not_quantized() -> None:
    records = run(tiny("qwen3_moe"))
    routers = [r for r in records if r.kind == "router"]
    assert len(routers) == 2
    assert all("chooses experts" in (r.reason or "") for r in routers)

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Linear(64, 1)
            self.read = nn.Linear(64, 64)
            self.plain = nn.Linear(64, 64)
            self.trained = nn.Linear(64, 64)
            self.mixer = nn.Conv1d(64, 64, 3)
            self.inner = nn.Module()
            self.inner.read, self.inner.plain = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and x.requires_grad:
                return x @ self.trained.weight
            x = x.to(self.inner.read.weight.dtype)
            return self.narrow(self.trained(self.plain(x @ self.read.weight)))

    reasons = {layer.name: layer.reason for layer in find_layers(Gate())}
    assert "narrow" in (reasons["narrow"] or "")
    assert all("without calling it" in (reasons[name] or "") for name in ("read", "inner.read"))
    assert "Conv1d" in (reasons["mixer"] or "")
    assert [reasons[name] for name in ("plain", "trained", "inner.plain")] == [None] * 3


def test_shared_layers_are_replaced_everywhere() -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    records = run(model)
    assert len(records) == 1
    assert model["a"][0] is model["b"][0]
    assert isinstance(model["a"][0], QuantLinear)


def test_experts_without_a_fused_op_are_not_quantized() -> None:
    model = tiny("mixtral", hidden_act="tanh")
    records = run(model)
    experts = [r for r in records if r.kind == "experts"]
    assert all(r.reason == "its activation has no fused op" for r in experts)
    assert model(token_ids(1, 5)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("act", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("relu", "relu")]
)
def test_activations_are_recognized_by_their_results(act: str, name: str) -> None:
    model = tiny("mixtral", hidden_act=act)
    run(model)
    assert {m.activation for m in model.modules() if isinstance(m, QuantExperts)} == {name}


def test_invalid_arguments_raise() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="'int9'"):
        run(model, "int9")
    with pytest.raises(ValueError, match=r"nothing\.\*.*fits no layer"):
        run(model, Recipe(ignore=["nothing.*"]))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj holds nan"):
        run(model)
    model = tiny("llama")
    run(model)
    with pytest.raises(ValueError, match="quantized already"):
        run(model)
    model = tiny("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match="lm_head.*float8"):
        run(model)
    model = tiny("llama").to("meta")
    with pytest.raises(ValueError, match="is on meta"):
        run(model)


def test_report_lists_layers_and_sizes() -> None:
    model = tiny("mixtral")
    report = Report(run(model), captured=False, capture_reason="a test", variant="scalar", bytes_before=100)
    text = str(report)
    for part in ("int4_moe", "int8_linear", "a test", "chooses experts", "largest errors"):
        assert part in text
    assert 0.9 < report.share < 1
    assert len(report.left) == 2
    assert report.to_dict()["layers"][0]["name"] == report.layers[0].name
    assert len(report.worst(2)) == 2
    assert str(Report()) == ""
