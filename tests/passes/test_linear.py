"""Tests of the passes gated_mlp, qkv and dense_linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.support.graphs import export, ops
from torch_armllm import Recipe
from torch_armllm.ops.linear import interleave_panels
from torch_armllm.passes import clean, dense_linear, gated_mlp, qkv
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.linear_call import LinearCall
from torch_armllm.passes.lib.merged_weights import merge_pairs, merge_panels
from torch_armllm.quant.inplace import quantize


class Mlp(nn.Module):
    def __init__(self, act: nn.Module, bias: bool = False, size: int = 48) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, size, bias=bias), nn.Linear(32, size, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.gate(x)) * self.up(x)


class Siblings(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, n, bias=bias) for n in (64, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.v(x).relu(), self.q(x), self.k(x)], -1)


def quantized(module: nn.Module) -> nn.Module:
    quantize(module, Recipe("g32i", head=None), progress=False)
    return module


def weights_moved(graph: fx.GraphModule) -> tuple[PassContext, dict[str, Tensor]]:
    moved: dict[str, Tensor] = {}
    return PassContext(on_new_weight=moved.__setitem__), moved


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()])
def test_quantized_gate_and_up_become_one_layer(act: nn.Module, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 32)
    module = quantized(Mlp(act, bias))
    packed = module.gate.weight_packed.clone(), module.up.weight_packed.clone()
    graph = export(module, x)
    clean.run(graph, PassContext())
    expected = graph(x)
    assert ops(graph).count("armllm::int4_linear") == 2
    context, moved = weights_moved(graph)
    assert gated_mlp.run(graph, context) == 1
    graph.recompile()
    assert ops(graph) == ["armllm::int4_gated_linear"]
    torch.testing.assert_close(graph(x), expected, atol=1e-5, rtol=1e-5)
    for view, original in zip(moved.values(), packed, strict=True):
        assert torch.equal(view, original)


def test_parts_of_a_merged_weight_are_not_copied() -> None:
    panels = torch.arange(60, dtype=torch.uint8).view(6, 10)
    assert merge_panels([panels[:1], panels[1:4], panels[4:]]).data_ptr() == panels.data_ptr()
    assert merge_pairs(panels[::2], panels[1::2]).data_ptr() == panels.data_ptr()
    others = [panels[1:4], panels[:1], panels[4:]], [panels[:1], panels[1:4]], [panels[:2], panels[4:]]
    for parts in others:
        found = merge_panels(parts)
        assert torch.equal(found, torch.cat(parts)) and found.data_ptr() != panels.data_ptr()
    for gate, up in ((panels[1::2], panels[::2]), (panels[:3], panels[3:]), (panels[:2], panels[2:4])):
        found = merge_pairs(gate, up)
        assert torch.equal(found, interleave_panels(gate, up)) and found.data_ptr() != panels.data_ptr()


def set_digits(*layers: nn.Module) -> None:
    for layer in layers:
        layer.digits = 2  # type: ignore[assignment]


def digits_of(graph: fx.GraphModule, op: Any) -> list[Any]:
    """Returns the argument ``digits`` of each call of an op, in a tuple; empty by default."""
    at = [argument.name for argument in op._schema.arguments].index("digits")
    return [node.args[at : at + 1] for node in graph.graph.nodes if node.target is op]


def test_gate_and_up_of_equal_digits_are_merged() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 32)
    module: Any = quantized(Mlp(nn.SiLU(), True))
    set_digits(module.up)
    other = export(module, x)
    clean.run(other, PassContext())
    set_digits(module.gate)
    graph = export(module, x)
    clean.run(graph, PassContext())
    expected = graph(x), other(x)
    assert gated_mlp.run(graph, PassContext()) == gated_mlp.run(other, PassContext()) == 1
    graph.recompile(), other.recompile()
    assert digits_of(graph, torch.ops.armllm.int4_gated_linear.default) == [(2,)]
    assert ops(other) == ["armllm::int4_linear", "armllm::int4_linear", "armllm::gated_act"]
    for one, wanted in zip((graph(x), other(x)), expected, strict=True):
        torch.testing.assert_close(one, wanted, atol=1e-6, rtol=1e-6)


def test_float_gate_and_up_become_gated_act() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 32)
    graph = export(Mlp(nn.SiLU()), x)
    clean.run(graph, PassContext())
    before, expected = ops(graph), graph(x)
    assert gated_mlp.run(graph, PassContext()) == 1
    graph.recompile()
    assert before == ["linear", "silu", "linear", "mul"] and ops(graph) == [
        "linear",
        "linear",
        "armllm::gated_act",
    ]
    torch.testing.assert_close(graph(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_with_the_same_input_are_merged(bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 32)
    module = quantized(Siblings(bias))
    graph = export(module, x)
    clean.run(graph, PassContext())
    expected = graph(x)
    context, moved = weights_moved(graph)
    assert qkv.run(graph, context) == 1
    graph.graph.lint()
    graph.recompile()
    assert ops(graph).count("armllm::int4_linear") == 1 and ops(graph).count("slice") == 3
    assert torch.equal(graph(x), expected)
    assert len(moved) == 3 and len({view.untyped_storage().data_ptr() for view in moved.values()}) == 1


def test_layers_of_equal_digits_are_merged() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 32)
    module: Any = quantized(Siblings(bias=True))
    linear = torch.ops.armllm.int4_linear.default
    for layers, expected_digits in (((module.v,), [1, 2]), ((module.q, module.k), [2])):
        set_digits(*layers)
        graph = export(module, x)
        clean.run(graph, PassContext())
        expected = graph(x)
        assert qkv.run(graph, PassContext()) == 1
        graph.recompile()
        assert sorted((*digits, 1)[0] for digits in digits_of(graph, linear)) == expected_digits
        assert torch.equal(graph(x), expected)


def test_layers_of_partial_panels_are_not_merged() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 24, bias=False), nn.Linear(32, 40, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x)], -1)

    graph = export(quantized(Ragged()), torch.randn(1, 5, 32))
    assert qkv.run(graph, PassContext()) == 0


def test_small_float_layers_become_dense_linear() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 32)
    graph = export(nn.Linear(32, 6), x)
    expected = graph(x)
    assert dense_linear.run(graph, PassContext()) == 1
    graph.recompile()
    assert ops(graph) == ["armllm::dense_linear"]
    torch.testing.assert_close(graph(x), expected, atol=1e-5, rtol=1e-5)


def test_a_linear_call_has_the_arguments_of_the_op() -> None:
    arguments = torch.ops.armllm.int4_linear.default._schema.arguments
    assert list(LinearCall._fields) == [argument.name for argument in arguments]
    defaults = {x.name: x.default_value for x in arguments if x.has_default_value()}
    assert LinearCall._field_defaults == defaults
