"""Descriptions of the fields of request schemas, from docstrings, for `/openapi.json`."""

from __future__ import annotations

import inspect
import re
from typing import Any

_FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)


def describe(schema: dict[str, Any], model: type[Any]) -> None:
    """Moves the attributes of docstrings to the properties of a JSON schema.

    Args:
        schema: of the model; changed in place.
        model: its class, and those that its `DOCUMENTED_BY` names, have the docstrings.
    """
    sources = [*getattr(model, "DOCUMENTED_BY", ()), *reversed(model.__mro__)]
    texts: dict[str, str] = {}
    for source in sources:
        texts |= attribute_texts(source)
    for name, property_ in schema.get("properties", {}).items():
        if name in texts:
            property_["description"] = texts[name]
    if "description" in schema:
        schema["description"] = schema["description"].partition("\n\nAttributes:\n")[0]


def attribute_texts(documented: type[Any]) -> dict[str, str]:
    """Returns the texts of the attributes in a class's docstring by their names."""
    whole = inspect.cleandoc(documented.__doc__ or "")
    section = whole.partition("Attributes:\n")[2].partition("\n\n")[0]
    _, *parts = _FIELD.split(section)
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}
