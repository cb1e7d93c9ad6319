"""Graph passes: rewrites of a captured graph, in the order of `PASSES`.

A pass that finds no match leaves the graph unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

import torch_armllm.capture.markers.attention
import torch_armllm.capture.markers.block_selection
import torch_armllm.capture.markers.compression
import torch_armllm.capture.markers.encoder_states
import torch_armllm.capture.markers.experts
import torch_armllm.capture.markers.given_rows
import torch_armllm.capture.markers.mla
import torch_armllm.capture.markers.recurrent_ops
import torch_armllm.capture.markers.selection  # (registers the marker ops that the passes match)
import torch_armllm.capture.markers.token_types
import torch_armllm.ops  # noqa: F401  (registers the ops that they insert)
from torch_armllm.passes import (
    add_norm,
    angle_tables,
    attention,
    block_selection,
    clean,
    constant_masks,
    dense_experts,
    dense_linear,
    encoder_attention,
    entries,
    fold_constants,
    gated_mlp,
    gelu,
    heads_linear,
    lookups,
    masked_writes,
    mla,
    moe_route,
    norm,
    qkv,
    quantize_weights,
    recurrent,
    repeated_rows,
    rope,
    selection,
    share_reorders,
    sinkhorn,
    tensor_parallel,
    token_id_tables,
    trailing_rope,
    transpose_last,
    uniform_values,
    weight_first,
)
from torch_armllm.passes.lib.context import PassContext

Pass = Callable[[fx.GraphModule, PassContext], int]
"""Rewrites a graph in place, and returns the number of rewrites."""

PASSES: tuple[tuple[str, Pass], ...] = (
    ("clean", clean.run),
    ("masked_writes", masked_writes.run),
    ("uniform_values", uniform_values.run),
    ("weight_first", weight_first.run),
    ("repeated_rows", repeated_rows.run),
    ("token_id_tables", token_id_tables.run),
    ("quantize_weights", quantize_weights.run),
    ("gelu", gelu.run),
    ("norm", norm.run),
    ("sinkhorn", sinkhorn.run),
    ("share_reorders", share_reorders.run),
    ("mla", mla.run),
    ("selection", selection.run),
    ("fold_constants", fold_constants.run),
    ("constant_masks", constant_masks.run),
    ("lookups", lookups.run),
    ("transpose_last", transpose_last.run),
    ("rope", rope.run),
    ("trailing_rope", trailing_rope.run),
    ("angle_tables", angle_tables.run),
    ("gated_mlp", gated_mlp.run),
    ("qkv", qkv.run),
    ("dense_experts", dense_experts.run),
    ("moe_route", moe_route.run),
    ("dense_linear", dense_linear.run),
    ("heads_linear", heads_linear.run),
    ("add_norm", add_norm.run),
    ("entries", entries.run),
    ("attention", attention.run),
    ("encoder_attention", encoder_attention.run),
    ("block_selection", block_selection.run),
    ("recurrent", recurrent.run),
    ("tensor_parallel", tensor_parallel.run),
    ("dead_code", clean.run),
)


def run_passes(module: fx.GraphModule, context: PassContext | None = None) -> PassContext:
    """Runs all passes on a graph in place, and returns the context with each pass's number of rewrites."""
    context = context or PassContext()
    for _ in run_each_pass(module, context):
        pass
    module.graph.lint()
    module.recompile()
    return context


def run_each_pass(module: fx.GraphModule, context: PassContext) -> Iterator[str]:
    """Runs the passes on a graph in place, and yields the name of each pass after it ran."""
    for name, run in PASSES:
        if name in context.skip:
            continue
        context.counts[name] = run(module, context)
        yield name


__all__ = ["PASSES", "Pass", "PassContext", "run_each_pass", "run_passes"]
