"""Sizes, dtypes and tensors that random calls of several ops draw alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import torch

from tests.fuzz.ops.arguments import FLOATS, Argument, Call, Spec
from torch_armllm.ops.linear.packed_layout import panel_layout
from torch_armllm.ops.linear.schemes import PANEL
from torch_armllm.ops.tables import ENUMS

Makers = dict[str, Callable[[Random], Call]]
"""Functions that make a valid call, by the name of the op."""
ACTIVATIONS = [name for name in ENUMS["Activation"] if name != "none"]
WIDTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 128, 130, 160)
TOKENS = (0, 1, 1, 1, 2, 3, 4, 5, 7, 8, 17, 33)
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def any_float(draw: Random) -> torch.dtype:
    return draw.choice(FLOATS)


def leading(draw: Random) -> tuple[int, ...]:
    """Leading sizes: none, one, or two."""
    kind = draw.random()
    if kind < 0.1:
        return ()
    if kind < 0.7:
        return (draw.choice(TOKENS),)
    return (draw.choice((1, 1, 2, 3)), draw.choice(TOKENS))


def maybe(draw: Random, argument: Argument) -> Argument:
    return argument if draw.random() < 0.5 else None


def packed(
    scheme: str, out_features: int, in_features: int, lead: tuple[int, ...] = (), copies: int = 1
) -> Spec:
    panels = copies * math.ceil(out_features / PANEL)
    return Spec((*lead, panels, panel_layout(scheme, in_features).bytes), torch.uint8, "bytes")
