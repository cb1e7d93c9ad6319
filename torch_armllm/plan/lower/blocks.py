"""Attention to blocks of positions that indexers select."""

from __future__ import annotations

import torch

from torch_armllm.ops.op_call import OpCall
from torch_armllm.plan.lower.call import cache_fields, select_writer, write_call, writers
from torch_armllm.plan.lowering import Lowering
from torch_armllm.plan.program import Operand

armllm = torch.ops.armllm


def _attention(low: Lowering, call: OpCall) -> Operand:
    queries, blocks = low.rows(call.q), low.rows(call.chosen)
    q_heads, head_size = queries.inner[-2:]
    choosers, top_k = blocks.inner[-2:]
    sizes = {"q_heads": q_heads, "head_size": head_size, "choosers": choosers, "top_k": top_k}
    return write_call(low, call, "block_attention", q=queries, **cache_fields(low, call), **sizes)


WRITERS = writers(
    {
        armllm.select_blocks.default: select_writer("select_blocks"),
        armllm.block_attention.default: _attention,
    }
)
