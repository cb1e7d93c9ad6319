"""Graph of fused ops → program of a native plan: what instruction each operator becomes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.fuse import fuse_norms
from torch_armllm.lowering import CACHES, CacheLayer, Lowering, Unlowerable
from torch_armllm.ops.linear import SCHEMES
from torch_armllm.passes.match import aten, constant
from torch_armllm.program import ACTIVATIONS, NOTHING, SCORINGS, Opcode, Operand, Program


def _view(low: Lowering, node: Node, source: Any, *_: Any) -> Operand:
    return low.same_rows(node, source)


def _select(low: Lowering, node: Node, source: Node, dim: int, index: int) -> Any:
    if source.op == "placeholder" and source.name in CACHES and dim == 0:
        return CacheLayer(source.name, index)
    if dim != 0 or index != 0 or source.meta["val"].shape[0] != 1:
        raise Unlowerable(f"{node} selects along dimension {dim}")
    return low.same_rows(node, source)


def _slice(
    low: Lowering, node: Node, source: Any, dim: int = 0, begin: Any = 0, end: Any = None, step: int = 1
) -> Operand:
    rows = low.rows(source)
    val = source.meta["val"]
    if dim % val.dim() != val.dim() - 1 or len(rows.inner) != 1 or step != 1:
        raise Unlowerable(f"{node} slices along dimension {dim}")
    width = int(node.meta["val"].shape[-1])
    return Operand(
        rows.space, rows.index, rows.dtype, (width,), rows.column + int(begin or 0), rows.stride, rows.storage
    )


def _getitem(low: Lowering, node: Node, source: Node, index: int) -> Any:
    return low.known[source][index]


def _embedding(low: Lowering, node: Node, table: Node, ids: Node, *_: Any) -> Operand:
    weight = low.weight(table)
    out = low.new(node)
    vocabulary = constant(low.module, table).shape[0]  # type: ignore[union-attr]
    low.emit(Opcode.EMBED, out, low.rows(ids), weight, out.width, int(vocabulary))
    return out


def _split_embedding(low: Lowering, node: Node, ids: Node, table: Node, rest: Node, dtype: str) -> Operand:
    packed, further = low.weight(table), low.weight(rest)
    out = low.new(node)
    vocabulary = low.program.constants[further.index].shape[0]
    low.emit(
        Opcode.SPLIT_EMBED, out, low.rows(ids), packed, further, packed.stride, out.width, int(vocabulary)
    )
    return out


def _norm(
    low: Lowering,
    node: Node,
    opcode: Opcode,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    eps: float,
    offset: float,
) -> Any:
    rows = low.rows(x)
    width = rows.inner[-1]
    added = low.rows(residual) if residual is not None else NOTHING
    val = node.meta["val"] if residual is None else node.meta["val"][0]
    out = low.new(node, val)
    total = low.new(node, val) if residual is not None else NOTHING
    per_token = rows.width // width
    low.emit(
        opcode,
        rows,
        out,
        added,
        total,
        low.weight(weight),
        low.weight(bias),
        per_token,
        width,
        float(eps),
        float(offset),
    )
    return out if residual is None else (out, total)


def _rms_norm(low: Lowering, node: Node, x: Any, weight: Any, eps: float, offset: float = 0.0) -> Any:
    return _norm(low, node, Opcode.RMS_NORM, x, None, weight, None, eps, offset)


def _add_rms_norm(
    low: Lowering, node: Node, x: Any, r: Any, weight: Any, eps: float, offset: float = 0.0
) -> Any:
    return _norm(low, node, Opcode.RMS_NORM, x, r, weight, None, eps, offset)


def _layer_norm(low: Lowering, node: Node, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return _norm(low, node, Opcode.LAYER_NORM, x, None, weight, bias, eps, 0.0)


def _add_layer_norm(low: Lowering, node: Node, x: Any, r: Any, weight: Any, bias: Any, eps: float) -> Any:
    return _norm(low, node, Opcode.LAYER_NORM, x, r, weight, bias, eps, 0.0)


def _linear(
    low: Lowering, node: Node, x: Any, weight: Any, size: int, scheme: str, bias: Any, residual: Any
) -> Operand:
    rows, packed = low.rows(x), low.weight(weight)
    added = low.rows(residual) if residual is not None else NOTHING
    out = low.new(node)
    low.emit(
        Opcode.LINEAR,
        rows,
        out,
        added,
        packed,
        low.weight(bias),
        packed.stride,
        SCHEMES[scheme],
        rows.width,
        size,
    )
    return out


def _int4_linear(
    low: Lowering,
    node: Node,
    x: Any,
    weight: Any,
    size: int,
    scheme: str,
    bias: Any = None,
    residual: Any = None,
) -> Operand:
    return _linear(low, node, x, weight, size, scheme, bias, residual)


def _int8_linear(
    low: Lowering, node: Node, x: Any, weight: Any, size: int, bias: Any = None, residual: Any = None
) -> Operand:
    return _linear(low, node, x, weight, size, "i8", bias, residual)


def _gated_linear(
    low: Lowering,
    node: Node,
    x: Any,
    weight: Any,
    size: int,
    scheme: str,
    act: str,
    gate: Any = None,
    up: Any = None,
) -> Operand:
    rows, packed = low.rows(x), low.weight(weight)
    out = low.new(node)
    low.emit(
        Opcode.GATED_LINEAR,
        *(rows, out, packed, low.weight(gate), low.weight(up)),
        *(packed.stride, SCHEMES[scheme], rows.width, size, ACTIVATIONS[act]),
    )
    return out


def _dense_linear(low: Lowering, node: Node, x: Any, weight: Any, bias: Any = None) -> Operand:
    rows = low.rows(x)
    out = low.new(node)
    low.emit(Opcode.DENSE_LINEAR, rows, out, low.weight(weight), low.weight(bias), rows.width, out.width)
    return out


def _moe(
    low: Lowering, node: Node, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, intermediate: int,
        scheme: str,
    act: str, limit: float = 7.0, gate_up_bias: Any = None, down_bias: Any = None,
) -> Operand:  # fmt: skip
    rows, chosen, shares = low.rows(x), low.rows(ids), low.rows(weights)
    if chosen.dtype != torch.int32 or shares.dtype != torch.float32 or chosen.stride != chosen.width:
        raise Unlowerable("the router's choice is not that of moe_route")
    first, second = low.weight(gate_up), low.weight(down)
    tensors = [low.program.constants[w.index] for w in (first, second)]
    out = low.new(node)
    low.emit(
        Opcode.MOE,
        *(rows, out, chosen, shares, first, second, low.weight(gate_up_bias), low.weight(down_bias)),
        *(t.stride(0) for t in tensors),
        *(t.stride(1) for t in tensors),
        *(
            SCHEMES[scheme],
            tensors[0].shape[0],
            chosen.width,
            rows.width,
            intermediate,
            ACTIVATIONS[act],
            float(limit),
        ),
    )
    return out


def _route(
    low: Lowering, node: Node, logits: Any, top_k: int, scoring: str, renormalize: bool, scale: float = 1.0,
    correction: Any = None, groups: int = 1, top_k_groups: int = 1,
) -> Any:  # fmt: skip
    rows = low.rows(logits)
    weights, ids = (low.new(node, val) for val in node.meta["val"])
    low.emit(
        Opcode.ROUTE,
        *(rows, weights, ids, low.weight(correction, torch.float32)),
        *(rows.width, top_k, groups, top_k_groups, SCORINGS[scoring], int(renormalize), float(scale)),
    )
    return weights, ids


def _rope_table(low: Lowering, node: Node, positions: Any, inv_freq: Any, scaling: float = 1.0) -> Any:
    cos, sin = (low.new(node, val) for val in node.meta["val"])
    low.emit(
        Opcode.ROPE_TABLE,
        low.rows(positions),
        low.weight(inv_freq, torch.float32),
        cos,
        sin,
        cos.width,
        float(scaling),
    )
    return cos, sin


def _rope(low: Lowering, node: Node, q: Any, k: Any, cos: Any, sin: Any, interleaved: bool = False) -> None:
    queries, keys, table = low.rows(q), low.rows(k), low.rows(cos)
    heads, size = queries.inner[-2:]
    low.emit(
        Opcode.ROPE,
        *(
            queries,
            keys,
            table,
            low.rows(sin),
            heads,
            keys.inner[-2],
            size,
            2 * table.width,
            int(interleaved),
        ),
    )


def _cache(low: Lowering, k: Any, v: Any, k_scales: Any, v_scales: Any) -> tuple[int, ...]:
    """The cache's fields: inputs of keys and values, layer, inputs of scales or -1."""
    keys, values = low.known[k], low.known[v]
    scales = [-1 if s is None else low.known[s].input for s in (k_scales, v_scales)]
    return (keys.input, values.input, keys.layer, *scales)


def _kv_write(
    low: Lowering, node: Node, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any,
    k_scales: Any = None, v_scales: Any = None,
) -> None:  # fmt: skip
    keys = low.rows(k)
    cache = _cache(low, k_cache, v_cache, k_scales, v_scales)
    low.emit(Opcode.KV_WRITE, keys, low.rows(v), low.rows(slots), *cache, keys.inner[-1])


def _attention(
    low: Lowering, node: Node, q: Any, k_cache: Any, v_cache: Any, table: Any, starts: Any, lengths: Any,
        longest: Any,
    scale: float, window: int = 0, softcap: float = 0.0, sinks: Any = None,
    k_scales: Any = None, v_scales: Any = None,
) -> Operand:  # fmt: skip
    queries = low.rows(q)
    cache = _cache(low, k_cache, v_cache, k_scales, v_scales)
    out = low.new(node)
    inputs = [low.rows(n).index for n in (table, starts, lengths)]
    low.emit(
        Opcode.ATTENTION,
        *(queries, out, low.weight(sinks, torch.float32), *cache, *inputs),
        *(*queries.inner[-2:], window, float(scale), float(softcap)),
    )
    return out


def _gated_act(low: Lowering, node: Node, gate: Any, up: Any, act: str) -> Operand:
    out = low.new(node)
    low.emit(Opcode.GATED_ACT, low.rows(gate), low.rows(up), out, out.width, ACTIVATIONS[act])
    return out


def _add(low: Lowering, node: Node, a: Any, b: Any, alpha: float = 1) -> Operand:
    first, second = low.rows(a), low.rows(b)
    if alpha != 1 or first.width != second.width or first.dtype != second.dtype:
        raise Unlowerable(f"{node} is not a plain addition of rows")
    out = low.new(node)
    low.emit(Opcode.ADD, first, second, out, out.width)
    return out


def _writers() -> dict[Any, Callable[..., Any]]:
    armllm = torch.ops.armllm
    views = (
        aten.view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.contiguous.default,
    )
    return {
        **{view: _view for view in views},
        aten.select.int: _select,
        aten.slice.Tensor: _slice,
        operator.getitem: _getitem,
        aten.embedding.default: _embedding,
        aten.add.Tensor: _add,
        armllm.split_embedding.default: _split_embedding,
        armllm.rms_norm.default: _rms_norm,
        armllm.add_rms_norm.default: _add_rms_norm,
        armllm.layer_norm.default: _layer_norm,
        armllm.add_layer_norm.default: _add_layer_norm,
        armllm.int4_linear.default: _int4_linear,
        armllm.int8_linear.default: _int8_linear,
        armllm.int4_gated_linear.default: _gated_linear,
        armllm.dense_linear.default: _dense_linear,
        armllm.int4_moe.default: _moe,
        armllm.moe_route.default: _route,
        armllm.rope_table.default: _rope_table,
        armllm.rope_.default: _rope,
        armllm.kv_write.default: _kv_write,
        armllm.paged_attention.default: _attention,
        armllm.gated_act.default: _gated_act,
    }


WRITERS = _writers()
"""What writes the instruction of each operator."""


def lower(module: fx.GraphModule) -> Program:
    """Writes a captured, rewritten and paged graph as a program.

    Raises:
        Unlowerable: some node has no instruction.
    """
    program = Lowering(module, WRITERS).run()
    fuse_norms(program)
    return program
