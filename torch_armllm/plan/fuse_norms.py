"""Fusion of a norm with the linear layer after it, once a program is complete."""

from __future__ import annotations

from torch_armllm.plan.program import NOTHING, Instruction, Program

_FUSED = {"linear": "norm_linear", "gated_linear": "norm_gated_linear"}


def _fused(program: Program, number: int) -> Instruction | None:
    """Returns the fusion of a norm and the next layer, if nothing else reads the normalized rows."""
    norm, layer = program.instructions[number : number + 2]
    if norm.opcode != "rms_norm" or layer.opcode not in _FUSED or norm.fields["rows_per_token"] != 1:
        return None
    out, x = norm.operand("out"), layer.operand("x")
    storage = out.storage
    assert storage is not None
    readers = [operand for operand in layer.operands if operand.storage is storage]
    unread_later = storage.last == number + 1 and all(storage is not output for output in program.outputs)
    whole_rows = x.storage is storage and (x.column, x.width) == (0, out.width)
    if len(readers) != 1 or not unread_later or not whole_rows:
        return None
    parts = {"norm": {**norm.fields, "out": NOTHING}, "layer": {**layer.fields, "x": NOTHING}}
    return Instruction(_FUSED[layer.opcode], parts)


def fuse_norms(program: Program) -> int:
    """Fuses norms into the linear layers after them, if no other instruction reads the normalized rows.

    The layer's output may overwrite what the norm read: it is written after all rows are quantized.

    Returns:
        The number of fused pairs.
    """
    instructions: list[Instruction] = []
    number, count = 0, 0
    while number < len(program.instructions):
        fused = _fused(program, number) if number + 1 < len(program.instructions) else None
        if fused is None:
            instructions.append(program.instructions[number])
            number += 1
            continue
        out = program.instructions[number].operand("out")
        program.storages = [s for s in program.storages if s is not out.storage]
        instructions.append(fused)
        number, count = number + 2, count + 1
    program.instructions = instructions
    return count
