"""Schemas of arguments that are written without JSON around them: what a grammar can hold them to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch_armllm.chat_format.typed_values import resolved, types

_OF_OBJECTS = (
    *("anyOf", "oneOf", "allOf", "not", "if", "dependentRequired", "dependentSchemas"),
    *("minProperties", "maxProperties", "propertyNames"),
)
_OF_VALUES = frozenset(
    {"pattern", "minLength", "not", "if", "minimum", "maximum", "multipleOf"}
    | {"exclusiveMinimum", "exclusiveMaximum"}
)
_COMPOUND = {"object", "array"}


def object_properties(schema: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Returns the schemas of a tool's arguments by their names, and the names of those that are required.

    Raises:
        ValueError: the schema asks for more than each argument by itself.
    """
    found = resolved(schema, schema)
    if found is None:
        raise ValueError("the schema refers to what is not in it")
    if (more := next((field for field in _OF_OBJECTS if field in found), None)) is not None:
        raise ValueError(f"the schema has {more}, which holds for JSON alone")
    properties, required = found.get("properties") or {}, found.get("required") or ()
    if not isinstance(properties, dict) or not set(required) <= set(properties):
        raise ValueError("the schema requires an argument that it does not describe")
    return properties, set(required)


def plain_values(schema: Mapping[str, Any]) -> list[str] | None:
    """Returns the texts that a schema allows without quotes; None: any, up to `maxLength`.

    Raises:
        ValueError: the schema asks for more, such as a pattern.
    """
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        if not all(texts) or any(text != text.strip() for text in texts):
            raise ValueError("a value is empty, or has white space around it")
        return texts
    allowed = types(schema)
    parts = [schema]
    for field in ("anyOf", "oneOf", "allOf"):
        parts += [part for part in schema.get(field) or () if isinstance(part, dict)]
    for number, part in enumerate(parts):
        refused = _OF_VALUES | ({"enum", "const", "maxLength"} if number else set())
        if (more := next((field for field in part if field in refused), None)) is not None:
            raise ValueError(f"a text has {more} in its schema, which holds for JSON alone")
    if allowed & _COMPOUND:
        raise ValueError("a value is a text, or an object or a list")
    return None
