"""Constraints of requests on their outputs."""

from __future__ import annotations

from typing import Any

from torch_armllm.engine.sampling_params import StructuredOutputsParams
from torch_armllm.server.errors import bad_request


def constraint(param: str, **formats: Any) -> StructuredOutputsParams:
    """Returns the constraint of a request.

    Args:
        param: the request's field, for error messages.
        formats: fields of `StructuredOutputsParams`.

    Raises:
        ApiError: the constraint is empty, given twice, or larger than allowed.
    """
    try:
        return StructuredOutputsParams(**formats)
    except ValueError as error:
        raise bad_request(error, param) from error
