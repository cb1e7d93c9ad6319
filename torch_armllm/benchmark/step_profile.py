"""Profile of a native plan's step, instruction by instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.step import StepInputs

_WARM = 3


@dataclass(frozen=True)
class StepPart:
    """Part of a step: all instructions with the same opcode, or the time outside instructions.

    Attributes:
        name: opcode of the instructions, or description of the time outside them.
        count: number of instructions; 0 outside them.
        microseconds: from the start of the first thread to the end, as a sum of medians.
        working: fraction of the threads' time spent computing, 0 … 1; None outside instructions.
    """

    name: str
    count: int
    microseconds: float
    working: float | None


def profile(
    model: PreTrainedModel, batch_size: int = 1, context: int = 128, prompt: int = 0, rounds: int = 20
) -> list[StepPart]:
    """Runs steps over random tokens and adds up the medians of instructions with the same opcode.

    Args:
        model: a patched model.
        batch_size: number of sequences that decode one token each.
        context: length of each sequence before the step, in tokens.
        prompt: prefill a prompt of this length instead of decoding; 0: decode.
        rounds: number of measured steps.

    Raises:
        ValueError: the model has no native plan.
    """
    forward = patched_forward(model)
    if forward is None or (plan := native_plan(forward.plan)) is None:
        raise ValueError("only a native plan can be profiled; `torch_armllm.patch` reports why there is none")
    inputs = step_inputs(forward.shape, model, batch_size, context, prompt)
    with torch.no_grad():
        for _ in range(_WARM):
            plan.run(inputs)
        times = torch.stack([plan.profile(inputs) for _ in range(rounds)])
    return parts(plan.opcodes, times, torch.get_num_threads())


def parts(opcodes: Sequence[str], times: Tensor, threads: int) -> list[StepPart]:
    """Adds up `NativePlan.profile` times, ``(rounds, instructions + 2, 3)``; the longest part comes first."""
    middle = times.double().median(0).values / 1e3
    rows: dict[str, list[int]] = {}
    for number, name in enumerate(opcodes):
        rows.setdefault(name, []).append(number)
    profile = []
    for name, numbers in rows.items():
        spent, worked = float(middle[numbers, 0].sum()), float(middle[numbers, 1].sum())
        profile.append(StepPart(name, len(numbers), spent, worked / (threads * spent) if spent else 0.0))
    profile.append(StepPart("between instructions", 0, float(middle[:-2, 2].sum()), None))
    profile.append(StepPart("before the first", 0, float(middle[-2, 0]), None))
    profile.append(StepPart("after the last", 0, float(middle[-1, 0]), None))
    return sorted(profile, key=lambda part: -part.microseconds)


def table(profile: Sequence[StepPart]) -> str:
    """Formats the parts as text, one line for each."""
    total = sum(part.microseconds for part in profile)
    lines = [f"{'':22}{'':>6}{'µs':>10}{'share':>8}{'working':>9}"]
    for part in profile:
        working = "" if part.working is None else f"{part.working:.0%}"
        count = part.count or ""
        lines.append(
            f"{part.name:22}{count:>6}{part.microseconds:10.1f}{part.microseconds / total:8.1%}{working:>9}"
        )
    lines.append(f"{'step':22}{'':>6}{total:10.1f}")
    return "\n".join(lines)


def step_inputs(
    shape: Shape, model: PreTrainedModel, batch_size: int, context: int, prompt: int
) -> StepInputs:
    """Builds a decode step, or a prefill step if ``prompt`` > 0, over random tokens and an empty cache."""
    count, new = (1, prompt) if prompt else (batch_size, 1)
    before = 0 if prompt else context
    pool = BlockPool(shape, count * -(-(before + new) // shape.block_size))
    sequences = [SequenceBlocks(pool) for _ in range(count)]
    for sequence in sequences:
        sequence.append(before)
    vocab_size = model.config.get_text_config().vocab_size
    return StepInputs.pack(
        pool,
        sequences,
        [new] * count,
        torch.randint(vocab_size // 2, (1, count * new)),
        torch.arange(before, before + new).repeat(count)[None],
    )
