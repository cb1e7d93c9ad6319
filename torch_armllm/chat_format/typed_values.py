"""Values of arguments that are written without quotes: their types are in the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

_MOST_NESTED = 20
"""References that are followed, and levels of schemas that are read."""


class ToolSchemas:
    """Schemas of the arguments of tools.

    Args:
        tools: name and JSON schema of the arguments of each.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None]) -> None:
        self._schemas = tools
        self.names = tuple(tools)
        self.by_length = tuple(sorted(tools, key=len, reverse=True))

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def keys(self, name: str) -> tuple[str, ...]:
        """Returns the names of a tool's arguments."""
        properties = (self._schemas.get(name) or {}).get("properties")
        return tuple(properties) if isinstance(properties, dict) else ()

    def argument(self, name: str, key: str) -> Any:
        """Returns the schema of an argument, with the tool's definitions; None if it is not known."""
        schema = self._schemas.get(name) or {}
        properties = schema.get("properties")
        found = properties.get(key) if isinstance(properties, dict) else None
        return resolved(found, schema) if isinstance(found, dict) else None


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns a schema with the references at its top, and in its alternatives, followed."""
    for _ in range(_MOST_NESTED):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        if not reference.startswith("#/"):
            return None
        found: Any = root
        for part in reference[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, Mapping) else None
        schema = found
    else:
        return None
    if not isinstance(schema, dict):
        return None
    for field in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(field), list):
            kept = [part for part in parts if not isinstance(part, dict) or "$ref" not in part]
            found = [resolved(part, root) for part in parts if isinstance(part, dict) and "$ref" in part]
            schema = {**schema, field: kept + [part for part in found if part is not None]}
    return schema


def types(schema: Any, depth: int = 0) -> set[str]:
    """Returns the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict) or depth > _MOST_NESTED:
        return set()
    found = schema.get("type")
    if isinstance(found, str):
        return {found}
    if isinstance(found, list):
        return {each for each in found if isinstance(each, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_type(value) for value in values}
    for field in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(field), list) and parts:
            alternatives = [types(part, depth + 1) for part in parts]
            return set() if not all(alternatives) else set().union(*alternatives)
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else set()


def is_text(schema: Any) -> bool:
    """True if a schema allows nothing but strings."""
    return types(schema) == {"string"}


def typed(text: str, schema: Any) -> Any:
    """Returns a value that is written without quotes.

    A string where the schema allows nothing else; else what JSON makes of it, else Python, if the schema
    allows that; else a string.
    """
    allowed = types(schema)
    if allowed == {"string"}:
        return text
    stripped = text.strip()
    for value in _readings(stripped):
        kind = _type(value)
        if not allowed or kind in allowed or (kind == "integer" and "number" in allowed):
            return value
        if kind == "number" and "integer" in allowed and float(value).is_integer():
            return int(value)
        if "string" not in allowed:  # a wrong type is the tool's to refuse
            return value
    return text


def _readings(text: str) -> Iterator[Any]:
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value)  # which may be nested too deeply for it
        yield value
        return
    except (ValueError, RecursionError):
        pass
    try:
        yield python_value(text)
    except ValueError:
        return


def python_value(text: str) -> Any:
    """Returns the value of a Python literal, which may hold JSON's ``true``, ``false`` and ``null``.

    Raises:
        ValueError: the text is none, or no JSON value.
    """
    try:
        value = _literal(ast.parse(text.strip(), mode="eval").body)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError("no literal") from error
    return value


_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("no literal")
        keys = [_literal(key) for key in node.keys if key is not None]
        return dict(zip(map(_key, keys), map(_literal, node.values), strict=True))
    return ast.literal_eval(node)


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "string")
