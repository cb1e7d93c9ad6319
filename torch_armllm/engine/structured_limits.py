"""Limits of structured outputs, checked before a parser reads them.

llguidance recurses through rules, references and nested schemas, and the time of a token's mask grows with
the number of rules.  Within these limits a grammar compiles in less than a second, on the stack that
`StructuredOutputs` allocates for it.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_BYTES = 256 << 10
"""UTF-8 bytes of a grammar, of a schema, or of all choices together."""
MAX_REGEX_BYTES = 32 << 10
MAX_CHOICES = 4096
MAX_RULES = 2000
"""Rules and terminals of a Lark grammar."""
MAX_NESTING = 64
"""Objects and arrays inside each other in a JSON schema, and parentheses in a grammar or regex."""

_RULE = re.compile(r"^[?!]*[A-Za-z_]\w*(\.-?\d+)?(\[[^\]\n]*\])?(\{[^}\n]*\})?\s*:", re.MULTILINE)


def check_size(kind: str, value: Any) -> None:
    """Raises ValueError if a format is larger than its limit.

    Args:
        kind: field of `StructuredOutputsParams`.
        value: its value, of the field's type.
    """
    if kind == "choice":
        _limit("choices", len(value), MAX_CHOICES)
        _limit("bytes of choices", sum(len(text.encode("utf-8", "replace")) for text in value), MAX_BYTES)
    elif kind == "json":
        _limit("nested levels of the schema", _nesting(value), MAX_NESTING)
        text = value if isinstance(value, str) else json.dumps(value)
        _limit("bytes of the schema", len(text.encode("utf-8", "replace")), MAX_BYTES)
    elif kind in ("grammar", "regex"):
        _limit(f"bytes of the {kind}", len(value.encode("utf-8", "replace")), _BYTES[kind])
        _limit(f"nested parentheses of the {kind}", _depth(value, "(", ")"), MAX_NESTING)
        if kind == "grammar":
            _limit("rules of the grammar", len(_RULE.findall(value)), MAX_RULES)


_BYTES = {"grammar": MAX_BYTES, "regex": MAX_REGEX_BYTES}


def _limit(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"structured outputs: {count} {what}, at most {limit} are allowed")


def _nesting(schema: Any) -> int:
    """Returns the nesting of a schema: of a text by its brackets, which may overcount those in strings."""
    if isinstance(schema, str):
        return _depth(schema, "{[", "}]")
    depth, level = 0, [schema]
    while level and depth <= MAX_NESTING:
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
