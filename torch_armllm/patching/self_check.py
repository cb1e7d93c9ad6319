"""Bound of rounding in a plan's results, and the search for the pass that exceeds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

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

OTHER_TEXTS = 4
"""Further texts on which results are judged that differ on the first."""
_MOST_FAR = 1
"""Those of them on which they may differ too."""
_CLOSE = 0.5
"""Part of the bound that right results keep to on the others.  Results whose errors are about as large as the
bound on every text do not."""


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


@dataclass
class Texts:
    """Texts on which results are judged: a sample, and others where results differ on it.

    Rounding may send one of the first tokens to other experts.  All later tokens attend to it, so most of
    that text's results differ.  It does so on few texts, and hardly changes the others, while a wrong rewrite
    is wrong by about as much on each.

    Attributes:
        sample: of the text that is judged first.
        bound_of: returns the error of a sample's results that rounding explains.
        make_others: makes samples of further texts; it runs at most once.  None: the first one decides.
    """

    sample: Sample
    bound_of: Callable[[Sample], float]
    make_others: Callable[[], Sequence[Sample]] | None = None

    def agree(self, error: float, error_of: Callable[[Sample], float]) -> bool:
        """True if results are right but for rounding.

        Args:
            error: of the first text's results.
            error_of: computes another sample's results and returns their error.
        """
        if error <= self.bound_of(self.sample):
            return True
        if self.make_others is None or not math.isfinite(error):
            return False
        far = 0
        for other in self._others:
            far += not error_of(other) <= _CLOSE * self.bound_of(other)
            if far > _MOST_FAR:
                return False
        return True

    @cached_property
    def _others(self) -> Sequence[Sample]:
        assert self.make_others is not None
        return self.make_others()


@torch.no_grad()
def find_guilty_pass(
    graph: fx.GraphModule, context: PassContext, is_right: Callable[[fx.GraphModule], bool]
) -> str | None:
    """Runs the passes on a graph until its results change.

    Args:
        graph: a captured graph; it is rewritten.
        context: options of the passes.
        is_right: judges the results of a graph after a pass.

    Returns:
        The name of the first pass after which the results are wrong; None if they are right until a pass
        rewrites attention to a paged cache.
    """
    for name in run_each_pass(graph, context):
        if paged_inputs(graph):
            return None
        graph.recompile()
        if not is_right(graph):
            return name
    return None
