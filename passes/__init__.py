"""Rewrites of a captured graph, in order; one that finds nothing to do changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

import torch_armllm.hf.attention
import torch_armllm.hf.experts
import torch_armllm.hf.mla  # (the marker ops that the passes look for)
import torch_armllm.ops  # noqa: F401  (the operators that they insert)
from torch_armllm.passes import (
    add_norm,
    attention,
    clean,
    dense,
    every_expert,
    fold,
    gated,
    gelu,
    int4,
    layout,
    mla,
    norm,
    order,
    qkv,
    rope,
    route,
    token_ids,
)
from torch_armllm.passes.match import PassContext

Pass = Callable[[fx.GraphModule, PassContext], int]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("clean", clean.run),
    ("token_ids", token_ids.run),
    ("int4", int4.run),
    ("gelu", gelu.run),
    ("norm", norm.run),
    ("order", order.run),
    ("mla", mla.run),
    ("fold", fold.run),
    ("layout", layout.run),
    ("rope", rope.run),
    ("gated", gated.run),
    ("qkv", qkv.run),
    ("every_expert", every_expert.run),
    ("route", route.run),
    ("dense", dense.run),
    ("add_norm", add_norm.run),
    ("attention", attention.run),
    ("dead_code", clean.run),
)


def run_passes(module: fx.GraphModule, context: PassContext | None = None) -> PassContext:
    """Runs all passes over a graph, in place, and returns the context with the number of rewrites of each."""
    context = context or PassContext()
    for name, run in PASSES:
        context.counts[name] = run(module, context)
        module.graph.lint()
    module.recompile()
    return context


__all__ = ["PASSES", "Pass", "PassContext", "run_passes"]
