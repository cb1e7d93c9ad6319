"""Memory that torch keeps after tracing."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import graph_module
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


@contextmanager
def released_tracing_memory() -> Iterator[None]:
    """Releases at its end what torch would keep of the graphs made within, for as long as the process runs.

    That is the source text of each compiled graph, which tracebacks would show, and the symbolic shapes with
    the graph's fake tensors.
    """
    sources: dict[str, str] = graph_module._loader.eval_cache
    before = set(sources)
    try:
        yield
    finally:
        for name in set(sources) - before:
            sources.pop(name, None)
            linecache.cache.pop(name, None)
        _clear_shape_caches()


def _clear_shape_caches() -> None:
    """Empties the caches of the methods of symbolic shapes: their entries keep the shapes."""
    for name in dir(ShapeEnv):
        clear = getattr(getattr(ShapeEnv, name), "cache_clear", None)
        if clear is not None:
            clear()
