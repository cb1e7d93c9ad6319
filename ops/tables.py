"""Enumerations, weight schemes and plan instructions, as the compiled library defines them.

C++ builds its enums and structs from the same tables: ``runtime/enums.def``, ``linear/schemes.def`` and
``plan/instructions.def``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Field:
    """A field of an instruction."""

    name: str
    kind: str
    """``view``, ``int``, ``flag``, ``real``, ``enum``, ``part`` or ``list``."""
    type: str = ""
    """Name of the enumeration for an ``enum``, of the included instruction for a ``part``, of the record for
    a ``list``."""


@dataclass(frozen=True)
class InstructionFormat:
    """Opcode and fields of an instruction; the fields are in the order of a program's integers."""

    opcode: int
    fields: tuple[Field, ...]


class Tables(NamedTuple):
    """The tables of the library."""

    enums: dict[str, dict[str, int]]
    schemes: list[list[str]]
    instructions: dict[str, InstructionFormat]
    records: dict[str, tuple[Field, ...]]


def _text() -> str:
    older = (
        "torch_armllm's compiled library is older than its Python code; build it again with `pip install .`"
    )
    try:
        tables: str = torch.ops.armllm.plan_tables()
    except AttributeError as error:
        raise ImportError(older) from error
    if not tables.count("\nscheme "):  # it has instructions, but not the traits of schemes
        raise ImportError(older)
    return tables


def _read() -> Tables:
    enums: dict[str, dict[str, int]] = {}
    schemes: list[list[str]] = []
    instructions: dict[str, list[Field]] = {}
    records: dict[str, list[Field]] = {}
    for line in _text().splitlines():
        kind, *words = line.split()
        if kind == "enum":
            enums.setdefault(words[0], {})[words[1]] = int(words[2])
        elif kind == "scheme":
            schemes.append(words)
        elif kind == "instruction":
            fields = instructions[words[0]] = []
        elif kind == "record":
            fields = records[words[0]] = []
        else:
            fields.append(Field(*words))
    formats = {
        name: InstructionFormat(number, tuple(fields))
        for number, (name, fields) in enumerate(instructions.items())
    }
    return Tables(enums, schemes, formats, {name: tuple(fields) for name, fields in records.items()})


ENUMS, SCHEME_ROWS, INSTRUCTIONS, RECORDS = _read()
"""``ENUMS[type][name]`` is an enumerator's number; ``SCHEME_ROWS`` are names and traits of schemes, as words;
``INSTRUCTIONS[name]`` is an instruction's format; ``RECORDS[name]`` are the fields of a list's records."""
