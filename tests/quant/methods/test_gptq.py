"""GPTQ: Hessians of inputs, rounding with error compensation, and calibration stage by stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.calibration import CALIBRATION
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.layers import find_layers
from torch_armllm.quant.methods.calibrated.expert_inputs import ExpertInputs
from torch_armllm.quant.methods.calibrated.gptq import Gptq
from torch_armllm.quant.methods.calibrated.gptq_solver import GptqRounding
from torch_armllm.quant.methods.calibrated.hessian import DAMPING, Hessian
from torch_armllm.quant.methods.calibrated.layerwise import Stages
from torch_armllm.quant.schemes.base import Quantized, Scheme, Search
from torch_armllm.quant.schemes.registry import SCHEMES, scheme_named


def correlated(columns: int, count: int = 2048, seed: int = 0) -> Tensor:
    """Returns inputs (count, columns) as in real layers: some channels louder, all correlated."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    mix += torch.eye(columns)
    return torch.randn(count, columns, generator=generator) * torch.logspace(-1, 0.7, columns) @ mix


def moments(x: Tensor) -> Hessian:
    found = Hessian(x.shape[1])
    found.add(x)
    return found


def output_error(x: Tensor, weight: Tensor, found: Quantized, scheme: Scheme) -> float:
    """‖XWᵀ − XŴᵀ‖ / ‖XWᵀ‖."""
    wanted = x @ weight.t()
    return float((x @ scheme.dequantize(found).t() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", [name for name in SCHEMES if not name.endswith("m")])
def test_output_error_is_below_that_of_scale_search(name: str) -> None:
    x, scheme = correlated(160), scheme_named(name)
    weight = torch.randn(48, 160, generator=torch.Generator().manual_seed(1))
    found = moments(x)
    solver = GptqRounding(found.damped(), 48)
    energy = found.total.diagonal() / found.total.diagonal().mean()
    plain = output_error(x, weight, Search(energy).rows(weight, scheme), scheme)
    better = solver.rows(weight, scheme)
    assert output_error(x, weight, better, scheme) < 0.8 * plain
    assert better.q.dtype == torch.int8
    assert better.q.shape == weight.shape


@pytest.mark.parametrize("name", ["g32i", "g32iz", "int3"])
def test_each_sweep_reduces_the_error(name: str) -> None:
    x, scheme = correlated(224), scheme_named(name)
    weight = torch.randn(64, 224, generator=torch.Generator().manual_seed(1))
    hessian = moments(x).damped()
    errors = [
        output_error(x, weight, GptqRounding(hessian, 64, sweeps).rows(weight, scheme), scheme)
        for sweeps in (0, 1, 3)
    ]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("name", ["g32i", "g32iz", "int3", "g32", "row"])
def test_independent_inputs_are_rounded_to_nearest(name: str) -> None:
    weight, scheme = torch.randn(32, 96, generator=torch.Generator().manual_seed(0)), scheme_named(name)
    found = GptqRounding(torch.eye(96), 32, sweeps=0).rows(weight, scheme)
    plain = Search().rows(weight, scheme)
    same = (found.q == plain.q).float().mean()
    assert float(same) > 0.995  # g32i fits its row scales after its last rounding


def test_columns_of_largest_energy_are_rounded_first() -> None:
    x = correlated(96)
    x[:, 5] *= 30
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
    scheme = scheme_named("row")
    found = GptqRounding(moments(x).damped(), 32, sweeps=0).rows(weight, scheme)
    step = found.scales[:, None]
    moved = (scheme.dequantize(found) - weight).abs() / step.abs()
    assert float(moved[:, 5].max()) <= 0.501  # no earlier column's error to compensate


def test_columns_without_input_are_rounded_to_nearest() -> None:
    x = correlated(96)
    x[:, 40:50] = 0
    weight, scheme = torch.randn(32, 96, generator=torch.Generator().manual_seed(0)), scheme_named("row")
    found = GptqRounding(moments(x).damped(), 32, sweeps=0).rows(weight, scheme)
    moved = (scheme.dequantize(found) - weight).abs() / found.scales[:, None].abs()
    inside = weight.abs() < 6 * found.scales[:, None].abs()
    assert float((moved * inside)[:, 40:50].max()) < 0.55  # the row's scale is fitted after its rounding


def test_few_or_no_inputs_are_supported() -> None:
    weight, scheme = torch.randn(32, 96, generator=torch.Generator().manual_seed(0)), scheme_named("g32i")
    x = correlated(96, count=9)
    few = GptqRounding(moments(x).damped(), 32).rows(weight, scheme)
    assert output_error(x, weight, few, scheme) < 0.5 * output_error(
        x, weight, Search().rows(weight, scheme), scheme
    )
    none = GptqRounding(Hessian(96).damped(), 32, sweeps=0).rows(weight, scheme)
    plain = Search().rows(weight, scheme)
    assert float((none.q == plain.q).float().mean()) > 0.995


def test_nearly_equal_inputs_are_supported() -> None:
    x = (8 + 0.05 * correlated(512, count=1024)).bfloat16()
    found = Hessian(512)
    found.add(x, float_inputs=x * 1.01)
    assert bool(torch.linalg.cholesky(found.damped()).isfinite().all())
    correction = found.correction()
    assert correction is not None and bool(correction.isfinite().all())
    weight, scheme = torch.randn(32, 512, generator=torch.Generator().manual_seed(0)), scheme_named("g32i")
    better = GptqRounding(found.damped(), 32).rows(weight, scheme)
    plain = Search().rows(weight, scheme)
    wide = x.float()
    assert output_error(wide, weight, better, scheme) < 0.3 * output_error(wide, weight, plain, scheme)


def test_moments_of_few_inputs_are_trusted_less() -> None:
    x = correlated(256, count=64 + 2048)
    few, others = x[:64], x[64:]
    weight, scheme = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)), scheme_named("g32i")
    plain = GptqRounding(moments(few).damped(), 32).rows(weight, scheme)
    found = GptqRounding(moments(few).damped(moments(few).damping), 32).rows(weight, scheme)
    assert output_error(others, weight, found, scheme) < 0.95 * output_error(others, weight, plain, scheme)
    assert moments(few).damping > moments(others).damping > DAMPING


def test_a_correction_moves_no_row_far() -> None:
    weight, scheme = torch.randn(32, 96, generator=torch.Generator().manual_seed(2)), scheme_named("int8")
    weight[5] = 0
    for size, moves in ((0.05, 0.05), (3.0, 0.1)):
        solver = GptqRounding(torch.eye(96), 32, correction=size * torch.eye(96))
        found = scheme.dequantize(solver.rows(weight, scheme))
        assert not bool(found[5].any())
        kept = [row for row in range(32) if row != 5]
        moved = (found - weight)[kept].norm(dim=1) / weight[kept].norm(dim=1)
        assert bool((moved - moves).abs().max() < 0.01)


def test_corrections_fitted_to_few_inputs_are_trusted_less() -> None:
    sizes = []
    for count in (256, 16384):
        x = torch.randn(count, 64, generator=torch.Generator().manual_seed(0))
        found = Hessian(64)
        found.add(x, float_inputs=1.01 * x)
        correction = found.correction()
        assert correction is not None
        sizes.append(float(correction.diagonal().mean()))
    assert 0 < sizes[0] < 0.5 * sizes[1] < 0.5 * 0.01


def test_non_finite_inputs_raise() -> None:
    x = correlated(32, count=8)
    x[3, 4] = float("inf")
    with pytest.raises(ValueError, match="hold a NaN or an infinity"):
        moments(x).damped()


def loud(kind: str) -> Any:
    """A tiny model whose norms make a few channels louder than the others."""
    model = tiny(kind)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.mul_(torch.where(torch.arange(64) % 16 == 3, 6.0, 0.5))
    return model


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_gptq_reduces_the_logit_error_of_unseen_text(kind: str) -> None:
    ids, calibration = (
        token_ids(2, 40),
        torch.randint(97, (12, 48), generator=torch.Generator().manual_seed(3)),
    )
    with torch.no_grad():
        expected = loud(kind)(ids).logits
    errors = []
    for method, tokens in (("mse", None), ("gptq", calibration)):
        model = loud(kind)
        quantize(model, Recipe(method=method), progress=False, calibration=tokens)
        with torch.no_grad():
            errors.append(float((model(ids).logits - expected).norm()))
        assert not any("forward" in vars(module) for module in model.modules())
    assert errors[1] < 0.9 * errors[0]


def test_stages_equal_the_whole_model() -> None:
    model, tokens = tiny("llama"), torch.randint(97, (5, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stages = Stages(model, tokens, batch=2)
        assert stages.streamed
        for stage in range(len(stages.modules)):
            stages.advance(stage)
        got = torch.cat([model.model.norm(part) for part in stages._states])
        assert torch.equal(got, model.model(tokens).last_hidden_state)


def test_layers_with_shared_state_run_as_a_whole_model(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny("llama"), torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(0))
    inner = type(model.model.layers[0]).forward

    def forward(self: Any, states: Tensor, *args: Any, **named: Any) -> Tensor:
        return inner(self, states * 1.0, *args, **named)

    kinds = iter(range(100))
    monkeypatch.setattr(type(model.model), "forward", _telling(type(model.model).forward, kinds))
    monkeypatch.setattr(type(model.model.layers[0]), "forward", forward)
    assert not Stages(model, tokens, batch=2).streamed
    quantize(model, Recipe(method="gptq"), progress=False, calibration=tokens)
    assert "runs as a whole" in caplog.text


def _telling(inner: Any, kinds: Any) -> Any:
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return inner(self, *args, told=next(kinds), **named)

    return forward


def test_rarely_chosen_experts_use_inputs_of_all_tokens() -> None:
    model = tiny("mixtral")
    layer = next(x for x in find_layers(model) if x.kind == "experts")
    hidden = layer.module.gate_up_proj.shape[2]
    x = correlated(hidden, count=512)
    chosen = torch.zeros(512, 1, dtype=torch.int64)  # all of them the first expert's
    inputs = ExpertInputs(layer)
    inputs.add(x, chosen, torch.ones(512, 1))
    weight = layer.module.gate_up_proj[1].detach().float()
    scheme = scheme_named("g32i")
    assert layer.layout is not None
    found = inputs.rounding(layer.layout.weights[0], 1).rows(weight, scheme)
    plain = Search().rows(weight, scheme)
    assert output_error(x, weight, found, scheme) < 0.8 * output_error(x, weight, plain, scheme)


def test_missing_calibration_texts_raise() -> None:
    with pytest.raises(ValueError, match="needs calibration texts"):
        quantize(tiny("llama"), Recipe(method="gptq"), progress=False)


@pytest.mark.usefixtures("one_thread")
def test_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loud("mixtral")
    quantize(whole, Recipe(method="gptq"), progress=False, calibration=CALIBRATION)
    with monkeypatch.context() as patch:
        seen = iter(range(7))

        def on_packed(self: Gptq, *arguments: Any) -> None:
            _on_packed(self, *arguments)
            if next(seen) == 6:  # in the second layer
                raise KeyboardInterrupt

        patch.setattr(Gptq, "on_packed", on_packed)
        with pytest.raises(KeyboardInterrupt):
            quantize(
                loud("mixtral"),
                Recipe(method="gptq"),
                progress=False,
                calibration=CALIBRATION,
                resume=tmp_path,
            )
    made = []
    monkeypatch.setattr(GptqRounding, "__init__", _counted(GptqRounding.__init__, made))
    model = loud("mixtral")
    quantize(model, Recipe(method="gptq"), progress=False, calibration=CALIBRATION, resume=tmp_path)
    assert made
    first = len(made)
    for name, value in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    quantize(loud("mixtral"), Recipe(method="gptq"), progress=False, calibration=CALIBRATION, resume=tmp_path)
    assert len(made) == first  # nothing was left to find


_on_packed = Gptq.on_packed


def _counted(inner: Any, made: list[int]) -> Any:
    def init(self: GptqRounding, *args: Any, **named: Any) -> None:
        made.append(1)
        inner(self, *args, **named)

    return init


def test_layer_after_an_unquantized_layer_has_no_error_to_compensate(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = []
    add = Hessian.add

    def spy(
        self: Hessian, x: Tensor, weight: Tensor | None = None, float_inputs: Tensor | None = None
    ) -> None:
        if float_inputs is not None:
            errors.append(float((float_inputs - x).abs().max()))
        add(self, x, weight, float_inputs)

    monkeypatch.setattr(Hessian, "add", spy)
    quantize(
        tiny("llama"),
        Recipe(method="gptq", ignore=["model.layers.0.*"]),
        progress=False,
        calibration=CALIBRATION,
    )
    assert errors[0] == 0
    assert errors[-1] > 0


def test_schemes_with_float_offsets_raise() -> None:
    with pytest.raises(ValueError, match="float offsets"):
        GptqRounding(torch.eye(64), 16).rows(torch.randn(16, 64), scheme_named("g32m"))
