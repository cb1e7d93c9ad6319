"""Calls that a model may make, and that match the schemas of strict tools once they have begun."""

from __future__ import annotations

from typing import Any

from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.grammar import triggered_calls
from torch_armllm.engine.sampling_params import StructuredOutputsParams
from torch_armllm.server.middleware.warnings import note_warnings
from torch_armllm.server.protocol.chat import ChatRequest, Tool


def strict_calls(body: ChatRequest, format: ChatFormat, parallel: bool) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that constrain the calls of a request with strict tools.

    There are none where no tool is strict, and where a warning says why the schemas are not enforced.

    Args:
        body: the request.
        format: the model's format.
        parallel: False to end the output with its first call.
    """
    tools = body.tools or []
    if not any(tool.function.strict for tool in tools):
        return {}
    try:
        if _has_constraint(body):
            raise ValueError("the request has another constraint on its output")
        if body.use_beam_search:
            raise ValueError("beams are not bound to a format")
        schemas = {tool.function.name: _schema(tool) for tool in tools}
        return {
            "structured_outputs": StructuredOutputsParams(
                structural_tag=triggered_calls(format, schemas, parallel)
            )
        }
    except ValueError as error:
        why = ascii(str(error).removeprefix("structured outputs: ")[:200])[1:-1]
        note_warnings([f"strict tools are not enforced, because {why}"])
        return {}


def _has_constraint(body: ChatRequest) -> bool:
    given = body.response_format
    return body.structured_outputs is not None or (given is not None and given.type != "text")


def _schema(tool: Tool) -> dict[str, Any] | None:
    """Returns the schema of a tool's arguments; of one that is not strict, their names alone."""
    schema = tool.function.parameters
    if tool.function.strict or schema is None:
        return schema
    properties = schema.get("properties")
    return {"properties": dict.fromkeys(properties, {})} if isinstance(properties, dict) else None
