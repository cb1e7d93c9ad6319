"""Tests of torch.compile(model, backend="armllm")."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import entry_points

import pytest
import torch
from torch import fx
from torch._dynamo.backends.registry import lookup_backend

from tests.support.models import tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.patching import compile_backend
from torch_armllm.quant.inplace import quantize


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that the backend creates during a test."""
    made: list[fx.GraphModule] = []
    run = compile_backend.run_passes

    def keep(module: fx.GraphModule, context: compile_backend.PassContext) -> compile_backend.PassContext:
        made.append(module)
        return run(module, context)

    monkeypatch.setattr(compile_backend, "run_passes", keep)
    torch._dynamo.reset()
    return made


@pytest.mark.parametrize("quantized", [False, True])
def test_compiled_model_runs_fused_ops_with_equal_results(
    graphs: list[fx.GraphModule], quantized: bool
) -> None:
    model = tiny("llama")
    if quantized:
        quantize(model, progress=False)
    ids = token_ids(1, 9)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend=compile_backend.armllm)
        got = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    used = Counter(str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert used["armllm.add_rms_norm.default"] == 4
    if quantized:
        assert used["armllm.int4_linear.default"] == 6
        assert used["armllm.int4_gated_linear.default"] == 2


def test_float_weights_are_quantized_on_request(graphs: list[fx.GraphModule]) -> None:
    ids = token_ids(1, 9)
    twin = tiny("llama")
    quantize(twin, Recipe(importance=False), progress=False)  # a graph knows nothing of inputs
    with torch.no_grad():
        expected = twin(ids, use_cache=False).logits
        compiled = torch.compile(
            tiny("llama"), backend=compile_backend.armllm, options={"quantization": "int4"}
        )
        got = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    used = Counter(str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert used["armllm.int4_gated_linear.default"] == 2
    assert used["armllm.int4_linear.default"] == 6
    assert used["armllm.int8_linear.default"] == 1
    assert not used["aten.linear.default"]


def test_compiled_model_accepts_a_new_length() -> None:
    torch._dynamo.reset()
    model = tiny("mixtral")
    compiled = torch.compile(model, backend=compile_backend.armllm)
    with torch.no_grad():
        for length in (9, 5, 14):
            ids = token_ids(1, length)
            got = compiled(ids, use_cache=False).logits
            torch.testing.assert_close(got, model(ids, use_cache=False).logits, atol=2e-3, rtol=2e-3)


def test_graphs_with_gradients_are_not_changed(graphs: list[fx.GraphModule]) -> None:
    layer = torch.nn.Linear(8, 8)
    compiled = torch.compile(layer, backend=compile_backend.armllm)
    compiled(torch.randn(2, 8)).sum().backward()
    assert layer.weight.grad is not None
    assert not graphs


def test_installed_package_registers_the_backend() -> None:
    if not any(e.name == "armllm" for e in entry_points(group="torch_dynamo_backends")):
        pytest.skip("torch_armllm runs from a checkout that is not installed")
    assert lookup_backend("armllm") is compile_backend.armllm


def test_unknown_options_raise() -> None:
    graph = fx.symbolic_trace(torch.nn.Identity())
    with pytest.raises(ValueError, match="speed"):
        compile_backend.armllm(graph, [], speed=1)
    with pytest.raises(ValueError, match="int9"):
        compile_backend.armllm(graph, [], options={"quantization": "int9"})
