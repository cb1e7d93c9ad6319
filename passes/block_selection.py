"""Selection of blocks by indexers: each marker becomes a write of the indexer's keys and ``select_blocks``.

The graph gets one more input: ``index_keys`` holds the keys of all indexers, ``(indexers, blocks, block size,
index size)``, in the blocks of the keys and values.
"""

from __future__ import annotations

import torch
from torch import fx

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, tokens_first, value
from torch_armllm.passes.lib.index_keys import index_sizes, selections, write_keys
from torch_armllm.passes.lib.paged_inputs import add_index_input, paged_inputs

armllm = torch.ops.armllm
_STEPS = ("block_table", "query_start", "seq_lens", "max_seq_len")


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all markers; does nothing before attention is rewritten."""
    graph = module.graph
    found, inputs = selections(module, armllm.block_selection.default), paged_inputs(module)
    if not found or not inputs:
        return 0
    dtype = value(inputs["k_cache"]).dtype
    if not dtype.is_floating_point:
        dtype = value(OpCall(found[0]).k).dtype
    caches = add_index_input(module, found[0], dtype, index_sizes(module))
    for number, marker in enumerate(found):
        q, k, *choice = marker.args
        with graph.inserting_before(marker):
            cache = call(graph, aten.select.int, caches, 0, number)
            keys = call(graph, aten.select.int, tokens_first(graph, k), 1, 0)
            write_keys(graph, keys, cache, inputs["slots"])
            steps = (inputs[name] for name in _STEPS)
            chosen = call(graph, armllm.select_blocks.default, tokens_first(graph, q), cache, *steps, *choice)
        marker.replace_all_uses_with(chosen)
        graph.erase_node(marker)
    graph.eliminate_dead_code()
    return len(found)
