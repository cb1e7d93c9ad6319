"""Attention of a decoder to an encoder's tokens: each marker op becomes ``paged_attention``.

The cache is one of its own.  No step writes to it: `torch_armllm.kv_cache.encoder_keys` does, once for each
input of the encoder.
"""

from __future__ import annotations

import torch
from torch import fx

from torch_armllm.capture.markers.encoder_states import encoder_attentions
from torch_armllm.ops.attention import kv_cache_shapes
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.encoder_layout import encoder_sizes
from torch_armllm.passes.lib.graph import aten, call, tokens_first, value
from torch_armllm.passes.lib.paged_inputs import BLOCK_SIZE, add_encoder_inputs, paged_inputs


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all attentions to an encoder's tokens; does nothing if the context is not paged."""
    graph, nodes = module.graph, encoder_attentions(module.graph)
    if not context.paged or not nodes:
        return 0
    layers, heads, head_size, value_size = encoder_sizes(module)
    first = OpCall(nodes[0])
    dtype = context.cache_dtype or value(first.k).dtype
    keys, values, _ = kv_cache_shapes(8, heads, head_size, value_size, BLOCK_SIZE, dtype, layers)
    tokens = value(first.q).shape[2]
    inputs = add_encoder_inputs(module, nodes[0], tokens, dtype, (keys, values))
    steps = [inputs[f"encoder_{name}"] for name in ("table", "starts", "lens")]
    longest = paged_inputs(module)["max_seq_len"]
    for node in nodes:
        marker = OpCall(node)
        with graph.inserting_before(node):
            caches = [
                call(graph, aten.select.int, inputs[f"encoder_{n}"], 0, marker.layer) for n in ("k", "v")
            ]
            queries = tokens_first(graph, marker.q)
            op = torch.ops.armllm.paged_attention.default
            out = call(graph, op, queries, *caches, *steps, longest, marker.scale)
            node.replace_all_uses_with(call(graph, aten.unsqueeze.default, out, 0))
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return len(nodes)
