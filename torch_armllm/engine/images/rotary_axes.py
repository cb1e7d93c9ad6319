"""The number of a token by which each frequency of M-RoPE turns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.plan.picture_inputs import angles_of
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
    _, sin = decoder.rotary_emb(like, ones)
    turns = sin[0, :, : sin.shape[-1] // 2].abs()
    axes: Tensor = turns.argmax(0)
    random = torch.Generator().manual_seed(0)
    positions = torch.randint(_POSITIONS, (_TOKENS, count), generator=random)
    wanted = decoder.rotary_emb(like, positions.T[:, None])
    found = angles_of(program, positions, axes)
    half = len(axes)
    if not all(
        torch.allclose(a, b[0, :, :half], atol=1e-3) and torch.equal(b[..., :half], b[..., half:])
        for a, b in zip(found, wanted, strict=True)
    ):
        raise ValueError("its plan and its M-RoPE turn by other angles")
    return axes
