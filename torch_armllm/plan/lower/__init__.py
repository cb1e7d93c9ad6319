"""Lowering of a graph of fused ops to the program of a native plan.

Each family of ops has a file with a table from operators to the functions that write their instructions.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_armllm.plan.fuse_norms import fuse_norms
from torch_armllm.plan.join_adapters import join_adapters
from torch_armllm.plan.lower import (
    attention,
    blocks,
    elementwise,
    embedding,
    entries,
    linear,
    mla,
    moe,
    norm,
    recurrent,
    reductions,
    views,
)
from torch_armllm.plan.lowering import Lowering, Writer
from torch_armllm.plan.program import Program
from torch_armllm.plan.share_rows import share_rows

WRITERS: dict[Any, Writer] = {
    **views.WRITERS,
    **embedding.WRITERS,
    **norm.WRITERS,
    **linear.WRITERS,
    **moe.WRITERS,
    **attention.WRITERS,
    **blocks.WRITERS,
    **mla.WRITERS,
    **recurrent.WRITERS,
    **entries.WRITERS,
    **elementwise.WRITERS,
    **reductions.WRITERS,
}
"""Functions that write each operator's instruction."""


def lower(module: fx.GraphModule) -> Program:
    """Returns the program of a captured, rewritten and paged graph.

    Raises:
        Unlowerable: some node has no instruction.
    """
    program = Lowering(module, WRITERS).lower()
    fuse_norms(program)  # it counts the instructions as they were written
    join_adapters(program)
    share_rows(program)
    return program
