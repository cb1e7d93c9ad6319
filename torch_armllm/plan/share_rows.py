"""Rows that tensor parallel ranks of one machine share: each writes its columns, and nobody copies them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping

from torch_armllm.ops.collective import rank_of, shared_bytes_of
from torch_armllm.plan.program import Field, Instruction, Operand, Program, Storage, layout

_WRITERS = ("linear", "norm_linear", "gated_linear", "norm_gated_linear", "attention")
"""Instructions that write their result as rows of any stride; nothing but adapters, in place, adds to it."""
_READERS = ("linear", "norm_linear", "gated_linear", "norm_gated_linear", "rms_norm", "layer_norm")
_READ = ("x", "residual")
"""Fields of these that they read, and do not write."""


def share_rows(program: Program) -> int:
    """Lets ranks write columns that are gathered to memory that they share; does nothing without such memory.

    Every rank has the same instructions.  When one has seen the others at a later exchange, they have ended
    all instructions before that exchange, so rows are kept up to the first exchange behind their last use.
    The ranks meet where a step begins, too.

    Returns:
        The number of exchanges that copy nothing any more.
    """
    gathers = [at for at, each in enumerate(program.instructions) if each.opcode == "gather_columns"]
    uses = _uses(program)
    shared: list[Storage] = []
    communicator = 0
    for at in gathers:
        gather = program.instructions[at]
        own, whole = gather.operand("x"), gather.operand("out")
        handle = gather.integer("communicator")
        if not shared_bytes_of(handle) or communicator not in (0, handle):
            continue
        if not _can_share(program, uses, at, own, whole):
            continue
        assert own.storage is not None and whole.storage is not None
        communicator = handle
        first = sum(part.integer("columns") for part in gather.records("parts")[: rank_of(handle)])
        own.storage.inside, whole.storage.is_shared = (whole.storage, first), True
        # numbers of instructions as they are now, which for other storages are those before any fusion
        whole.storage.first = uses[id(own.storage)][0][0]
        last = uses[id(whole.storage)][-1][0]
        behind = bisect_right(gathers, last)
        whole.storage.last = gathers[behind] if behind < len(gathers) else len(program.instructions)
        shared.append(whole.storage)
    if shared:
        sizes = {"communicator": communicator, "bytes_per_token": layout(shared)}
        program.instructions.insert(0, Instruction("meet", sizes))
    return len(shared)


def _can_share(
    program: Program,
    uses: Mapping[int, list[tuple[int, str]]],
    at: int,
    own: Operand,
    whole: Operand,
) -> bool:
    """True if rows are written once, as a rank's columns, and only read once they are gathered."""
    if own.storage is None or whole.storage is None or own.storage is whole.storage:
        return False
    if any(output in (own.storage, whole.storage) for output in program.outputs):
        return False
    rows = own.column == 0 and own.width == own.storage.columns == own.stride
    if not rows or own.storage.inside is not None or own.storage.is_shared:
        return False
    before = [use for use in uses[id(own.storage)] if use[0] != at]
    after = [use for use in uses[id(whole.storage)] if use[0] != at]
    if not before or not all(number < at and name == "out" for number, name in before):
        return False
    writer, *adding = (program.instructions[number].opcode for number, _ in before)
    if writer not in _WRITERS or any(opcode != "lora" for opcode in adding):
        return False
    return all(
        number > at and name in _READ and program.instructions[number].opcode in _READERS
        for number, name in after
    )


def _uses(program: Program) -> dict[int, list[tuple[int, str]]]:
    """Returns, for each storage by its id, the instructions that use it, and the field in which they do."""
    found: dict[int, list[tuple[int, str]]] = {}
    for number, instruction in enumerate(program.instructions):
        for name, operand in _operands(instruction.fields):
            if operand.storage is not None:
                found.setdefault(id(operand.storage), []).append((number, name))
    return found


def _operands(fields: Mapping[str, Field]) -> Iterator[tuple[str, Operand]]:
    """Yields every operand with the name of its field, also those of parts and lists."""
    for name, value in fields.items():
        if isinstance(value, Operand):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _operands(value)
        elif isinstance(value, list):
            for record in value:
                yield from _operands(record)
