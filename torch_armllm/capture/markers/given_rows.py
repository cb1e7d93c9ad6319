"""Rows of hidden states that a step is given beside its token ids: an input of draft layers.

Encoders are given types of their tokens in the same way, see `token_types`.

A captured graph has inputs for ids and positions only, so the further input is a marker op.  Outside of a
step its rows are a fixed function of the ids, which lets every check of a graph or a plan run as on other
models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from torch_armllm.ops.op_call import OpCall

_library = torch.library.Library("armllm", "FRAGMENT")
_library.define("given_rows(Tensor input_ids, int columns, ScalarType dtype) -> Tensor")

_given: list[Tensor] = []


def sample_rows(input_ids: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns rows ``(1, T, columns)`` that are functions of the token ids ``(1, T)``."""
    phases = torch.arange(1, columns + 1, dtype=torch.float64) * 0.618034
    return torch.sin((input_ids[..., None] + 1).double() * phases).to(dtype)


def given_now() -> Tensor | None:
    """Returns what the step under way is given; None outside of a step."""
    return _given[-1] if _given else None


def given_rows(input_ids: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns the rows ``(1, T, columns)`` of the step under way, else `sample_rows`."""
    return _given[-1].view(1, -1, columns).clone() if _given else sample_rows(input_ids, columns, dtype)


def _fake(input_ids: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return input_ids.new_empty((*input_ids.shape, columns), dtype=dtype)


_library.impl("given_rows", given_rows, "CompositeExplicitAutograd")
torch.library.register_fake("armllm::given_rows", _fake, lib=_library)


@contextmanager
def giving(rows: Tensor) -> Iterator[None]:
    """Makes the op return these rows ``(T, columns)``, or types ``(T,)``, while the context lasts."""
    _given.append(rows)
    try:
        yield
    finally:
        _given.pop()


def sample_of(module: fx.GraphModule, input_ids: Tensor) -> Tensor | None:
    """Returns the rows ``(T, columns)`` or types ``(T,)`` that a graph is given in checks; None if none."""
    for node in module.graph.nodes:
        if node.target is torch.ops.armllm.token_types.default:
            types: Tensor = torch.ops.armllm.token_types(input_ids, OpCall(node).count)
            return types[0]
        if node.target is torch.ops.armllm.given_rows.default:
            return sample_rows(input_ids, OpCall(node).columns, OpCall(node).dtype)[0]
    return None
