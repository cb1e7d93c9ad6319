"""The arguments of a quantized linear layer in a graph."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx.node import Node


class LinearCall(NamedTuple):
    """Arguments of ``int4_linear``, in its order and with its defaults; tensors are nodes."""

    x: Any
    weight: Any
    out_features: Any
    scheme: Any
    bias: Any = None
    residual: Any = None
    digits: Any = 1
    rotated: Any = False

    @classmethod
    def of(cls, node: Node) -> LinearCall:
        """Returns the arguments of a node that calls ``int4_linear``."""
        return cls(*node.args)
