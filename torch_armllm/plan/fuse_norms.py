"""Instructions that become one when a program is complete."""

from __future__ import annotations

from torch_armllm.plan.program import NOTHING, Instruction, Opcode, Operand, Program

_FUSED = {Opcode.LINEAR: Opcode.NORM_LINEAR, Opcode.GATED_LINEAR: Opcode.NORM_GATED_LINEAR}
_OUT, _PER_TOKEN = 1, 6  # fields of RMS_NORM
_X = 0  # field of both linear instructions


def _fused(program: Program, number: int) -> Instruction | None:
    """The instruction that a norm and the one behind it become, if nothing else reads what it normalizes."""
    norm, layer = program.instructions[number : number + 2]
    if norm.opcode != Opcode.RMS_NORM or layer.opcode not in _FUSED or norm.fields[_PER_TOKEN] != 1:
        return None
    out, x = norm.fields[_OUT], layer.fields[_X]
    assert isinstance(out, Operand) and isinstance(x, Operand) and out.storage is not None
    storage = out.storage
    readers = [f for f in layer.fields if isinstance(f, Operand) and f.storage is storage]
    alone = storage.last == number + 1 and all(storage is not kept for kept in program.outputs)
    if len(readers) != 1 or x.storage is not storage or not alone or (x.column, x.width) != (0, out.width):
        return None
    before, behind = list(norm.fields), list(layer.fields)
    before[_OUT] = behind[_X] = NOTHING
    return Instruction(_FUSED[layer.opcode], (*before, *behind))


def fuse_norms(program: Program) -> int:
    """Lets a linear layer normalize its rows itself, where it alone reads them; returns how often.

    The layer's output may lie over what the norm read: it is written after all rows are quantized.
    """
    kept: list[Instruction] = []
    number, count = 0, 0
    while number < len(program.instructions):
        fused = _fused(program, number) if number + 1 < len(program.instructions) else None
        if fused is None:
            kept.append(program.instructions[number])
            number += 1
            continue
        out = program.instructions[number].fields[_OUT]
        assert isinstance(out, Operand)
        program.storages = [s for s in program.storages if s is not out.storage]
        kept.append(fused)
        number, count = number + 2, count + 1
    program.instructions = kept
    return count
