"""Joining of the instructions that add adapters to layers of one input, once a program is complete."""

from __future__ import annotations

from typing import Any

from torch_armllm.plan.program import Instruction, Operand, Program


def _are_apart(a: Operand, b: Operand) -> bool:
    """True if no element of two operands' contiguous rows is the same."""
    return a.storage is not b.storage or a.column + a.width <= b.column or b.column + b.width <= a.column


def _joined(first: Instruction, second: Instruction) -> Instruction | None:
    """Returns one instruction for two, if neither reads or adds to what the other adds to."""
    if first.opcode != "lora" or second.opcode != "lora":
        return None
    before: Any = first.fields["layers"]
    after: Any = second.fields["layers"]
    pairs = [(a, b) for a in before for b in after]
    if not all(
        _are_apart(a["out"], b["out"]) and _are_apart(a["out"], b["x"]) and _are_apart(a["x"], b["out"])
        for a, b in pairs
    ):
        return None
    return Instruction("lora", {**first.fields, "layers": [*before, *after]})


def join_adapters(program: Program) -> int:
    """Joins adjacent additions of adapters, such as those to query, key and value: they share barriers.

    All operands exist before the first of the instructions, as each adds to rows in place.

    Returns:
        The number of instructions that became part of the one before.
    """
    instructions: list[Instruction] = []
    for instruction in program.instructions:
        joined = _joined(instructions[-1], instruction) if instructions else None
        if joined is None:
            instructions.append(instruction)
        else:
            instructions[-1] = joined
    count = len(program.instructions) - len(instructions)
    program.instructions = instructions
    return count
