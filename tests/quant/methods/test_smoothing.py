"""Channels are scaled before rounding: less is lost, floats do not change, and everything can be undone."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import torch_armllm
from tests.quant.methods.loud_model import loud
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.model_survey.stacks import tiny_stacks
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.layers import find_layers
from torch_armllm.quant.methods.base import Mse
from torch_armllm.quant.methods.calibrated import smoothing
from torch_armllm.quant.methods.calibrated.channel_scaling import ChannelScaling
from torch_armllm.quant.methods.calibrated.channels import Channels
from torch_armllm.quant.methods.calibrated.layerwise import Stages
from torch_armllm.quant.methods.calibrated.scaling_search import find_scalings
from torch_armllm.quant.methods.calibrated.smoothed import Smoothed
from torch_armllm.quant.methods.calibrated.smoothing import energy_of, powers_for
from torch_armllm.quant.methods.calibrated.stage_scaling import readers_in
from torch_armllm.quant.methods.importance import random_tokens
from torch_armllm.quant.methods.registry import make_method
from torch_armllm.quant.restore import restore
from torch_armllm.quant.schemes.registry import scheme_named

KINDS = ["llama", "mixtral", "gpt2", "qwen2", "qwen3_moe", "gemma"]
TOKENS = torch.randint(97, (8, 32), generator=torch.Generator().manual_seed(3))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def smoothed(model: Any) -> Smoothed:
    """Scales all channels of a model, and returns the method."""
    layers = [x for x in find_layers(model) if x.reason is None]
    method = Smoothed(model, layers, random_tokens(model))
    for layer in method.order(layers):
        method.rounding(layer, scheme_named("g32i"))
    return method


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> list[str]:
    """Names of the parameters and buffers that have other bits or another dtype."""
    return [
        name
        for name, value in model.state_dict().items()
        if value.dtype != before[name].dtype or not torch.equal(value, before[name])
    ]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *product(KINDS, [torch.float32, torch.bfloat16, torch.float16]),
        ("gemma3_text", torch.bfloat16),
        ("gpt_oss", torch.bfloat16),
        ("nemotron", torch.bfloat16),
        ("qwen3_5_moe_text", torch.bfloat16),
        ("qwen3_next", torch.bfloat16),
    ],
)
def test_the_float_model_computes_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    model, ids = loud(kind).to(dtype), token_ids(2, 20)
    before = state_of(model)
    with torch.no_grad():
        expected = model(ids).logits
        method = smoothed(model)
        assert any("norm" in name or "ln_" in name for name in changed(model, before))
        assert torch.equal(model(ids).logits, expected)
        assert model.dtype == dtype
        method.abandon()
    assert not changed(model, before)
    assert list(model.state_dict()) == list(before)


@pytest.mark.parametrize("method", ["mse", "awq", "gptq"])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma"])
def test_unpatch_restores_the_weights_bit_for_bit(kind: str, method: str) -> None:
    model = loud(kind, dtype=torch.bfloat16)
    before = state_of(model)
    calibration = None if method == "mse" else TOKENS
    change, undo = (torch_armllm.patch, torch_armllm.unpatch) if kind == "llama" else (quantize, restore)
    change(model, Recipe(method=method), keep_original=True, progress=False, calibration=calibration)
    assert not torch.equal(
        model.model.layers[0].input_layernorm.weight, before["model.layers.0.input_layernorm.weight"]
    )
    assert undo(model) == []
    assert not changed(model, before)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma"])
def test_weights_that_were_not_kept_are_in_the_scale_of_the_original(kind: str) -> None:
    model, ids = loud(kind), token_ids(2, 20)
    before = state_of(model)
    quantize(model, progress=False)
    restore(model)
    rounded = changed(model, before)
    assert rounded
    assert all("proj" in name or "head" in name or "embed" in name for name in rounded)  # no norm, no router
    for name in rounded:
        error = (model.state_dict()[name] - before[name]).norm() / before[name].norm()
        assert float(error) < 0.15, name
    with torch.no_grad():
        assert bool(model(ids).logits.isfinite().all())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma", "mixtral"])
def test_smoothing_reduces_the_logit_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, errors = token_ids(4, 40), []
    for power in (0.0, smoothing._POWER):
        monkeypatch.setattr(smoothing, "_POWER", power)
        errors.append(0.0)
        for seed in range(3):
            model = loud(kind, seed=seed)
            with torch.no_grad():
                expected = model(ids).logits
                quantize(model, Recipe(head=None), progress=False)
                errors[-1] += float((model(ids).logits - expected).norm() / expected.norm())
    assert errors[1] < 0.95 * errors[0]


def test_failure_restores_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loud("llama")
    before = state_of(model)
    steps = iter(range(8))

    def fail(*_: Any) -> None:
        if next(steps) == 7:
            raise RuntimeError("no more")

    monkeypatch.setattr(Smoothed, "on_packed", fail)
    with pytest.raises(RuntimeError, match="no more"):
        quantize(model, progress=False)
    assert not changed(model, before)


def test_a_norm_that_other_layers_share_is_not_scaled() -> None:
    model, ids = loud("llama"), token_ids(2, 20)
    shared = model.model.layers[0].input_layernorm
    model.model.layers[1].input_layernorm = shared
    before = shared.weight.clone()
    with torch.no_grad():
        expected = model(ids).logits
        smoothed(model)
        assert torch.equal(shared.weight, before)
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(
    ("value", "power", "limited"), [(2.0**124, 1 / 16, 1 / 8), (2.0**-149, 4.0, 1.0), (2.0**-140, 16.0, 16.0)]
)
def test_channels_whose_weights_would_lose_bits_are_scaled_by_less(
    value: float, power: float, limited: float
) -> None:
    mlp = loud("llama").model.layers[0].mlp
    scaling = ChannelScaling(Channels(mlp.up_proj), (Channels(mlp.down_proj),))
    wanted = torch.full((96,), power)
    assert torch.equal(scaling.limited(wanted), wanted)
    with torch.no_grad():
        mlp.up_proj.weight[3, 5] = value
    powers = scaling.limited(wanted)
    wanted[3] = limited
    assert torch.equal(powers, wanted)
    applied = scaling.apply(powers)
    assert mlp.up_proj.weight[3, 5].item() == value / limited
    applied.undo()
    assert mlp.up_proj.weight[3, 5].item() == value


def test_writers_that_are_not_scaled_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = loud("gpt2")
    with caplog.at_level(logging.INFO), torch.no_grad():
        quantize(model, progress=False)
    lines = [x.message for x in caplog.records if "not scaled" in x.message]
    assert lines == ["channels that are not scaled: mlp.c_fc for mlp.c_proj (2 stages)"]


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_what_routers_and_experts_read_is_scaled(kind: str) -> None:
    model = loud(kind)
    before = state_of(model)
    smoothed(model)
    scaled = {".".join(name.split(".")[-2:]) for name in changed(model, before)}
    router = "router.weight" if kind == "gpt_oss" else "gate.weight"
    assert {"post_attention_layernorm.weight", router, "experts.gate_up_proj"} <= scaled
    assert ("experts.down_proj" in scaled) == (kind != "gpt_oss")  # whose activation clamps
    assert ("shared_expert_gate.weight" in scaled) == (kind == "qwen2_moe")


def test_a_norm_whose_router_scales_its_inputs_itself_is_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loud("mixtral")
    router = type(model.model.layers[0].mlp.gate)
    inner = router.forward
    monkeypatch.setattr(router, "forward", lambda self, x: inner(self, torch.nn.functional.normalize(x)))
    assert "post_attention_layernorm" not in _writers(model)


@pytest.mark.parametrize("limit", [None, 7.0])
def test_channels_that_are_clamped_are_not_scaled(limit: float | None) -> None:
    model = loud("llama")
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * _clamped(mlp.up_proj(x), limit))
    assert mlp.up_proj(torch.ones(1, 64)).abs().max().item() < 7
    assert ("mlp.up_proj" in _writers(model)) == (limit is None)


def _clamped(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    return x if limit is None else x.clamp(-limit, limit)


def _writers(model: Any) -> set[str]:
    """Names of the writers whose channels can be scaled in the first decoder layer."""
    stages = Stages(model, TOKENS, batch=8)
    module = stages.modules[0]
    with torch.no_grad():
        scalings, _ = find_scalings(module, readers_in(module, {}), lambda: stages.probe(0))
    names = {id(x): name for name, x in module.named_modules()}
    return {names[id(scaling.writer.module)] for scaling in scalings}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_probe_computes_the_first_tokens_of_the_sample(
    kind: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not streamed:
        monkeypatch.setattr(Stages, "_prepare", lambda _: "a reason")
    model = loud(kind)
    with torch.no_grad():
        stages = Stages(model, TOKENS, batch=8)
        assert stages.streamed == streamed
        for stage in range(len(stages.modules)):
            stages.run_float(stage)
            few, sample = stages.probe(stage), stages.sample(stage)
            assert few.shape == (1, 16, 64)
            torch.testing.assert_close(few, sample[:, :16], rtol=1e-4, atol=1e-5)


def test_layers_with_a_forward_of_their_own_keep_it() -> None:
    model, calls = loud("llama"), []
    layer = model.model.layers[0]
    inner = layer.forward

    def forward(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return inner(*args, **named)

    layer.forward = forward
    with torch.no_grad():
        stages = Stages(model, TOKENS, batch=8)
        assert stages.streamed
        assert layer.__dict__["forward"] is forward
        del calls[:]
        stages.probe(0)
    assert len(calls) == 1


@pytest.mark.parametrize("length", [1, 5])
def test_a_probe_of_a_short_text_is_the_sample(length: int) -> None:
    with torch.no_grad():
        stages = Stages(loud("llama"), TOKENS[:, :length], batch=8)
        assert torch.equal(stages.probe(0), stages.sample(0))


def test_a_probe_of_a_model_that_pads_its_tokens_has_their_padded_length() -> None:
    model = tiny_stacks("longformer", attention_window=[64, 64])
    with torch.no_grad():
        stages = Stages(model, TOKENS, batch=8)
        assert stages.streamed
        stages.run_float(0)
        assert stages.probe(0).shape == (1, 64, 64)


def test_powers_are_fourth_roots_of_the_channels_sizes() -> None:
    sizes = torch.tensor([1.0, 1.0, 2.0**8, 2.0**-8])
    assert powers_for(sizes.square()).tolist() == [1.0, 1.0, 4.0, 0.25]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_inputs_without_a_size_count_the_same_in_all_channels(value: float) -> None:
    assert energy_of([torch.full((3, 5), value)]).tolist() == [1.0] * 5


def test_a_model_that_does_not_run_layer_by_layer_is_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loud("llama")
    inner = type(model.model.layers[0]).forward
    before = state_of(model)

    def forward(self: Any, states: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        return inner(self, states * 1.0, *args, cache={"of": self}, **named)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", forward)
    twice = type(model.model).forward

    def again(self: Any, *args: Any, **named: Any) -> Any:
        twice(self, *args, **named)
        return twice(self, *args, **named)

    monkeypatch.setattr(type(model.model), "forward", again)
    layers = [x for x in find_layers(model) if x.reason is None]
    with torch.no_grad():
        assert type(make_method(Recipe(), model, layers, statistics=True)) is Mse
    assert not changed(model, before)


def test_a_model_that_needs_more_than_tokens_is_rounded_without_statistics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")

    def refuse(*_: Any, **__: Any) -> None:
        raise TypeError("pixels are missing")

    monkeypatch.setattr(type(model.model), "forward", refuse)
    layers = [x for x in find_layers(model) if x.reason is None]
    with caplog.at_level(logging.INFO), pytest.warns(UserWarning, match="pixels are missing"):
        assert type(make_method(Recipe(), model, layers, statistics=True)) is Mse
    assert "channels are not scaled: pixels are missing" in caplog.text
