"""Tests of moe_route, attention and all passes together on captured models."""

from __future__ import annotations

import pytest
import torch

from tests.support.graphs import ops
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.capture.export import capture
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.passes import (
    PASSES,
    attention,
    clean,
    moe_route,
    quantize_weights,
    rope,
    run_passes,
)
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.schemes.registry import DEFAULT

FAMILIES = ["llama", "mixtral", "qwen3", "qwen3_moe", "olmoe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_graph_equals_the_model(family: str) -> None:
    model = tiny(family)
    graph = capture(kind_of(model)).graph_module
    ids = token_ids(1, 9)
    with torch.no_grad():
        expected = model.base_model(ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(graph(ids, torch.arange(9)[None]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_routing_is_fused(family: str) -> None:
    graph = capture(kind_of(tiny(family))).graph_module
    ids, positions = token_ids(1, 9), torch.arange(9)[None]
    clean.run(graph, PassContext())
    before, expected = ops(graph), graph(ids, positions)
    assert moe_route.run(graph, PassContext()) == 2
    graph.recompile()
    assert (
        before.count("topk") == 2 and "topk" not in ops(graph) and ops(graph).count("armllm::moe_route") == 2
    )
    torch.testing.assert_close(graph(ids, positions), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "olmoe"])
def test_float_weights_become_int4(family: str) -> None:
    ids, positions = token_ids(1, 6), torch.arange(6)[None]
    model = tiny(family)
    graph = capture(kind_of(model)).graph_module
    clean.run(graph, PassContext())
    before = ops(graph)
    assert quantize_weights.run(graph, PassContext()) == 0
    count = quantize_weights.run(graph, PassContext(scheme=DEFAULT))
    graph.recompile()
    after = ops(graph)
    routers = 2 if family == "olmoe" else 0
    assert after.count("linear") == routers
    assert after.count("armllm::int4_linear") == before.count("linear") - routers
    assert after.count("armllm::int4_moe") == before.count("armllm::experts") == routers
    assert count == after.count("armllm::int4_linear") + after.count("armllm::int4_moe")
    quantize(model, Recipe(importance=False), progress=False)  # a graph knows nothing of inputs
    twin = capture(kind_of(model)).graph_module
    assert torch.equal(graph(ids, positions), twin(ids, positions))


def test_attention_becomes_paged() -> None:
    graph = capture(kind_of(tiny("llama"))).graph_module
    ids, positions = token_ids(1, 9), torch.arange(9)[None]
    for one in (clean, rope):
        one.run(graph, PassContext())
    expected = graph(ids, positions)
    assert attention.run(graph, PassContext(paged=False)) == 0
    assert attention.run(graph, PassContext()) == 2
    graph.recompile()
    assert ops(graph).count("armllm::paged_attention") == 2 and "armllm::attention" not in ops(graph)
    cache = {"k_cache": torch.zeros(2, 3, 2, 16, 32), "v_cache": torch.zeros(2, 3, 2, 32, 16)}
    got = graph(
        ids,
        positions,
        slots=torch.arange(9) + 64,
        block_table=torch.tensor([[2]], dtype=torch.int32),
        query_start=torch.tensor([0, 9], dtype=torch.int32),
        seq_lens=torch.tensor([9], dtype=torch.int32),
        max_seq_len=9,
        **cache,
    )
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert cache["k_cache"][:, 2].abs().sum() > 0 and cache["k_cache"][:, :2].abs().sum() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_model_has_fused_ops_only(family: str) -> None:
    model = tiny(family)
    quantize(model, progress=False)
    graph = capture(kind_of(model)).graph_module
    context = run_passes(graph)
    views = {"select", "unsqueeze", "view", "reshape", "slice", "embedding", "add"}
    assert {name for name in ops(graph) if not name.startswith("armllm::")} <= views
    assert context.counts["attention"] == 2 and context.counts["norm"] >= 5
    assert list(context.counts) == [name for name, _ in PASSES]
