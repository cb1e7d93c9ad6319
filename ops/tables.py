"""Enumerations and plan instructions, as the compiled library defines them.

C++ builds its enums and structs from the same tables: ``runtime/enums.def``, ``linear/schemes.def`` and
``plan/instructions.def``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Field:
    """A field of an instruction."""

    name: str
    kind: str
    """``view``, ``int``, ``flag``, ``real``, ``enum`` or ``part``."""
    type: str = ""
    """Name of the enumeration for an ``enum``; name of the included instruction for a ``part``."""


@dataclass(frozen=True)
class InstructionFormat:
    """Opcode and fields of an instruction; the fields are in the order of a program's integers."""

    opcode: int
    fields: tuple[Field, ...]


def _text() -> str:
    try:
        tables: str = torch.ops.armllm.plan_tables()
    except AttributeError as error:
        raise ImportError(
            "torch_armllm's compiled library is older than its Python code; "
            "build it again with `pip install .`"
        ) from error
    return tables


def _read() -> tuple[dict[str, dict[str, int]], dict[str, InstructionFormat]]:
    enums: dict[str, dict[str, int]] = {}
    instructions: dict[str, list[Field]] = {}
    for line in _text().splitlines():
        kind, *words = line.split()
        if kind == "enum":
            enums.setdefault(words[0], {})[words[1]] = int(words[2])
        elif kind == "instruction":
            fields = instructions[words[0]] = []
        else:
            fields.append(Field(*words))
    formats = {
        name: InstructionFormat(number, tuple(fields))
        for number, (name, fields) in enumerate(instructions.items())
    }
    return enums, formats


ENUMS, INSTRUCTIONS = _read()
"""``ENUMS[type][name]`` is an enumerator's number; ``INSTRUCTIONS[name]`` is an instruction's format."""
