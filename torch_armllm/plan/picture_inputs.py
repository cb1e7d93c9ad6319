"""Further inputs of a plan, which the tokens of pictures need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from torch_armllm.ops.rope import reference_rope_table
from torch_armllm.plan.encoded_fields import (
    INDEX,
    Placed,
    instructions,
    new_view,
    places,
    reads_input,
    set_view,
    view_of,
    with_instruction,
)
from torch_armllm.plan.lowering import STEP_INPUTS
from torch_armllm.plan.program import TYPES, Encoded

_POSITIONS = 1
"""Number of the input that holds a position of each token."""


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


def input_after(cache: Iterable[Tensor | None], states: int = 0) -> int:
    """Returns the number of the input after those of a step.

    Args:
        cache: its tensors.
        states: tensors of states of recurrent layers; two inputs with slots come before them.
    """
    return len(STEP_INPUTS) + sum(tensor is not None for tensor in cache) + (states + 2 if states else 0)


def with_later_tokens(program: Encoded, number: int) -> Encoded:
    """Returns a program whose attentions see as many later tokens as an input says.

    Args:
        program: of causal attention.
        number: of the input, int64 ``(T,)``.

    Raises:
        ValueError: the program has other attentions too.
    """
    integers = list(program.integers)
    for fields in places(program, "attention"):
        set_view(integers, fields["later"], "input", number, 1)
    others = {"mla_attention", "block_attention", "entry_attention"} & set(program.opcodes)
    if others:
        raise ValueError(f"its plan has {', '.join(sorted(others))}, which is causal")
    return replace(program, integers=integers)


def with_features(program: Encoded, layers: int, dtype: torch.dtype, number: int) -> Encoded:
    """Returns a program that adds an input to the hidden states after each of its first layers.

    Args:
        program: of layers with one attention each.
        layers: number of them that the input is added after; those of layer k are the k-th columns.
        dtype: of the input.
        number: of the input, ``(T, layers · hidden)``.

    Raises:
        ValueError: the program has other layers, or keeps hidden states in another dtype.
    """
    for layer in reversed(range(layers)):  # from the last on, as places move
        following = _first_norm(program, layer + 1)
        part = "norm." if "norm.x" in following.fields else ""
        hidden = view_of(program.integers, following.fields[f"{part}x"])
        width = program.integers[following.fields[f"{part}width"]]
        if hidden[-1] != TYPES[dtype]:
            raise ValueError(f"its plan keeps hidden states in another dtype than {dtype}")
        added = new_view("input", number, layers * width, dtype, layer * width)
        # where the norm adds the last layer's result itself, this is that result: the sum is the same
        body = [*hidden, *added, *hidden, *new_view("none", 0, 0, dtype), width, len(program.floats)]
        program = replace(program, floats=[*program.floats, 1.0])
        program = with_instruction(program, "add", body, following)
    return program


def _first_norm(program: Encoded, layer: int) -> Placed:
    """Returns the norm that a layer begins with."""
    all_of_them = instructions(program)
    ends = [at for at, placed in enumerate(all_of_them) if placed.opcode == "attention"]
    if layer >= len(ends):
        raise ValueError(f"its plan has {len(ends)} attentions, and layer {layer} has none")
    norms = []
    for placed in all_of_them[ends[layer - 1] : ends[layer]]:
        part = "norm." if "norm.x" in placed.fields else ""
        rows = placed.fields.get(f"{part}rows_per_token")
        if rows is not None and program.integers[rows] == 1:
            norms.append(placed)
    if len(norms) != 2:
        raise ValueError(f"its plan has {len(norms)} norms between two attentions, which are 2 of others")
    return norms[1]
