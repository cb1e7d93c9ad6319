"""Markers of recurrent layers: what they compute, and where they are inserted."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from tests.support.graphs import ops
from torch_armllm.capture.export import CaptureError, capture
from torch_armllm.capture.markers import recurrent, recurrent_modules, recurrent_ops
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.ops.recurrent.reference import (
    reference_causal_conv,
    reference_gated_delta_rule,
    reference_selective_scan,
)


def steps(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts, lengths = torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int()
    return torch.zeros(1, dtype=torch.int64), starts, lengths


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 3, 20])
def test_convolution_equals_the_ops_reference(tokens: int, taps: int, silu: bool) -> None:
    torch.manual_seed(tokens)
    x, weight, bias = torch.randn(1, 6, tokens), torch.randn(6, taps), torch.randn(6)
    found = recurrent_ops.convolve_tokens(x, weight, bias, silu)
    state = torch.zeros(1, taps - 1, 6)
    expected = reference_causal_conv(x[0].T, weight.T, bias, state, *steps(tokens), silu)
    torch.testing.assert_close(found[0].T, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_delta_rule_equals_the_ops_reference(tokens: int, by_channel: bool) -> None:
    torch.manual_seed(tokens)
    q, k = torch.randn(1, tokens, 2, 8), torch.randn(1, tokens, 2, 8)
    v, beta = torch.randn(1, tokens, 4, 5), torch.rand(1, tokens, 4)
    gate = -torch.rand(1, tokens, 4, *([8] if by_channel else []))
    found = recurrent_ops.delta_rule(q, k, v, gate, beta, 0.3, True)
    state = torch.zeros(1, 4, 8, 5)
    rows = (x[0] for x in (q, k, v, gate, beta))
    expected = reference_gated_delta_rule(*rows, state, *steps(tokens), 0.3, True)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_scan_equals_the_ops_reference(tokens: int, ones: bool, normalize: bool) -> None:
    torch.manual_seed(tokens)
    x, dt, a = torch.randn(1, tokens, 6), torch.rand(1, tokens, 6), -torch.rand(4, 6)
    b, c = (None if ones else torch.randn(1, tokens, 4) for _ in range(2))
    found = recurrent_ops.scan_channels(x, dt, a, b, c, normalize)
    rows = (x[0], dt[0], a, *(None if part is None else part[0] for part in (b, c)))
    expected = reference_selective_scan(*rows, torch.zeros(1, 4, 6), *steps(tokens), normalize)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "lfm2", "mamba", "jamba"])
def test_graph_holds_the_markers_and_the_functions_come_back(family: str) -> None:
    model = tiny_model(family)
    code = sys.modules[type(model).__module__]
    before = {name: getattr(code, name, None) for name in recurrent._MARKERS}
    names = ops(capture(kind_of(model)).graph_module)
    assert "armllm::convolve_tokens" in names
    assert ("armllm::delta_rule" in names) == (family in ("qwen3_5_text", "kimi_linear"))
    assert ("armllm::scan_channels" in names) == (family in ("mamba", "jamba"))
    assert "conv1d" not in names
    assert {name: getattr(code, name, None) for name in recurrent._MARKERS} == before


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_activation_other_than_silu_follows_the_convolution(activation: str) -> None:
    model = tiny_model("qwen3_5_text", hidden_act=activation)
    names = ops(capture(kind_of(model)).graph_module)  # compares the graph's results with the model's
    assert "armllm::convolve_tokens" in names and "conv1d" not in names
    assert activation in names


def test_a_convolution_that_models_write_themselves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lfm2")
    code = sys.modules[type(model).__module__]
    original = code.causal_conv1d_fn

    def with_its_own_activation(x, weight, bias=None, activation=None, **options):  # type: ignore[no-untyped-def]
        return F.tanh(original(x, weight, bias, activation))

    monkeypatch.setattr(code, "causal_conv1d_fn", with_its_own_activation)
    with pytest.raises(CaptureError, match="mixes or counts tokens outside of attention"):
        capture(kind_of(model))


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("minimax", "slope_rate"),
        ("recurrent_gemma", "recurrent_param"),
        ("inkling2_text", "static_weight"),
    ],
)
def test_modules_with_a_recurrence_of_their_own_are_replaced_while_captured(family: str, part: str) -> None:
    model = tiny_model(family)
    module = next(m for m in model.modules() if hasattr(m, part))
    with recurrent_modules.mark_recurrent_modules(model):
        assert "forward" in vars(module)
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("minimax", "slope_rate"),
        ("recurrent_gemma", "recurrent_param"),
        ("inkling2_text", "static_weight"),
    ],
)
def test_modules_that_compute_something_else_stay(family: str, part: str) -> None:
    model = tiny_model(family)
    module = next(m for m in model.modules() if hasattr(m, part))
    original = module.forward

    def doubled(*args, **kwargs):  # type: ignore[no-untyped-def]
        out = original(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    module.forward = doubled
    with recurrent_modules.mark_recurrent_modules(model):
        assert module.forward is doubled


@pytest.mark.parametrize(("times", "replaced"), [(1, True), (3, False)])
def test_one_rounded_activation_does_not_hide_a_recurrence(times: int, replaced: bool) -> None:
    """In a quantized layer an activation on the verge of two integers moves a whole token."""
    model = tiny_model("minimax")
    module = next(m for m in model.modules() if hasattr(m, "slope_rate"))
    original, calls = module.forward, []

    def rounded(*args, **kwargs):  # type: ignore[no-untyped-def]
        out, *rest = original(*args, **kwargs)
        calls.append(out)
        return (out + 0.02 * (torch.arange(9) == 4)[:, None] if len(calls) <= times else out, *rest)

    module.forward = rounded
    with recurrent_modules.mark_recurrent_modules(model):
        assert (module.forward is not rounded) == replaced


def test_a_convolution_with_taps_of_each_token_is_several_convolutions() -> None:
    model = tiny_model("inkling2_text")
    names = ops(capture(kind_of(model)).graph_module)  # compares the graph's results with the model's
    assert "armllm::convolve_tokens" in names and "unfold" not in names and "pad" not in names


def test_convolutions_that_see_later_tokens_stay() -> None:
    causal = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3)
    centered = torch.nn.Conv1d(6, 6, 3, groups=6, padding=1)
    mixed = torch.nn.Conv1d(6, 6, 4, groups=3, padding=3)
    with recurrent_modules.mark_recurrent_modules(torch.nn.ModuleList([causal, centered, mixed])):
        assert ["forward" in vars(module) for module in (causal, centered, mixed)] == [True, False, False]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("rwkv", r"blocks.0.attention \(RwkvSelfAttention\) loops over the tokens"),
        ("xlstm", r"mlstm_backend \(xLSTMBackend\) loops over the tokens"),
        ("zaya", r"conv_qk_grouped \(Conv1d\) mixes tokens and channels"),
    ],
)
def test_reason_names_the_module_that_loops_over_tokens(family: str, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(kind_of(tiny_model(family)))
