"""Tests of the pass constant_masks: rows of adapters that a constant mask picks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import clean, constant_masks, fold_constants
from torch_armllm.passes.lib.context import PassContext


class Adapters(nn.Module):
    """X-MOD: each language's adapter computes the texts of its language."""

    def __init__(self, language: int, read_again: bool = False) -> None:
        super().__init__()
        self.language, self.read_again = language, read_again
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        languages = self.language * torch.ones(1)
        out = torch.zeros_like(x)
        seen = out[..., :3]
        for number, layer in enumerate(self.layers):
            mask = languages == number
            out[mask] = torch.tanh(layer(x[mask])) * 2.0
        return out + x + seen.sum() if self.read_again else out + x


@pytest.mark.parametrize("language", [0, 1, 2])
def test_rows_of_one_language_are_all_or_none(language: int) -> None:
    torch.manual_seed(0)
    module, x = Adapters(language), torch.randn(1, 4, 6)
    graph = export(module, x)
    assert "index_put_" in ops(graph)
    for rewrite in (clean, fold_constants, constant_masks, clean):
        rewrite.run(graph, PassContext())
    graph.graph.lint()
    graph.recompile()
    assert not {"index", "index_put_", "eq", "ones"} & set(ops(graph))
    assert ops(graph).count("linear") == (1 if language < 2 else 0)
    sizes = {str(n.meta["val"].shape[0]) for n in graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    assert not any(size.startswith("u") for size in sizes)
    for length in (4, 7):
        x = torch.randn(1, length, 6)
        assert torch.equal(graph(x), module(x))


def test_writes_to_a_tensor_that_is_read_again_are_kept() -> None:
    torch.manual_seed(0)
    module, x = Adapters(1, read_again=True), torch.randn(1, 4, 6)
    graph = export(module, x)
    for rewrite in (clean, fold_constants, constant_masks):
        rewrite.run(graph, PassContext())
    graph.recompile()
    torch.testing.assert_close(graph(x), module(x))
