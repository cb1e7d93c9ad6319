"""The prompts of a trial by a plan, compared with the model's own run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_armllm.engine.images.image_rows import PictureRows
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import Shape, with_cache_dtype
from torch_armllm.patching.forwards.layer_calls import LARGEST_DIFFERENCE, is_close
from torch_armllm.plan.step import StepInputs

_EXACT = 1e-2
"""Relative difference of a token's hidden state by float32 weights, which rounding does not reach."""
_MOST_ROUNDING = 0.1
"""Most that other experts add to the difference of a typical token: more would hide faults."""


def differs(
    found: Tensor, expected: Tensor, shown: Tensor, otherwise: Callable[[], Tensor] | None
) -> str | None:
    """Returns how the hidden states of a prompt by a plan differ from the model's own; None: they do not.

    Args:
        found: by the plan, float32 ``(T, hidden)``.
        expected: by the modules, likewise.
        shown: tokens bool ``(T,)`` of an item.
        otherwise: returns what the modules compute from embeddings whose last bits differ; None: weights and
            cache are float32, and rounding changes hardly anything.
    """
    errors = _errors(found, expected)
    if is_close(found, expected) and (otherwise is not None or float(errors.max()) <= _EXACT):
        return None
    error = _typical(errors, shown)
    if otherwise is not None:
        rounding = _typical(_errors(otherwise(), expected), shown)
        if error <= LARGEST_DIFFERENCE + min(2 * rounding, _MOST_ROUNDING):
            return None
    return f"the plan computes other hidden states of them than the model (relative error {error:.1g})"


def _errors(found: Tensor, expected: Tensor) -> Tensor:
    """Returns the relative error of each token's hidden state."""
    difference: Tensor = found - expected
    errors: Tensor = difference.norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    return errors


def _typical(errors: Tensor, shown: Tensor) -> float:
    """Returns the larger median of an item's tokens and of the others: rounding changes experts of a few."""
    return max(float(part.median()) for part in (errors[shown], errors[~shown]) if len(part))


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
