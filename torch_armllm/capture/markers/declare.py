"""Declaration of marker ops: a schema, what an op computes, and the shape and dtype of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torch_armllm.ops.declare import fake

Function = TypeVar("Function", bound=Callable[..., Any])

_library = torch.library.Library("armllm", "FRAGMENT")


def marker(schema: str, result: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Declares a marker op that a function computes, in checks of a captured graph.

    Args:
        schema: of the op.
        result: returns tensors like the op's results; its argument has the op's arguments by name.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    fake(name, result)

    def declare(function: Function) -> Function:
        _library.impl(name, function, "CompositeExplicitAutograd")
        return function

    return declare


def like_attention(a: Any) -> torch.Tensor:
    """Returns a tensor like the result of attention: rows ``(1, T, heads, value_size)``."""
    like: torch.Tensor = a.q.new_empty(a.q.shape[0], a.q.shape[2], a.q.shape[1], a.v.shape[3])
    return like
