"""Further inputs of a plan, which the tokens of pictures need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_armllm.ops.rope import reference_rope_table
from torch_armllm.ops.tables import ENUMS
from torch_armllm.plan.encoded_fields import (
    INDEX,
    SPACE,
    Placed,
    instructions,
    is_nothing,
    new_view,
    places,
    reads_input,
    records,
    set_view,
    view_of,
    with_instruction,
)
from torch_armllm.plan.lowering import STEP_INPUTS
from torch_armllm.plan.program import Encoded

_IDS, _POSITIONS = 0, 1
"""Numbers of the inputs that hold the id and the position of each token."""
_CHOICE = {ENUMS["PointwiseOp"][name] for name in ("number", "greater", "select", "multiply")}
"""Steps of a formula that multiplies embeddings, and takes those of some tokens from other tables."""
_ROUNDING = 1e-2
"""Largest relative error of a factor that a model has in its own dtype."""


def with_rotary_axes(program: Encoded, axes: Tensor, number: int) -> Encoded:
    """Returns a program that rotates by several numbers of each token (M-RoPE).

    Args:
        program: rotates by one position of each token.
        axes: int64 ``(half,)``, the number that each frequency turns by.
        number: of the input that holds the numbers, int64 ``(T, n)``; n is one more than the largest axis.

    Raises:
        ValueError: the program has no table of angles with these frequencies, or several.
    """
    (table,) = _tables(program)
    integers = list(program.integers)
    if integers[table["half"]] != len(axes):
        raise ValueError(f"it rotates by {integers[table['half']]} frequencies, not by {len(axes)}")
    count = int(axes.max()) + 1
    set_view(integers, table["positions"], "input", number, count)
    set_view(integers, table["axes"], "constant", len(program.constants), len(axes))
    integers[table["numbers"]] = count
    return replace(program, constants=[*program.constants, axes.contiguous()], integers=integers)


def angles_of(program: Encoded, positions: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines ``(T, half)`` by which a program would rotate with these axes.

    Args:
        program: rotates by one position of each token.
        positions: int64 ``(T, n)``.
        axes: see `with_rotary_axes`.

    Raises:
        ValueError: see `with_rotary_axes`.
    """
    (table,) = _tables(program)
    integers = program.integers
    frequencies = program.constants[integers[table["inv_freq"] + INDEX]]
    if len(frequencies) != len(axes):
        raise ValueError(f"it rotates by {len(frequencies)} frequencies, not by {len(axes)}")
    scaling = program.floats[integers[table["scaling"]]]
    return reference_rope_table(positions, frequencies, scaling, -integers[table["before"]], axes)


def _tables(program: Encoded) -> list[dict[str, int]]:
    found = places(program, "rope_table")
    if len(found) != 1 or not reads_input(program.integers, found[0]["positions"], _POSITIONS):
        raise ValueError(f"its plan has {len(found)} tables of angles, and M-RoPE needs one")
    return found


def with_given_angles(program: Encoded, number: int) -> Encoded:
    """Returns a program that rotates by angles of each token that it is given.

    Args:
        program: rotates by one position of each token.
        number: of the input with cosines, float32 ``(T, half)``; that with sines follows it.

    Raises:
        ValueError: the program has no table of angles, or several.
    """
    (table,) = _tables(program)
    integers = list(program.integers)
    for fields in places(program, "rope"):
        for which, name in enumerate(("cos", "sin")):
            set_view(integers, fields[name], "input", number + which, integers[table["half"]], torch.float32)
    return replace(program, integers=integers)


def input_after(cache: Iterable[Tensor | None], states: int = 0) -> int:
    """Returns the number of the input after those of a step.

    Args:
        cache: its tensors.
        states: tensors of states of recurrent layers; two inputs with slots come before them.
    """
    return len(STEP_INPUTS) + sum(tensor is not None for tensor in cache) + (states + 2 if states else 0)


def with_later_tokens(program: Encoded, number: int, only_windows: bool = False) -> Encoded:
    """Returns a program whose attentions see as many later tokens as an input says.

    Args:
        program: of causal attention.
        number: of the input, int64 ``(T,)``.
        only_windows: leaves attentions causal that have no window.

    Raises:
        ValueError: the program has other attentions too.
    """
    integers = list(program.integers)
    for fields in places(program, "attention"):
        if integers[fields["window"]] > 0 or not only_windows:
            set_view(integers, fields["later"], "input", number, 1)
    others = {"mla_attention", "block_attention", "entry_attention"} & set(program.opcodes)
    if others:
        raise ValueError(f"its plan has {', '.join(sorted(others))}, which is causal")
    return replace(program, integers=integers)


def given_columns(hidden: int, layers: int) -> int:
    """Returns the columns of the input that `with_given_rows` describes."""
    return (1 + layers) * hidden + 1


def with_given_rows(
    program: Encoded, hidden: int, dtype: torch.dtype, number: int, layers: int, scale: float = 1.0
) -> Encoded:
    """Returns a program that is given the embeddings of some tokens.

    It reads an input of ``given_columns(hidden, layers)``: the embedding of a token, what is added to the
    hidden states after each of the first layers, and 0 at last, or zeros and 1 for a token that is looked up.

    Args:
        program: looks up all tokens.
        hidden: columns of the embeddings.
        dtype: of the embeddings and the hidden states.
        number: of the input.
        layers: number of layers that something is added after.
        scale: by which the model multiplies embeddings of texts, but not those that are given.

    Raises:
        ValueError: the program has no such places.
    """
    columns = given_columns(hidden, layers)
    for layer in reversed(range(layers)):  # from the last on, as places move
        following = _first_norm(program, layer + 1)
        part = _norm_in(following)
        rows = view_of(program.integers, following.fields[f"{part}x"])
        if rows[SPACE] == ENUMS["Space"]["shared"]:
            raise ValueError("its ranks share the rows that features of pictures are added to")
        if program.integers[following.fields[f"{part}width"]] != hidden:
            raise ValueError(f"its plan keeps hidden states of another size than {hidden}")
        # Where the norm adds the last layer's result itself, this is that result: the sum is the same.
        added = new_view("input", number, columns, dtype, (1 + layer) * hidden)
        program = _with_sum(program, added, rows, new_view("none", 0, 0, dtype), hidden, following)
    rows, following = _embeddings(program, hidden, scale)
    given = new_view("input", number, columns, dtype)
    return _with_sum(
        program, given, rows, new_view("input", number, columns, dtype, columns - 1), hidden, following
    )


def _with_sum(
    program: Encoded, a: list[int], b: Sequence[int], factor: list[int], width: int, before: Placed
) -> Encoded:
    """Returns a program that adds ``a`` to ``b``, of which a factor of each token is taken, in place."""
    if b[-1] != a[-1]:
        raise ValueError("its plan keeps hidden states in another dtype than the embeddings")
    body = [*a, *b, *b, *factor, width, len(program.floats)]
    program = replace(program, floats=[*program.floats, 1.0])
    return with_instruction(program, "add", body, before)


def _embeddings(program: Encoded, hidden: int, scale: float) -> tuple[Sequence[int], Placed]:
    """Returns the view of the embeddings, and the first instruction that reads them as they are given."""
    integers, all_of_them = program.integers, instructions(program)
    tables = [
        at
        for at, placed in enumerate(all_of_them)
        if placed.opcode in ("embed", "split_embed") and integers[placed.fields["width"]] == hidden
    ]
    found = tables
    if len(tables) > 1:  # the others look up tokens of pictures, whose ids are counted from 0 there
        found = [at for at in tables if reads_input(integers, all_of_them[at].fields["ids"], _IDS)]
    if len(found) != 1:
        raise ValueError(f"its plan has {len(found)} tables of embeddings")
    at = found[0]
    rows = view_of(integers, all_of_them[at].fields["out"])
    if scale == 1.0:
        return rows, _after_adapters(all_of_them, at)
    if (chosen := _choice(program, rows, at)) is not None:
        return view_of(integers, all_of_them[chosen].fields["out"]), _after_adapters(all_of_them, chosen)
    fields = all_of_them[at + 1].fields
    if (
        all_of_them[at + 1].opcode != "add"
        or not all(is_nothing(integers, fields[name]) for name in ("a", "row_factor"))
        or view_of(integers, fields["b"]) != rows
        or abs(program.floats[integers[fields["factor"]]] / scale - 1) > _ROUNDING
    ):
        raise ValueError("its plan multiplies embeddings at another place")
    return view_of(integers, fields["out"]), _after_adapters(all_of_them, at + 1)


def _after_adapters(all_of_them: list[Placed], at: int) -> Placed:
    """Returns the instruction after another one, and one that adds adapters, which pictures lack."""
    following = all_of_them[at + 1]
    return all_of_them[at + 2] if following.opcode == "lora_embed" else following


def _choice(program: Encoded, rows: Sequence[int], after: int) -> int | None:
    """Returns the number of the formula that multiplies embeddings and chooses others for some tokens."""
    integers = program.integers
    for at, placed in enumerate(instructions(program)):
        if at <= after or placed.opcode != "pointwise":
            continue
        if any(view_of(integers, operand["x"]) == rows for operand in records(program, placed, "operands")):
            ops = {integers[step["op"]] for step in records(program, placed, "steps")}
            return at if ops <= _CHOICE and ENUMS["PointwiseOp"]["select"] in ops else None
    return None


def _norm_in(placed: Placed) -> str:
    return "norm." if "norm.x" in placed.fields else ""


def _first_norm(program: Encoded, layer: int) -> Placed:
    """Returns the norm that a layer begins with."""
    all_of_them = instructions(program)
    ends = [at for at, placed in enumerate(all_of_them) if placed.opcode == "attention"]
    if layer >= len(ends):
        raise ValueError(f"its plan has {len(ends)} attentions, and layer {layer} has none")
    norms = []
    for placed in all_of_them[ends[layer - 1] : ends[layer]]:
        rows = placed.fields.get(f"{_norm_in(placed)}rows_per_token")
        if rows is not None and program.integers[rows] == 1:
            norms.append(placed)
    if len(norms) != 2:
        raise ValueError(f"its plan has {len(norms)} norms of rows between two attentions, and not 2")
    return norms[1]
