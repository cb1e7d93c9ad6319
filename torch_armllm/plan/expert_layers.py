"""The layers of a program whose experts may stay on disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from torch_armllm.plan.placed_program import PlacedProgram
from torch_armllm.plan.program import Instruction


class ExpertLayer(NamedTuple):
    """Numbers of the constants that hold a layer's experts: gate and up, and down."""

    gate_up: int
    down: int


def expert_layers(program: PlacedProgram) -> list[ExpertLayer]:
    """Returns the layers of experts of a program, in the order of their computation.

    A layer that runs several times is one.
    """
    found = dict.fromkeys(map(_layer_of, program.named("moe")))
    return [layer for layer in found if layer is not None]


def with_strides(
    program: PlacedProgram, layers: Collection[ExpertLayer], constants: Sequence[Tensor]
) -> PlacedProgram:
    """Returns a program whose layers of experts have the strides that their constants have now."""

    def restrided(instruction: Instruction) -> Instruction:
        layer = _layer_of(instruction) if instruction.opcode == "moe" else None
        if layer is None or layer not in layers:
            return instruction
        strides = [constants[number].stride(0) for number in layer]
        return instruction.changed(gate_up_expert_stride=strides[0], down_expert_stride=strides[1])

    return program.map(restrided)


def _layer_of(instruction: Instruction) -> ExpertLayer | None:
    """Returns the constants that experts are read from; None if a step computes them."""
    weights = [instruction.operand(name) for name in ("gate_up", "down")]
    if any(weight.space != "constant" for weight in weights):
        return None
    return ExpertLayer(*(weight.index for weight in weights))
