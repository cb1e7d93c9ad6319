"""Code that a trace which is under way does not record."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torch_armllm.ops.untraced import call_at_end, untraced


class _Owner:
    def __init__(self) -> None:
        self.me = self


def _targets(act: Callable[[], None]) -> list[str]:
    """Returns the operators of an exported module that acts before it adds 1."""

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            act()
            return x + 1

    graph = torch.export.export(Module(), (torch.ones(1, 4),)).graph
    return [node.name for node in graph.nodes if node.op == "call_function"]


def test_what_the_end_of_an_object_calls_is_no_part_of_a_graph() -> None:
    """The garbage collector ends an engine of earlier ranks while the next model is exported."""
    closed: list[Tensor] = []

    def close(value: float) -> None:
        closed.append(torch.full((1,), value).mul(2))

    assert _targets(lambda: close(1.0)) != ["add"], "a call that is traced shows"
    closed.clear()
    end = call_at_end(_Owner(), close, 1.0)
    assert _targets(lambda: (gc.collect(), None)[1]) == ["add"]
    assert not end.alive
    assert [tensor.tolist() for tensor in closed] == [[2.0]], "it is a tensor, not a part of the trace"


def test_a_torch_without_a_way_to_leave_calls_untraced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.utils._python_dispatch._disable_current_modes")
    with pytest.raises(RuntimeError, match="has no way to leave a call untraced"):
        untraced()
