"""Experts of every layout: quantized and captured, or not changed and reported if no op supports them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Llama4ForCausalLM, Llama4TextConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

import torch_armllm
from tests.support.models import COMMON, token_ids
from tests.support.patched_models import chunked
from tests.support.reference_modules import ReferenceExperts
from torch_armllm import Recipe
from torch_armllm.capture.markers.experts import experts_function, mark_undecorated_experts
from torch_armllm.hf.expert_detection import read_layout
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.restore import restore

EXPERTS, HIDDEN, INNER = 4, 64, 48


class Config:
    """The configuration fields that the decorator reads."""

    _experts_implementation = "eager"


class Base(nn.Module):
    """Experts whose layout the subclasses define; the forward follows transformers' flags."""

    transposed = biased = False
    gated = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        rows = 2 * INNER if self.gated else INNER
        first = "gate_up_proj" if self.gated else "up_proj"
        shapes = {first: (rows, HIDDEN), "down_proj": (HIDDEN, INNER)}
        for name, (out, inputs) in shapes.items():
            shape = (EXPERTS, inputs, out) if self.transposed else (EXPERTS, out, inputs)
            weight = torch.randn(shape, generator=generator) / inputs**0.5
            setattr(self, name, nn.Parameter(weight))
            if self.biased:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, out, generator=generator)))
        self.num_experts, self.limit, self.act_fn = EXPERTS, 1.5, F.silu

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        from transformers.integrations.moe import batched_mm_experts_forward

        return batched_mm_experts_forward(self, x, ids, weights)


@use_experts_implementation
class Plain(Base):
    """[gate; up] rows."""


@use_experts_implementation(is_transposed=True)
class Transposed(Base):
    """Aria."""

    transposed = True


@use_experts_implementation(is_concatenated=False, is_transposed=True, has_bias=True)
class Interleaved(Base):
    """gpt-oss."""

    transposed = biased = True

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)


@use_experts_implementation(has_bias=True)
class ClampedSilu(Base):
    """DeepSeek-V4, GLM-5, with biases on top."""

    biased = True

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


@use_experts_implementation(has_gate=False)
class Ungated(Base):
    """Nemotron-H: squared ReLU."""

    gated = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.act_fn = ACT2FN["relu2"]


@use_experts_implementation
class OtherGate(Base):
    """A gate that no op supports."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.sigmoid(gate) * up


@use_experts_implementation
class OtherAlpha(Base):
    """gpt-oss' gate with another constant."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * 1.6)


class Batched(nn.Module):
    """Llama 4: batched rows, one expert after the other; without transformers' interface."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.hidden_size, self.num_experts = HIDDEN, EXPERTS
        shapes = {"gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER), "down_proj": (EXPERTS, INNER, HIDDEN)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) / shape[1] ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(self.num_experts, -1, self.hidden_size)
        gate, up = torch.bmm(x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), self.down_proj).view(-1, self.hidden_size)


class WithIdentities(nn.Module):
    """LongCat: ids after the experts' return the token itself; without transformers' interface."""

    def __init__(self, identities: int = 3, factor: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.routed_experts, self.identities, self.factor = EXPERTS, identities, factor
        self.gate_up_proj = nn.Parameter(
            torch.randn(EXPERTS + identities, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
        )
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / INNER**0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.routed_experts + self.identities):
            token, slot = torch.where(ids == expert)
            rows = self.factor * x[token]
            if expert < self.routed_experts:
                gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
                rows = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out


@use_experts_implementation
class Softcapped(Base):
    """Inkling 2: gate and up are bounded by tanh, and sigmoid sees the raw gate."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.caps = nn.Identity()
        self.caps.gate, self.caps.up = 4.0, 25.0  # type: ignore[assignment]

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        bounded = 4.0 * torch.tanh(gate / 4.0) * (25.0 * torch.tanh(up / 25.0))
        return bounded * torch.sigmoid(gate)


KNOWN = {
    Plain: ("silu", 7.0),
    Transposed: ("silu", 7.0),
    Interleaved: ("swiglu_clamped", 1.5),
    ClampedSilu: ("silu_clamped", 1.5),
    Ungated: ("relu", 7.0),
    Softcapped: ("silu_softcapped", 4.0),
}


def inputs(tokens: int = 9, experts: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :2]
    return torch.randn(tokens, HIDDEN, generator=generator), ids, torch.rand(tokens, 2, generator=generator)


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_layouts_are_recognized_and_computed(kind: type[Base]) -> None:
    module = kind(Config())
    layout = read_layout(module)
    assert not isinstance(layout, str)
    assert (layout.activation, layout.limit) == KNOWN[kind]
    with torch.no_grad():
        expected = module(*inputs())
        torch.testing.assert_close(experts_function(module, *inputs()), expected, atol=1e-5, rtol=1e-5)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = nn.ModuleDict({"experts": module})
    (record,) = quantize(model, Recipe(importance=False), progress=False)
    assert record.op == "int4_moe" and record.reason is None
    packed = model["experts"]
    assert isinstance(packed, QuantExperts)
    got = packed(*inputs())
    torch.testing.assert_close(got, ReferenceExperts(packed)(*inputs()), atol=3e-2, rtol=3e-2)
    assert float((got - expected).detach().norm() / expected.detach().norm()) < 0.25
    assert restore(model) == ["experts"]
    for name, parameter in model["experts"].named_parameters():
        assert float((parameter.detach() - before[name]).norm() / before[name].norm()) < 0.1, name


@pytest.mark.parametrize("kind", [OtherGate, OtherAlpha], ids=lambda kind: kind.__name__)
def test_unknown_activations_run_as_in_transformers(kind: type[Base]) -> None:
    module = kind(Config())
    (record,) = quantize(nn.ModuleDict({"experts": module}), Recipe(importance=False), progress=False)
    assert record.reason == "its activation has no fused op"
    with torch.no_grad():
        expected = module(*inputs())
        torch.testing.assert_close(experts_function(module, *inputs()), expected, atol=1e-5, rtol=1e-5)


def test_batched_experts() -> None:
    module, x = Batched(), inputs(EXPERTS * 5)[0]
    layout = read_layout(module)
    assert not isinstance(layout, str)
    assert layout.batched and layout.transposed and not layout.interleaved
    expected = module(x)
    model = nn.ModuleDict({"experts": module})
    quantize(model, Recipe(importance=False), progress=False)
    got = model["experts"](x)
    torch.testing.assert_close(got, ReferenceExperts(model["experts"])(x), atol=3e-2, rtol=3e-2)
    assert float((got - expected).detach().norm() / expected.detach().norm()) < 0.25


@pytest.mark.parametrize("identities", [0, 1, 3, EXPERTS, HIDDEN - EXPERTS])
def test_identity_experts(identities: int) -> None:
    module, arguments = WithIdentities(identities), inputs(20, EXPERTS + identities)
    layout = read_layout(module)
    assert not isinstance(layout, str)
    assert layout.identity_experts == identities and not layout.batched and not layout.transposed
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = nn.ModuleDict({"experts": module})
    with torch.no_grad():
        expected = module(*arguments)
        with mark_undecorated_experts(model):
            marked = module.forward(*arguments)
        torch.testing.assert_close(marked, expected, atol=1e-5, rtol=1e-5)
    (record,) = quantize(model, Recipe(importance=False), progress=False)
    assert record.op == "int4_moe" and record.reason is None
    packed = model["experts"]
    assert isinstance(packed, QuantExperts) and packed.num_experts == EXPERTS
    got = packed(*arguments)
    torch.testing.assert_close(got, ReferenceExperts(packed)(*arguments), atol=3e-2, rtol=3e-2)
    assert float((got - expected).norm() / expected.norm()) < 0.25
    only = torch.full((20, 2), EXPERTS + identities - 1)
    if identities:
        sums = arguments[2].sum(-1, keepdim=True)
        torch.testing.assert_close(packed(arguments[0], only, arguments[2]), arguments[0] * sums)
    assert restore(model) == ["experts"]
    for name, parameter in model["experts"].named_parameters():
        read, own = parameter.detach()[:EXPERTS], before[name][:EXPERTS]
        assert parameter.shape == before[name].shape
        assert float((read - own).norm() / own.norm()) < 0.1, name


def test_identities_with_a_factor_are_not_changed() -> None:
    module = WithIdentities(factor=1.25)
    (record,) = quantize(nn.ModuleDict({"experts": module}), Recipe(importance=False), progress=False)
    assert record.reason == "what it computes is not what a fused op does"


def test_other_stacked_weights_are_not_experts() -> None:
    class Sum(Batched):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + x

    (record,) = quantize(nn.ModuleDict({"experts": Sum()}), Recipe(importance=False), progress=False)
    assert record.reason == "what it computes is not what a fused op does"


@pytest.mark.filterwarnings("ignore:torch_armllm")
@torch.no_grad()
def test_dense_experts_compute_the_chosen_tokens_only() -> None:
    """Llama 4: scores scale the input.  Its chunked attention runs by the modules."""
    sizes = {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": 16}
    torch.manual_seed(1)  # with 0 an activation lies between two INT8 steps, and both ways round it apart
    model = Llama4ForCausalLM(Llama4TextConfig(**{**COMMON, **sizes, "moe_layers": [1]})).eval()
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.08) if parameter.dim() >= 2 else parameter.fill_(1.0)
    report = torch_armllm.patch(model, progress=False)
    assert report.captured, report.capture_reason
    assert (report.ops["int4_moe"], report.ops["moe_route"]) == (1, 1)
    assert any("more than 16 tokens" in note for note in report.notes)
    plan = model.model.forward
    for length in (9, 16, 25):
        ids = token_ids(1, length)
        with plan.by_modules("the test compares both"):
            expected = model(ids).logits
        scale = float(expected.abs().max())
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5 * scale)
        parts = chunked(model, ids, [4, 1, length - 6, 1])
        torch.testing.assert_close(parts, expected, rtol=0, atol=1e-5 * scale)
