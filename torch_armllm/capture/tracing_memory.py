"""Memory that torch.export keeps after tracing."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def forget_inputs(graph: fx.Graph) -> None:
    """Removes the exporter's list of fake inputs from the symbolic shapes of a finished export.

    The list is needed while guards are made.  Its tensors refer back to the shapes by their sizes, which lie
    in C++, where Python's garbage collector does not see the cycle.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            shapes: Any = value.fake_mode.shape_env
            if shapes is not None:
                shapes.tracked_fakes = None
            return


def clear_shape_caches() -> None:
    """Empties the caches of symbolic shapes.

    They are `functools.lru_cache` of methods: each entry keeps its symbolic shapes, and with them the graph's
    fake tensors, for as long as the process runs.
    """
    for name in dir(ShapeEnv):
        clear = getattr(getattr(ShapeEnv, name), "cache_clear", None)
        if clear is not None:
            clear()
