"""Arguments of calls by name."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

import torch_armllm.ops  # noqa: F401  (registers the operators)
from torch_armllm.ops.op_call import OpCall, in_order
from torch_armllm.passes.lib.graph import match

aten = torch.ops.aten


def _graph() -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    return graph, graph.placeholder("x")


def test_arguments_have_names_and_defaults() -> None:
    graph, x = _graph()
    rows = OpCall(graph.call_function(aten.slice.Tensor, (x, -1, 0)))
    assert (rows.self, rows.dim, rows.start, rows.end, rows.step) == (x, -1, 0, None, 1)
    assert rows.first is x
    wide = OpCall(graph.call_function(aten.gelu.default, (x,), {"approximate": "tanh"}))
    assert wide.approximate == "tanh"
    assert OpCall(graph.call_function(aten.gelu.default, (x,))).approximate == "none"
    part = OpCall(graph.call_function(operator.getitem, (x, 1)))
    assert (part.source, part.index) == (x, 1)


def test_an_unknown_name_is_refused() -> None:
    graph, x = _graph()
    with pytest.raises(AttributeError, match="aten.neg.default has no argument other; it has self"):
        _ = OpCall(graph.call_function(aten.neg.default, (x,))).other


def test_replacing_fills_what_lies_between() -> None:
    graph, x = _graph()
    other = graph.placeholder("sinks")
    node = graph.call_function(torch.ops.armllm.paged_attention.default, (x,) * 6 + (64, 0.5))
    attention = OpCall(node)
    assert [name for name in attention.names if attention.gives(name)] == list(attention.names)[:8]
    attention.replace(scale=0.25, sinks=other)
    assert node.args == (*(x,) * 6, 64, 0.25, 0, 0.0, other)
    assert attention.sinks is other
    assert attention.gives("sinks")
    assert not attention.gives("window")
    attention.replace(group_size=2)
    assert (attention.group_size, attention.skipped_heads, len(node.args)) == (2, 0, 20)


def test_a_match_compares_arguments_by_name() -> None:
    graph, x = _graph()
    node = graph.call_function(aten.transpose.int, (x, 1, 2))
    assert match(node, aten.transpose.int, dim0=1, dim1=2) is not None
    assert match(node, aten.transpose.int, dim0=2) is None
    assert match(node, aten.neg.default) is None
    assert match(x, aten.transpose.int) is None
    assert match(None, aten.transpose.int) is None


def test_arguments_by_name_are_put_in_order() -> None:
    op = torch.ops.armllm.rms_norm.default
    assert in_order(op, {"eps": 3.0, "x": 1, "weight": 2}) == (1, 2, 3.0)
    assert in_order(op, {"eps": 3.0, "x": 1, "weight": 2, "weight_offset": 0.0}) == (1, 2, 3.0)
    assert in_order(op, {"eps": 3.0, "x": 1, "weight": 2, "weight_offset": 1.0}) == (1, 2, 3.0, 1.0)
    attention = torch.ops.armllm.paged_attention.default
    needed = ("q", "k_cache", "v_cache", "block_table", "query_start", "seq_lens", "max_seq_len", "scale")
    named = dict.fromkeys(needed, 1)
    assert in_order(attention, {**named, "sinks": 7}) == (*[1] * 8, 0, 0.0, 7)
    with pytest.raises(TypeError, match="has no argument sink; it has q, k_cache"):
        in_order(attention, {**named, "sink": 7})
    with pytest.raises(TypeError, match="needs scale"):
        in_order(attention, {name: 1 for name in needed if name != "scale"})
