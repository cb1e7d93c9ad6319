"""Graph of fused ops → program of a native plan.

What instruction each operator becomes is said in a file a family of ops; each has a table of its operators.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_armllm.plan.fuse_norms import fuse_norms
from torch_armllm.plan.lower import (
    attention,
    elementwise,
    embedding,
    linear,
    mla,
    moe,
    norm,
    views,
)
from torch_armllm.plan.lowering import Lowering, Writer
from torch_armllm.plan.program import Program

WRITERS: dict[Any, Writer] = {
    **views.WRITERS,
    **embedding.WRITERS,
    **norm.WRITERS,
    **linear.WRITERS,
    **moe.WRITERS,
    **attention.WRITERS,
    **mla.WRITERS,
    **elementwise.WRITERS,
}
"""What writes the instruction of each operator."""


def lower(module: fx.GraphModule) -> Program:
    """Writes a captured, rewritten and paged graph as a program.

    Raises:
        Unlowerable: some node has no instruction.
    """
    program = Lowering(module, WRITERS).run()
    fuse_norms(program)
    return program
