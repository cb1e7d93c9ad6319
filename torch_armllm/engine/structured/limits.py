"""Limits of structured outputs, checked before a parser reads them.

llguidance recurses through rules, references and nested schemas, and the time of a token's mask grows with
the number of rules.  Within these limits a grammar compiles in less than a second, on the stack that
`StructuredOutputs` allocates for it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from torch_armllm.engine.structured.endless_rules import check_ends
from torch_armllm.engine.structured.structural_tag import read_structural_tag
from torch_armllm.engine.structured.tag_formats import Format, Grammar, Regex, Schema

MAX_BYTES = 256 << 10
"""UTF-8 bytes of a grammar, of a schema, or of all choices together."""
MAX_REGEX_BYTES = 32 << 10
MAX_CHOICES = 4096
MAX_RULES = 2000
"""Rules and terminals of a Lark grammar."""
MAX_GBNF_RULES = 500
"""Rules of a grammar in EBNF, the time of whose conversion grows with their square."""
MAX_FORMATS = 4096
"""Formats that a structural tag consists of; a structure has four, the texts at its ends included, and an
argument of a tool, outside of JSON, five."""
MAX_NESTING = 64
"""Objects and arrays inside each other in a JSON schema, and parentheses in a grammar or regex."""
MAX_NUMBER = 1 << 53
"""Magnitude of numbers in ``const`` and ``enum``.  llguidance rounds larger ones to another number, and
-2⁶³ overflows its stack, however large that is."""
MAX_MULTIPLE = 100_000
"""Least common multiple of all ``multipleOf`` of a schema, without factors 2 and 5 and without decimal point.
The automaton that checks a remainder has a state for each; a million take 7 seconds."""

_RULE = re.compile(r"^[?!]*[A-Za-z_]\w*(\.-?\d+)?(\[[^\]\n]*\])?(\{[^}\n]*\})?\s*:", re.MULTILINE)

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)


def check_size(kind: str, value: Any) -> None:
    """Raises ValueError if a format is larger than its limit, or a rule of a grammar never ends.

    Args:
        kind: field of `StructuredOutputsParams`.
        value: its value, of the field's type.
    """
    if kind == "choice":
        _limit("choices", len(value), MAX_CHOICES)
        _limit("bytes of choices", sum(len(text.encode("utf-8", "replace")) for text in value), MAX_BYTES)
    elif kind == "json":
        _limit("nested levels of the schema", _nesting(value, MAX_NESTING), MAX_NESTING)
        text = value if isinstance(value, str) else json.dumps(value)
        _limit("bytes of the schema", len(text.encode("utf-8", "replace")), MAX_BYTES)
        _check_numbers(text)
    elif kind in ("grammar", "regex"):
        _limit(f"bytes of the {kind}", len(value.encode("utf-8", "replace")), _BYTES[kind])
        _limit(f"nested parentheses of the {kind}", _depth(value, "(", ")"), MAX_NESTING)
        if kind == "grammar" and is_gbnf(value):
            _limit("rules of the grammar", len(_GBNF_RULE.findall(value)), MAX_GBNF_RULES)
        elif kind == "grammar":
            _limit("rules of the grammar", len(_RULE.findall(value)), MAX_RULES)
            check_ends(value)
            for schema in value.split("%json")[1:]:
                _check_numbers(schema.lstrip())
    elif kind == "structural_tag":
        _limit("nested levels of the structural tag", _nesting(value, 4 * MAX_NESTING), 4 * MAX_NESTING)
        text = value if isinstance(value, str) else json.dumps(value)
        _limit("bytes of the structural tag", len(text.encode("utf-8", "replace")), MAX_BYTES)
        _check_tag(read_structural_tag(value))


def _check_tag(tag: Format) -> None:
    formats = list(tag.walk())
    _limit("formats of the structural tag", len(formats), MAX_FORMATS)
    for each in formats:
        if isinstance(each, Schema):
            check_size("json", each.schema)
        elif isinstance(each, Regex):
            check_size("regex", each.pattern)
        elif isinstance(each, Grammar):
            check_size("grammar", each.grammar)


def is_gbnf(grammar: str) -> bool:
    """True for a grammar in EBNF, whose rules are ``name ::= …``; the others are Lark's."""
    return _GBNF_RULE.search(grammar) is not None


_BYTES = {"grammar": MAX_BYTES, "regex": MAX_REGEX_BYTES}


def _check_numbers(text: str) -> None:
    """Raises ValueError for numbers that llguidance cannot represent.

    Args:
        text: begins with a schema; other text is left to the parser, which refuses it.
    """
    try:
        schema, _ = json.JSONDecoder(parse_float=Decimal).raw_decode(text)
    except (ValueError, ArithmeticError, RecursionError):
        return
    multiple = 1
    for key, number, fixed in _numbers(schema):
        if fixed and abs(number) > MAX_NUMBER:
            raise ValueError(
                f"structured outputs: the number {number} in {key} of the schema is beyond ±2^53, "
                "where numbers of JSON are not exact; use a string"
            )
        if key == "multipleOf":
            multiple = math.lcm(multiple, _remainders(number))
            if multiple > MAX_MULTIPLE:
                raise ValueError(
                    f"structured outputs: multipleOf {number}: the least common multiple of all multipleOf "
                    f"of the schema, without factors 2 and 5, may be at most {MAX_MULTIPLE}"
                )


def _numbers(schema: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yields the key of each number of a schema, the number, and whether the output has to repeat it."""
    waiting: list[tuple[str, Any, bool]] = [("", schema, False)]
    while waiting:
        key, value, fixed = waiting.pop()
        if isinstance(value, dict):
            waiting += [(name, each, fixed or name in ("const", "enum")) for name, each in value.items()]
        elif isinstance(value, list):
            waiting += [(key, each, fixed) for each in value]
        elif isinstance(value, (int, Decimal)) and not isinstance(value, bool):
            yield key, value, fixed


def _remainders(number: int | Decimal) -> int:
    """Returns the digits of a number as an integer, without factors 2 and 5."""
    _, digits, _ = Decimal(number).as_tuple()
    count = int("".join(map(str, digits[:_MAX_DIGITS]))) or 1
    for factor in (2, 5):
        while count % factor == 0:
            count //= factor
    return count


_MAX_DIGITS = 40


def _limit(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"structured outputs: {count} {what}, at most {limit} are allowed")


def _nesting(schema: Any, most: int) -> int:
    """Returns the nesting of a schema: of a text by its brackets, which may overcount those in strings.

    Args:
        schema: a text, or what it stands for.
        most: the count ends beyond it.
    """
    if isinstance(schema, str):
        return _depth(schema, "{[", "}]")
    depth, level = 0, [schema]
    while level and depth <= most:
        depth += 1
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
    return depth


def _depth(text: str, opening: str, closing: str) -> int:
    """Returns how deep brackets are nested at most."""
    depth = deepest = 0
    for character in text:
        if character in opening:
            depth += 1
            deepest = max(deepest, depth)
        elif character in closing and depth:
            depth -= 1
    return deepest
