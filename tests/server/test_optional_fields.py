"""Null in the place of a field that may be left out, as clients send it: the field's default."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

import torch_armllm.server.protocol as protocol
from tests.support.server_live import NAME, Live
from torch_armllm.server.protocol.body import RequestPart
from torch_armllm.server.protocol.completions import CompletionRequest


def parts(base: type[BaseModel] = RequestPart) -> list[type[BaseModel]]:
    for module in pkgutil.iter_modules(protocol.__path__):
        importlib.import_module(f"{protocol.__name__}.{module.name}")
    return [each for sub in base.__subclasses__() for each in (sub, *parts(sub))]


@pytest.mark.parametrize("part", parts(), ids=lambda part: part.__name__)
def test_null_is_the_default_of_every_optional_field(part: type[BaseModel]) -> None:
    names = {
        name: field.alias or name for name, field in part.model_fields.items() if not field.is_required()
    }
    try:
        given = {"model": "a"} if part.__name__ == "LoadRequest" else {}
        plain = part.model_validate(given)
    except ValidationError as error:  # required fields are missing, and nothing else
        fault = error
    else:
        nulls = part.model_validate({**given, **{name: None for name in names.values() if name not in given}})
        assert nulls == plain
        return
    with pytest.raises(ValidationError) as same:
        part.model_validate(dict.fromkeys(names.values()))
    assert same.value.errors(include_input=False) == fault.errors(include_input=False)


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "echo": None, "ignore_eos": None, "n": None}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "skip_special_tokens": None, "priority": None}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a", "name": None, "tool_calls": None}],
            **{"max_tokens": 1, "add_generation_prompt": None, "include_reasoning": None, "tools": None},
        },
    ),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "system": None}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1, "include_reasoning": None, "store": None}),
    ("/v1/embeddings", {"input": "a", "normalize": None, "priority": None, "dimensions": None}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": None, "return_token_strs": None}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_routes_take_null(server: Live, path: str, body: dict[str, Any]) -> None:
    got = httpx.post(server.base + path, json={"model": NAME, **body}, timeout=30)
    assert got.status_code == 200, got.text


@pytest.mark.parametrize("name", ["prompt", "unknown"])
def test_null_of_other_fields_is_no_default(name: str) -> None:
    if name == "unknown":
        assert CompletionRequest.model_validate({"prompt": "a", name: None}).prompt == "a"
        return
    with pytest.raises(ValueError, match="prompt"):
        CompletionRequest.model_validate({"prompt": None})
