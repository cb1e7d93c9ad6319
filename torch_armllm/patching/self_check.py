"""Bound of rounding in a plan's results, and the search for the pass that exceeds it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from torch_armllm.capture.sample import Sample
from torch_armllm.passes import PassContext, run_each_pass
from torch_armllm.passes.lib.paged_inputs import paged_inputs

REQUIRED_PASSES = frozenset(
    {
        *("clean", "quantize_weights", "entries", "attention", "selection", "block_selection", "recurrent"),
        *("encoder_attention", "tensor_parallel"),
        "dead_code",
    }
)
"""Passes that a plan cannot do without."""

_CACHE_ROUNDING = {torch.int8: 0.2, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Error that a cache adds whose dtype is narrower than the model's."""


def tolerance(sample: Sample, dtype: torch.dtype, quantized: bool, cache_dtype: torch.dtype) -> float:
    """Returns the error up to which a plan's difference can be rounding.

    The constants are a few times the largest errors of correct plans over all families of transformers, tiny
    and random.  In float32 they are below 1e-5; activations of quantized layers that round to the neighboring
    integer make them 1e-2, and 8e-2 in one model.  Without the floor, correct plans differ by up to 2.1 times
    the sample's rounding: 32 layers with routers in bfloat16.

    Args:
        sample: results of the captured graph.
        dtype: dtype of the model's hidden states.
        quantized: whether layers are quantized.
        cache_dtype: dtype of the KV cache.
    """
    floor = 0.1 if quantized else 5e-2 if dtype.itemsize < 4 else 2e-4
    cache = _CACHE_ROUNDING.get(cache_dtype, 0.0) if cache_dtype != dtype else 0.0
    return floor + cache + 2 * sample.rounding


@torch.no_grad()
def find_guilty_pass(
    graph: fx.GraphModule, context: PassContext, error: Callable[[fx.GraphModule], float], bound: float
) -> str | None:
    """Runs the passes on a graph until its results change.

    Args:
        graph: a captured graph; it is rewritten.
        context: options of the passes.
        error: computes the error of a graph after a pass.
        bound: largest error that is no change.

    Returns:
        The name of the first pass after which the error exceeds the bound; None if none does before a pass
        rewrites attention to a paged cache.
    """
    for name in run_each_pass(graph, context):
        if paged_inputs(graph):
            return None
        graph.recompile()
        if not error(graph) <= bound:
            return name
    return None
