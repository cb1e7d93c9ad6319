"""A further input of a plan, of numbers of each token, which the tokens of pictures need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from torch_armllm.ops.rope import reference_rope_table
from torch_armllm.plan.encoded_fields import INDEX, places, reads_input, set_view
from torch_armllm.plan.lowering import STEP_INPUTS
from torch_armllm.plan.program import Encoded

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


def input_after(cache: Iterable[Tensor | None]) -> int:
    """Returns the number of the input after those of a step and of its cache."""
    return len(STEP_INPUTS) + sum(tensor is not None for tensor in cache)


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
