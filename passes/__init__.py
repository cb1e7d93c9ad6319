"""Rewrites of a captured graph, in order; one that finds nothing to do changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

import torch_armllm.capture.markers.attention
import torch_armllm.capture.markers.experts
import torch_armllm.capture.markers.mla  # (the marker ops that the passes look for)
import torch_armllm.ops  # noqa: F401  (the operators that they insert)
from torch_armllm.passes import (
    add_norm,
    attention,
    clean,
    dense_experts,
    dense_linear,
    fold_constants,
    gated_mlp,
    gelu,
    mla,
    moe_route,
    norm,
    norm_before_transpose,
    qkv,
    quantize_weights,
    rope,
    share_reorders,
    token_id_tables,
)
from torch_armllm.passes.lib.context import PassContext

Pass = Callable[[fx.GraphModule, PassContext], int]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("clean", clean.run),
    ("token_ids", token_id_tables.run),
    ("int4", quantize_weights.run),
    ("gelu", gelu.run),
    ("norm", norm.run),
    ("order", share_reorders.run),
    ("mla", mla.run),
    ("fold", fold_constants.run),
    ("layout", norm_before_transpose.run),
    ("rope", rope.run),
    ("gated", gated_mlp.run),
    ("qkv", qkv.run),
    ("every_expert", dense_experts.run),
    ("route", moe_route.run),
    ("dense", dense_linear.run),
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
