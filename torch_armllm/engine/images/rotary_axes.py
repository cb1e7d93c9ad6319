"""The number of a token by which each frequency of M-RoPE turns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_armllm.plan.picture_inputs import angles_of, frequencies_of
from torch_armllm.plan.placed_program import PlacedProgram

_TOKENS, _POSITIONS = 64, 4096


@torch.no_grad()
def rotary_axes(decoder: Any, program: PlacedProgram, count: int) -> Tensor:
    """Returns the axis of each frequency of a language model, int64 ``(half,)``.

    The model's own rotary embedding shows them, and the program must rotate by its angles for any positions.

    Args:
        decoder: a language model with ``rotary_emb``.
        program: of its plan.
        count: number of axes.

    Raises:
        ValueError: the program would rotate by other angles.
    """
    if not hasattr(decoder, "rotary_emb"):
        raise ValueError("its tokens have several positions each, and it has no rotary embedding of them")
    like = torch.empty(1, 1, 1)
    ones = torch.eye(count, dtype=torch.int64)[:, None]  # each token moves along one axis
    random = torch.Generator().manual_seed(0)
    positions = torch.randint(_POSITIONS, (_TOKENS, count), generator=random)
    rotary = _rotary_of(decoder)
    turned, wanted = (rotary(like, each) for each in (ones, positions.T[:, None]))
    half = program.named("rope_table")[0].integer("half") if program.named("rope_table") else 0
    for once in _LAYOUTS:
        cos, sin = (once(each[0], half) for each in turned)
        axes = sin.abs().argmax(0)
        if len(axes) != half or not all(torch.equal(*_twice(each[0], once, half)) for each in wanted):
            continue
        tables = [once(each[0], half) for each in wanted]
        turns = torch.atan2(sin, cos).gather(0, axes[None])[0]
        for order in (torch.arange(half), _nearest(turns, frequencies_of(program))):
            found = angles_of(program, positions, axes[order])
            if all(torch.allclose(a, b[:, order], atol=1e-3) for a, b in zip(found, tables, strict=True)):
                return axes[order]
    angles_of(program, positions, torch.zeros(half, dtype=torch.int64))  # says what is missing
    raise ValueError("its plan and its M-RoPE turn by other angles")


def _nearest(turns: Tensor, frequencies: Tensor) -> Tensor:
    """Returns the places in a model's table of the frequencies of a plan, which may be in another order."""
    return (turns[None] - frequencies[:, None]).abs().argmin(1)


def _rotary_of(decoder: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns the rotary embedding of all layers that rotate.

    Raises:
        ValueError: kinds of layers have different ones.
    """
    rotary: Callable[..., Any] = decoder.rotary_emb
    if "layer_type" not in inspect.signature(decoder.rotary_emb.forward).parameters:
        return rotary
    kinds = sorted(set(getattr(decoder.config, "layer_types", None) or ()))
    kinds = [kind for kind in kinds if hasattr(rotary, f"{kind}_inv_freq")]
    if len(kinds) != 1:
        raise ValueError(f"{len(kinds)} kinds of its layers rotate, and plans know M-RoPE of one kind")
    return partial(rotary, layer_type=kinds[0])


def _halves(angles: Tensor, half: int) -> Tensor:
    return angles[:, :half]


def _pairs(angles: Tensor, _: int) -> Tensor:
    return angles[:, ::2]


_LAYOUTS = (_halves, _pairs)
"""Layouts of a table of cosines or sines that holds each frequency twice, ``(T, 2 · half)``."""


def _twice(angles: Tensor, once: Callable[[Tensor, int], Tensor], half: int) -> tuple[Tensor, Tensor]:
    """Returns a table, and the one that has each frequency twice as another does."""
    frequencies = once(angles, half)
    if once is _pairs:
        return angles, frequencies.repeat_interleave(2, -1)
    return angles, frequencies.repeat(1, angles.shape[1] // max(half, 1))
