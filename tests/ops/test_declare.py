"""Declarations of ops agree with the schemas of the compiled library."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_armllm.ops  # noqa: F401  (imports the modules that declare ops)
from torch_armllm.ops.declare import arguments, reference


def declared() -> Iterator[Callable[..., Any]]:
    """Yields the functions that `op` has made."""
    seen = set()
    names = [name for name in sys.modules if name.startswith("torch_armllm.ops.") and "triton" not in name]
    for name in names:
        for function in list(vars(sys.modules[name]).values()):
            if inspect.isfunction(function) and function.__code__.co_filename.endswith("declare.py"):
                is_op = hasattr(torch.ops.armllm, function.__name__)
                if is_op and function.__name__ not in seen:
                    seen.add(function.__name__)
                    yield function


OPS = {function.__name__: function for function in declared()}


def test_most_ops_are_declared() -> None:
    assert len(OPS) > 35 and {"paged_attention", "int4_linear", "moe_route", "rms_norm", "sample"} <= set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_signatures_are_those_of_the_schemas(name: str) -> None:
    schema = getattr(torch.ops.armllm, name).default._schema.arguments
    parameters = inspect.signature(OPS[name]).parameters
    assert list(parameters) == [argument.name for argument in schema]
    for argument in schema:
        own = parameters[argument.name].default
        if argument.has_default_value():
            same = list(own) if isinstance(own, tuple) else own
            assert same == argument.default_value, f"{argument.name} of {name}"


def test_defaults_that_a_schema_lacks_are_filled_in() -> None:
    q = torch.randint(-8, 8, (32, 64), dtype=torch.int8)
    multipliers, scales = torch.ones(32, 2, dtype=torch.uint8), torch.rand(32)
    packed = OPS["pack_int4"](q, multipliers, scales)
    assert torch.equal(packed, OPS["pack_int4"](q, multipliers, scales, "g32i"))
    x = torch.randn(3, 64)
    expected = OPS["int4_linear"](x, packed, 32, "g32i")
    assert torch.equal(OPS["int4_linear"](x, packed, 32), expected)
    assert torch.equal(OPS["int4_linear"](x=x, weight=packed, out_features=32), expected)


def test_arguments_have_names_and_defaults() -> None:
    found = arguments("rms_norm", (1, 2), {"eps": 3})
    assert vars(found) == {"x": 1, "weight": 2, "eps": 3, "weight_offset": 0.0}


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1, 2), {}, "rms_norm needs eps"),
        ((1, 2, 3, 4, 5), {}, "rms_norm takes x, weight, eps, weight_offset, and not more"),
        ((1, 2, 3), {"offset": 1}, "rms_norm takes x, weight, eps, weight_offset, and not offset"),
    ],
)
def test_other_arguments_are_refused(args: tuple[int, ...], kwargs: dict[str, int], message: str) -> None:
    @reference("rms_norm")
    def nothing(a: Any) -> None:
        raise AssertionError(a)

    with pytest.raises(TypeError, match=message):
        nothing(*args, **kwargs)
