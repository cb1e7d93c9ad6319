"""Absorbed latent attention (MLA): the cache holds latents; queries and outputs are projected instead.

An expanded key of head h is ``[W_k[h] · latent, k_rope]`` and its value ``W_v[h] · latent``, so

    q · k = (q_nope · W_k[h]) · latent + q_rope · k_rope        Σ w · v = W_v[h] · Σ w · latent

Each new token is projected once, whereas `expand_kv` would expand every cached position.  The graph gets the
inputs of `torch_armllm.passes.lib.paged_inputs`; ``k_cache`` holds the latents of all layers,
``(layers, blocks, block size, rank + rope size)``, and ``k_cache_1`` … those of other sizes.  Rows of int8
have 8 more bytes, for scales.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.capture.markers.mla import float_weight
from torch_armllm.ops.linear import pack_int8
from torch_armllm.ops.mla import latent_width
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    as_float32,
    aten,
    call,
    call_op,
    constant,
    drop_unused,
    is_op,
    match,
    new_constant,
    tokens_first,
    value,
    without_token_factor,
)
from torch_armllm.passes.lib.latents import (
    LatentAttention,
    find_latent_attention,
    latent_layout,
    not_absorbed_reason,
)
from torch_armllm.passes.lib.mla_rope import MlaRopeTables, match_rotation
from torch_armllm.passes.lib.paged_inputs import BLOCK_SIZE, add_paged_inputs, cache_name
from torch_armllm.passes.lib.rope_match import joined_parts, joins_last_dim

armllm = torch.ops.armllm


def _tokens_first(graph: fx.Graph, node: Any) -> Node:
    """``(1, heads, T, size)`` → ``(T, heads, size)``; parts of a split become slices of its source."""
    part = match(node, operator.getitem)
    split = None if part is None else match(part.source, aten.split_with_sizes.default)
    if part is not None and split is not None and split.dim in (-1, 3):
        begin = sum(split.split_sizes[: part.index])
        tokens = _tokens_first(graph, split.self)
        return call(graph, aten.slice.Tensor, tokens, -1, begin, begin + split.split_sizes[part.index])
    return tokens_first(graph, node)


def _single_head(graph: fx.Graph, node: Any) -> Node:
    """``(1, 1, T, size)`` → ``(T, size)``."""
    if is_op(node, aten.view.default, aten.reshape.default):
        source = value(OpCall(node).self)
        if source.dim() == 3 and source.shape[-1] == value(node).shape[-1]:
            return call(graph, aten.select.int, OpCall(node).self, 0, 0)
    return call(graph, aten.select.int, _tokens_first(graph, node), 1, 0)


def leads_only_to(x: Node, end: Node) -> bool:
    """True if all users of x lead to ``end``."""
    pending, visited = [x], {end}
    while pending:
        for user in pending.pop().users:
            if user.op == "output" or len(visited) > 16:
                return False
            if user not in visited:
                visited.add(user)
                pending.append(user)
    return True


def _split_query(graph: fx.Graph, node: Any, nope_size: int) -> tuple[Node, Any]:
    """Splits queries: without position ``(T, heads, nope_size)``, rotary ``(1, heads, T, rope_size)``."""
    if len(parts := joined_parts(node)) == 2 and joins_last_dim(node):
        nope, rope = parts
        if value(nope).shape[-1] == nope_size:
            return _tokens_first(graph, nope), rope
    size = int(value(node).shape[-1])
    nope = call(graph, aten.slice.Tensor, _tokens_first(graph, node), -1, 0, nope_size)
    return nope, call(graph, aten.slice.Tensor, node, -1, nope_size, size)


def _pack_heads_int8(weight: Tensor) -> Tensor:
    """Packs float weights ``(heads, N, K)`` as INT8 with one scale per row."""
    scales = weight.abs().amax(-1).clamp_(min=1e-30) / 127
    q = torch.round(weight / scales[..., None]).clamp_(-127, 127).to(torch.int8)
    return pack_int8(q, scales)


class _Absorption:
    """Rewrites the attentions of one graph."""

    def __init__(self, module: fx.GraphModule, inputs: dict[str, Node]) -> None:
        self.module = module
        self.graph = module.graph
        self.inputs = inputs
        self.tables = MlaRopeTables(module)

    def _heads_linear(self, before: Node, x: Node, weight: Tensor, name: str, packed: bool) -> Node:
        """Inserts ``x · weightᵀ`` for each head."""
        if not packed:
            packed_weight = new_constant(self.module, before, name, weight.contiguous())
            with self.graph.inserting_before(before):
                return call(self.graph, armllm.dense_heads_linear.default, x, packed_weight)
        packed_weight = new_constant(self.module, before, name, _pack_heads_int8(weight))
        with self.graph.inserting_before(before):
            return call(self.graph, armllm.int8_heads_linear.default, x, packed_weight, int(weight.shape[1]))

    def _rotated(self, before: Node, q_rope: Any, k_rope: Any) -> tuple[Node, Node]:
        """Returns the rotary parts ``(T, heads, rope_size)`` and ``(T, rope_size)``.

        Recognized rotations are done in place.
        """
        q, k = match_rotation(q_rope), match_rotation(k_rope)
        graph = self.graph
        private = q and k and leads_only_to(q.x, q_rope) and leads_only_to(k.x, k_rope)
        table = self.tables.get(q, before) if q and k and private and q.angles == k.angles else None
        with graph.inserting_before(before):
            if q is None or k is None or table is None:
                return _tokens_first(graph, q_rope), _single_head(graph, k_rope)
            queries, keys = _tokens_first(graph, q.x), _single_head(graph, k.x)
            one_head = call(graph, aten.unsqueeze.default, keys, 1)
            call(graph, armllm.rope_.default, queries, one_head, *table, q.interleaved, q.unzip)
            return queries, keys

    def absorb(self, latent: LatentAttention, cache_input: Node, layer: int) -> None:
        """Replaces one attention by its absorbed form, on a layer of one of the caches."""
        graph, node = self.graph, latent.attention
        marker, expansion = OpCall(node), OpCall(latent.expansion)
        heads, nope_size, value_size = latent.up
        outputs = heads * (nope_size + value_size)
        up_projection = constant(self.module, expansion.weight)
        assert up_projection is not None
        weight = float_weight(up_projection, latent.sizes[0], outputs, expansion.scheme)
        keys, values = weight.view(heads, -1, latent.sizes[0]).split([nope_size, value_size], 1)
        query, factor = without_token_factor(marker.q)
        with graph.inserting_before(node):
            q_nope, q_rope = _split_query(graph, query, nope_size)
        queries, rotated = self._rotated(node, q_rope, expansion.k_rope)
        packed = bool(expansion.scheme)
        q_latent = self._heads_linear(node, q_nope, keys.transpose(1, 2), "mla_keys", packed)
        sinks = as_float32(self.module, node, "sinks", marker.sinks)
        with graph.inserting_before(node):
            if factor is not None:
                by_token = tokens_first(graph, factor)
                q_latent, queries = (call(graph, aten.mul.Tensor, x, by_token) for x in (q_latent, queries))
            cache = call(graph, aten.select.int, cache_input, 0, layer)
            rows = _single_head(graph, expansion.latent)
            call(graph, armllm.mla_write.default, rows, rotated, cache, self.inputs["slots"])
            sequences = ("block_table", "query_start", "seq_lens", "max_seq_len")
            mixed = call_op(
                graph,
                armllm.mla_attention.default,
                **{name: self.inputs[name] for name in sequences},
                q_latent=q_latent,
                q_rope=queries,
                cache=cache,
                scale=marker.scale,
                sinks=sinks,
                selected=marker.selected,
                window=marker.window,
            )
        out = self._heads_linear(node, mixed, values, "mla_values", packed)
        with graph.inserting_before(node):
            node.replace_all_uses_with(call(graph, aten.unsqueeze.default, out, 0))
        graph.erase_node(node)
        drop_unused(self.module, str(expansion.weight.target))


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all latent attentions; does nothing if the context is not paged or one is not supported."""
    attentions = find_latent_attention(module)
    if not context.paged or not attentions or not_absorbed_reason(module) is not None:
        return 0
    latents: Any = OpCall(attentions[0].expansion).latent
    layout = latent_layout(attentions)
    dtype = context.cache_dtype or value(latents).dtype
    caches = {
        cache_name("k_cache", group): (
            dtype,
            (layout.count(group), 8, BLOCK_SIZE, latent_width(sum(sizes), dtype)),
        )
        for group, sizes in enumerate(layout.sizes)
    }
    inputs = add_paged_inputs(module, latents, value(latents).shape[2], caches)
    absorption = _Absorption(module, inputs)
    for latent in attentions:
        group, number = layout.positions[latent.layer]
        absorption.absorb(latent, inputs[cache_name("k_cache", group)], number)
    module.graph.eliminate_dead_code()
    return len(attentions)
