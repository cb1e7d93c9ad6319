"""Computation of a sample by a plan, in several steps on a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_armllm.capture.sample import STEPS, Sample, parts
from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.encoder_keys import EncoderKeys
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.plan.step import Plan, StepInputs


@torch.no_grad()
def sample_hidden(
    plan: Plan,
    shape: Shape,
    input_ids: Tensor,
    position_ids: Tensor,
    given: Tensor | None = None,
    steps: Sequence[int] = STEPS,
    encoder: EncoderKeys | None = None,
) -> Tensor:
    """Returns the hidden states, float32 ``(T, hidden)``, of one sequence that a plan computes in steps.

    Args:
        plan: computes the steps.
        shape: shape of its KV cache.
        input_ids: int64 ``(1, T)``.
        position_ids: int64 ``(1, T)``.
        given: rows for `StepInputs.given`.
        steps: new tokens of each step: by default a prompt, a chunk and decode steps.
        encoder: keys and values of the encoder's tokens that a decoder attends to.
    """
    pool = BlockPool(shape, blocks=4)
    sequence = SequenceBlocks(pool)
    sizes = parts(input_ids.shape[1], steps)
    hidden: list[Tensor] = []
    rows = [None] * len(sizes) if given is None else given.split(sizes)
    inputs_of = zip(input_ids.split(sizes, 1), position_ids.split(sizes, 1), rows, strict=True)
    for ids, positions, of_step in inputs_of:
        inputs = StepInputs.pack(pool, [sequence], [ids.shape[1]], ids, positions)
        inputs.given = of_step
        if encoder is not None:
            inputs.attend_to(encoder, [ids.shape[1]])
        out = plan.run(inputs)
        hidden.append(out.float().reshape(-1, out.shape[-1]).clone())  # the next step reuses its memory
    return torch.cat(hidden)


def plan_error(sample: Sample, plan: Plan, shape: Shape, strict: bool = False) -> float:
    """Returns the error of a plan's hidden states: see `Sample.error` and `Sample.strict_error`."""
    tensors = sample.input_ids, sample.position_ids, sample.given
    hidden = sample_hidden(plan, shape, *tensors, sample.steps, EncoderKeys.of(sample.encoder, shape.dtype))
    return sample.strict_error(hidden) if strict else sample.error(hidden)
