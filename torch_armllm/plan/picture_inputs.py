"""Further inputs of a plan, which the tokens of pictures need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_armllm.ops.rope import reference_rope_table
from torch_armllm.plan.lowering import STEP_INPUTS
from torch_armllm.plan.placed_program import PlacedProgram
from torch_armllm.plan.program import NOTHING, Field, Instruction, Operand

_IDS, _POSITIONS = 0, 1
"""Numbers of the inputs that hold the id and the position of each token."""
_CHOICE: set[Field] = {"number", "greater", "select", "multiply"}
"""Steps of a formula that multiplies embeddings, and takes those of some tokens from other tables."""
_ROUNDING = 1e-2
"""Largest relative error of a factor that a model has in its own dtype."""


def with_rotary_axes(program: PlacedProgram, axes: Tensor, number: int) -> PlacedProgram:
    """Returns a program that rotates by several numbers of each token (M-RoPE).

    Args:
        program: rotates by one position of each token.
        axes: int64 ``(half,)``, the number that each frequency turns by.
        number: of the input that holds the numbers, int64 ``(T, n)``; n is one more than the largest axis.

    Raises:
        ValueError: the program has no table of angles with these frequencies, or several.
    """
    half = _table(program).integer("half")
    if half != len(axes):
        raise ValueError(f"it rotates by {half} frequencies, not by {len(axes)}")
    count = int(axes.max()) + 1
    program, held = program.with_constant(axes.contiguous(), stride=len(axes))
    positions = Operand("input", number, torch.int64, stride=count)
    return program.changed("rope_table", positions=positions, axes=held, numbers=count)


def angles_of(program: PlacedProgram, positions: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines ``(T, half)`` by which a program would rotate with these axes.

    Args:
        program: rotates by one position of each token.
        positions: int64 ``(T, n)``.
        axes: see `with_rotary_axes`.

    Raises:
        ValueError: see `with_rotary_axes`.
    """
    table, frequencies = _table(program), frequencies_of(program)
    if len(frequencies) != len(axes):
        raise ValueError(f"it rotates by {len(frequencies)} frequencies, not by {len(axes)}")
    scaling, offset = table.real("scaling"), -table.integer("before")
    return reference_rope_table(positions, frequencies, scaling, offset, axes)


def frequencies_of(program: PlacedProgram) -> Tensor:
    """Returns the frequencies ``(half,)`` of a program's table of angles.

    Raises:
        ValueError: see `with_rotary_axes`.
    """
    return program.constants[_table(program).operand("inv_freq").index]


def _table(program: PlacedProgram) -> Instruction:
    found = program.named("rope_table")
    if len(found) != 1 or not _reads_input(found[0].operand("positions"), _POSITIONS):
        raise ValueError(f"its plan has {len(found)} tables of angles, and M-RoPE needs one")
    return found[0]


def _reads_input(operand: Operand, number: int) -> bool:
    return operand.space == "input" and operand.index == number


def with_given_angles(program: PlacedProgram, number: int) -> PlacedProgram:
    """Returns a program that rotates by angles of each token that it is given.

    Args:
        program: rotates by one position of each token.
        number: of the input with cosines, float32 ``(T, half)``; that with sines follows it.

    Raises:
        ValueError: the program has no table of angles, or several.
    """
    half = _table(program).integer("half")
    cos, sin = (Operand("input", number + which, torch.float32, stride=half) for which in range(2))
    return program.changed("rope", cos=cos, sin=sin)


def input_after(cache: Iterable[Tensor | None], states: int = 0) -> int:
    """Returns the number of the input after those of a step.

    Args:
        cache: its tensors.
        states: tensors of states of recurrent layers; two inputs with slots come before them.
    """
    return len(STEP_INPUTS) + sum(tensor is not None for tensor in cache) + (states + 2 if states else 0)


def with_later_tokens(program: PlacedProgram, number: int, only_windows: bool = False) -> PlacedProgram:
    """Returns a program whose attentions see as many later tokens as an input says.

    Args:
        program: of causal attention.
        number: of the input, int64 ``(T,)``.
        only_windows: leaves attentions causal that have no window.

    Raises:
        ValueError: the program has other attentions too.
    """
    others = {"mla_attention", "block_attention", "entry_attention"} & set(program.opcodes)
    if others:
        raise ValueError(f"its plan has {', '.join(sorted(others))}, which is causal")
    later = Operand("input", number, torch.int64, stride=1)

    def looks_ahead(each: Instruction) -> Instruction:
        if each.opcode != "attention" or (only_windows and each.integer("window") <= 0):
            return each
        return each.changed(later=later)

    return program.map(looks_ahead)


def given_columns(hidden: int, layers: int) -> int:
    """Returns the columns of the input that `with_given_rows` describes."""
    return (1 + layers) * hidden + 1


def with_given_rows(
    program: PlacedProgram,
    hidden: int,
    dtype: torch.dtype,
    number: int,
    layers: Sequence[int] = (),
    scale: float = 1.0,
) -> PlacedProgram:
    """Returns a program that is given the embeddings of some tokens.

    It reads an input of ``given_columns(hidden, n)``: the embedding of a token, what is added to the hidden
    states after each of n layers, and 0 at last, or zeros and 1 for a token that is looked up.

    Args:
        program: looks up all tokens.
        hidden: columns of the embeddings.
        dtype: of the embeddings and the hidden states.
        number: of the input.
        layers: numbers of the layers that something is added after, in order.
        scale: by which the model multiplies embeddings of texts, but not those that are given.

    Raises:
        ValueError: the program has no such places.
    """
    columns = given_columns(hidden, len(layers))

    def given(column: int) -> Operand:
        return Operand("input", number, dtype, column=column, stride=columns)

    for place, layer in reversed(list(enumerate(layers, 1))):  # from the last on, as places move
        at, norm = _first_norm(program, layer + 1)
        rows = norm.operand("x")
        if rows.space == "shared":
            raise ValueError("its ranks share the rows that features of pictures are added to")
        if norm.integer("width") != hidden:
            raise ValueError(f"its plan keeps hidden states of another size than {hidden}")
        # Where the norm adds the last layer's result itself, this is that result: the sum is the same.
        program = program.inserted(at, _sum(given(place * hidden), rows, NOTHING, hidden))
    at, rows = _embeddings(program, hidden, scale)
    return program.inserted(at, _sum(given(0), rows, given(columns - 1), hidden))


def _sum(a: Operand, b: Operand, row_factor: Operand, width: int) -> Instruction:
    """Returns the instruction that adds ``a`` to ``b``, times a factor of each token, in place."""
    if b.dtype != a.dtype:
        raise ValueError("its plan keeps hidden states in another dtype than the embeddings")
    fields: dict[str, Field] = {"a": a, "b": b, "out": b, "row_factor": row_factor}
    return Instruction("add", {**fields, "width": width, "factor": 1.0})


def _embeddings(program: PlacedProgram, hidden: int, scale: float) -> tuple[int, Operand]:
    """Returns the embeddings, and the number of the first instruction that reads them as they are given."""
    instructions = program.instructions
    tables = [
        at
        for at, each in enumerate(instructions)
        if each.opcode in ("embed", "split_embed") and each.integer("width") == hidden
    ]
    found = tables
    if len(tables) > 1:  # the others look up tokens of pictures, whose ids are counted from 0 there
        found = [at for at in tables if _reads_input(instructions[at].operand("ids"), _IDS)]
    if not found:  # or tokens for the layers, which multiply them by another factor
        found = [at for at in tables if _is_multiplied(program, at, scale)]
    if len(found) != 1:
        raise ValueError(f"its plan has {len(found)} tables of embeddings")
    at = found[0]
    rows = instructions[at].operand("out")
    if scale != 1.0:
        at = _multiplied(program, at, rows, scale)
        rows = instructions[at].operand("out")
    adapters = instructions[at + 1].opcode == "lora_embed"  # which pictures lack
    return at + (2 if adapters else 1), rows


def _is_multiplied(program: PlacedProgram, at: int, scale: float) -> bool:
    """True if a program multiplies the rows that an instruction looks up by a factor."""
    try:
        return scale == 1.0 or _multiplied(program, at, program.instructions[at].operand("out"), scale) > at
    except ValueError:
        return False


def _multiplied(program: PlacedProgram, at: int, rows: Operand, scale: float) -> int:
    """Returns the number of the instruction that multiplies the rows that another one looks up."""
    if (chosen := _choice(program, rows, at)) is not None:
        return chosen
    factor = program.instructions[at + 1]
    if (
        factor.opcode != "add"
        or any(factor.operand(name).space != "none" for name in ("a", "row_factor"))
        or factor.operand("b") != rows
        or abs(factor.real("factor") / scale - 1) > _ROUNDING
    ):
        raise ValueError("its plan multiplies embeddings at another place")
    return at + 1


def _choice(program: PlacedProgram, rows: Operand, after: int) -> int | None:
    """Returns the number of the formula that multiplies embeddings and chooses others for some tokens."""
    for at, each in enumerate(program.instructions):
        if at <= after or each.opcode != "pointwise":
            continue
        if any(operand.operand("x") == rows for operand in each.records("operands")):
            ops = {step.fields["op"] for step in each.records("steps")}
            return at if ops <= _CHOICE and "select" in ops else None
    return None


def _norm_of(instruction: Instruction) -> Instruction:
    """Returns the norm that an instruction begins with, or the instruction itself."""
    return instruction.part("norm") if "norm" in instruction.fields else instruction


def _first_norm(program: PlacedProgram, layer: int) -> tuple[int, Instruction]:
    """Returns the norm that a layer begins with, or the last one, and its instruction's number."""
    ends = [at for at, each in enumerate(program.instructions) if each.opcode == "attention"]
    if layer > len(ends):
        raise ValueError(f"its plan has {len(ends)} attentions, and layer {layer} has none")
    ends.append(len(program.instructions))
    between = ((at, _norm_of(program.instructions[at])) for at in range(ends[layer - 1], ends[layer]))
    norms = [(at, norm) for at, norm in between if norm.fields.get("rows_per_token") == 1]
    if not norms:
        raise ValueError("its plan has no norms of rows between two attentions")
    return norms[-1]
