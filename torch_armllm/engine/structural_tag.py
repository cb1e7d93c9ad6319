"""Structural tags: free text in which a trigger begins a structure, such as a call of a function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Structure(NamedTuple):
    """A structure: a text, JSON of a schema, and another text.

    Attributes:
        begin: begins with a trigger.
        schema: of the JSON after it.
        end: after the JSON; may be empty.
    """

    begin: str
    schema: dict[str, Any]
    end: str


class StructuralTag(NamedTuple):
    """Structures, and the triggers that begin them."""

    triggers: tuple[str, ...]
    structures: tuple[Structure, ...]


def read_structural_tag(given: str | dict[str, Any]) -> StructuralTag:
    """Returns the structures of a format.

    Args:
        given: ``{"triggers": […], "structures": [{"begin": …, "schema": …, "end": …}]}``, or that as text.

    Raises:
        ValueError: it is no JSON, has another form, or a structure begins with no trigger.
    """
    tag: Any = given
    if isinstance(given, str):
        try:
            tag = json.loads(given)
        except (ValueError, RecursionError) as fault:
            raise ValueError(f"structured outputs: structural_tag is not valid JSON: {fault}") from fault
    if isinstance(tag, Mapping) and "format" in tag:
        raise ValueError(
            "structured outputs: structural_tag has a format, as xgrammar's; give triggers and structures"
        )
    if not isinstance(tag, Mapping) or not all(_is_list(tag.get(n)) for n in ("triggers", "structures")):
        raise ValueError(
            'structured outputs: structural_tag needs {"triggers": [text, …], "structures": [{"begin": text, '
            '"schema": {…}, "end": text}, …]}'
        )
    triggers = tag["triggers"]
    for trigger in triggers:
        if not isinstance(trigger, str) or not trigger:
            raise ValueError(f"structured outputs: the trigger {trigger!r} is no text of a character or more")
    return StructuralTag(tuple(triggers), tuple(_structure(each, triggers) for each in tag["structures"]))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _structure(given: Any, triggers: list[str]) -> Structure:
    if not isinstance(given, Mapping):
        raise ValueError(f"structured outputs: the structure {given!r} is no dict of begin, schema and end")
    begin, schema, end = (given.get(name) for name in Structure._fields)
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise ValueError(
            f"structured outputs: a structure needs the texts begin and end, and the dict schema; it has "
            f"{', '.join(map(str, given)) or 'nothing'}"
        )
    if not any(begin.startswith(trigger) for trigger in triggers):
        raise ValueError(
            f"structured outputs: the structure {begin[:100]!r} begins with no trigger; triggers: "
            f"{', '.join(map(repr, triggers))[:200]}"
        )
    return Structure(begin, schema, end)
