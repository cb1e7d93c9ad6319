"""A rewritten graph whose every call is compared with the graph before the passes: a debugging aid."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from torch_armllm.capture.output_check import OtherRounding
from torch_armllm.passes import PassContext, run_each_pass
from torch_armllm.patching.self_check import find_guilty_pass

_BOUNDS = {torch.float32: 2e-3, torch.float64: 2e-3}
_QUANTIZED_BOUND = 3e-2
_ROUNDINGS = 4
"""Runs of the original with other last bits, which tell how much the rounding of a call changes."""
_LARGEST_BOUND = 0.3
"""A larger error is reported whatever rounding changes."""


class CheckedGraph:
    """A graph with the passes run on it.

    A call that differs from the original by more than rounding returns the original's results.  It warns, and
    names the pass that changes them; later calls run without that pass.
    """

    def __init__(self, graph: fx.GraphModule, context: PassContext) -> None:
        self._context = context
        done: set[str] = set()
        if context.scheme is not None:  # compared on quantized weights: their rounding is no error
            for name in run_each_pass(graph, context):
                done.add(name)
                if name == "quantize_weights":
                    break
        context.skip |= done
        graph.recompile()
        self._original = graph
        self._rewritten = self._rewrite()

    def __call__(self, *inputs: Any) -> Any:
        """Runs the rewritten graph and the original on the same inputs."""
        copies = [_clone(value) for value in inputs]
        before = [_clone(value) for value in inputs]
        expected = self._original(*copies)
        got = self._rewritten(*inputs)
        bound = self._bound(expected)
        error = _error(got, expected)
        if not error <= bound:
            bound = max(bound, min(2 * self._rounding(before, expected), _LARGEST_BOUND))
        if error <= bound:
            return got

        def is_right(graph: fx.GraphModule) -> bool:
            return _error(graph(*map(_clone, before)), expected) <= bound

        guilty = find_guilty_pass(_copy(self._original), self._context, is_right)
        warnings.warn(
            f"the rewrite {guilty or '(several together)'!r} changes this graph's results by {error:.1g} "
            f"(relative), where rounding explains {bound:.1g}; it is left out: please report this as a bug",
            RuntimeWarning,
            stacklevel=2,
        )
        if guilty is None:
            self._rewritten = self._original
        else:
            self._context.skip |= {guilty}
            self._rewritten = self._rewrite()
        for value, copy in zip(inputs, copies, strict=True):  # the original may have written to its inputs
            if isinstance(value, Tensor) and value.numel():
                value.copy_(copy)
        return expected

    def _rewrite(self) -> fx.GraphModule:
        graph = _copy(self._original)
        for _ in run_each_pass(graph, self._context):
            pass
        graph.recompile()
        return graph

    def _rounding(self, inputs: list[Any], expected: Any) -> float:
        """Returns the error of the original on other last bits, which may send tokens to other experts.

        It is zero for results in float32 of layers that are not quantized, which hardly ever do so.
        """
        if self._context.scheme is None and all(each.dtype.itemsize >= 4 for each in _floats(expected)):
            return 0.0
        runs = [OtherRounding(self._original, seed) for seed in range(_ROUNDINGS)]
        errors = [_error(run.run(*map(_clone, inputs)), expected) for run in runs]
        return max(filter(math.isfinite, errors), default=0.0)

    def _bound(self, expected: Any) -> float:
        if self._context.scheme is not None:
            return _QUANTIZED_BOUND
        return max([_BOUNDS.get(tensor.dtype, 3e-2) for tensor in _floats(expected)], default=0.0)


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph module of its own that shares the weights."""
    twin = fx.Graph()
    twin.output(twin.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, twin)


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _floats(results: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _error(got: Any, expected: Any) -> float:
    """Returns the largest relative error of a result's tensors; infinite if one is not finite."""
    errors = [0.0]
    for ours, theirs in zip(_floats(got), _floats(expected), strict=True):
        if theirs.numel():
            norm = theirs.float().norm().clamp(min=1e-30)
            error = (ours.float() - theirs.float()).norm() / norm
            errors.append(float(error.nan_to_num(nan=float("inf"), posinf=float("inf"))))
    return max(errors)
