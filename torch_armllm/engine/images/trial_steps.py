"""The prompts of a trial by a plan, compared with the model's own run."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.engine.images.image_rows import PictureRows
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import Shape, with_cache_dtype
from torch_armllm.patching.forwards.layer_calls import is_close
from torch_armllm.plan.step import StepInputs

_EXACT = 1e-2
"""Relative difference of a token's hidden state by float32 weights, which rounding does not reach."""


def differs(
    steps: PictureSteps,
    shape: Shape,
    ids: Tensor,
    rows: PictureRows,
    expected: Tensor,
    exact: bool,
    first: int,
) -> str | None:
    """Returns how the hidden states of a prompt by a plan differ from the model's own; None: they do not.

    Args:
        steps: of the plan.
        shape: of its cache.
        ids: int64 ``(T,)``.
        rows: of the prompt.
        expected: the model's own hidden states, float32 ``(T, hidden)``.
        exact: True if weights and cache are float32.
        first: position of a prompt's first token.
    """
    found = plan_hidden(steps, shape, ids, rows, first)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    if is_close(found, expected) and not (exact and float(error.max()) > _EXACT):
        return None
    return f"the plan computes other hidden states of them than the model (relative error {error.max():.1g})"


@torch.no_grad()
def plan_hidden(steps: PictureSteps, shape: Shape, ids: Tensor, rows: PictureRows, first: int) -> Tensor:
    """Returns the hidden states, float32 ``(T, hidden)``, of a prompt that a plan computes in one step."""
    if shape.dtype == torch.uint8:  # the rounding of an INT4 cache would hide mistakes
        shape = with_cache_dtype(shape, torch.int8)
    tokens = len(ids)
    pool = BlockPool(shape, blocks=-(-tokens // shape.block_size) + 1)
    ids = ids.clone()
    ids[rows.positions] = steps.token
    positions = torch.arange(tokens)[None] + first
    inputs = StepInputs.pack(pool, [SequenceBlocks(pool)], [tokens], ids[None], positions)
    if steps.token_numbers is not None:
        numbers = torch.tensor(steps.token_numbers.of(rows, 0, tokens))
        inputs.numbers = numbers.view(tokens, -1)
    assert steps.rows is not None, "the plan embeds tokens"
    steps.rows.reserve(tokens)
    steps.rows.write(rows.positions, rows.rows)
    inputs.rows = steps.rows.view(tokens)
    hidden = steps.plan.run(inputs).float()
    return hidden.reshape(tokens, -1)[:, : hidden.shape[-1]].clone()
