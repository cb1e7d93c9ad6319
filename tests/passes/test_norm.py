"""Tests of the passes norm and add_norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import add_norm, clean, norm
from torch_armllm.passes.lib.context import PassContext


class RmsNorm(nn.Module):
    def __init__(self, width: int, plus_one: bool = False, weight_first: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.plus_one, self.weight_first = plus_one, weight_first

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        if self.plus_one:
            return (wide * (1.0 + self.weight.float())).type_as(x)
        narrow = wide.to(x.dtype)
        return self.weight * narrow if self.weight_first else narrow * self.weight


def run_norm(module: nn.Module, x: Tensor) -> tuple[list[str], list[str], Tensor, Tensor]:
    graph = export(module, x)
    clean.run(graph, PassContext())
    before, expected = ops(graph), graph(x)
    norm.run(graph, PassContext())
    graph.recompile()
    return before, ops(graph), expected, graph(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["w", "w after", "1 + w"])
def test_rms_norm_is_recognized(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = RmsNorm(40, kind == "1 + w", kind == "w").to(dtype)
    x = torch.randn(1, 5, 40).to(dtype)
    before, after, expected, got = run_norm(module, x)
    assert {"pow", "mean", "rsqrt", "mul"} <= set(before)
    assert after == ["armllm::rms_norm"]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_with_pow_and_without_weights_are_recognized(dtype: torch.dtype) -> None:
    class Power(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            return (wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + 1e-5, -0.5)).type_as(x)

    x = torch.randn(1, 5, 40).to(dtype)
    before, after, expected, got = run_norm(Power(), x)
    assert before.count("pow") == 2 and after == ["armllm::rms_norm"]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_whose_factor_alone_is_computed_in_float32_are_recognized(dtype: torch.dtype) -> None:
    class Factor(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5).to(x.dtype)

    x = torch.randn(1, 5, 3, 40).to(dtype)
    _, after, expected, got = run_norm(Factor(), x)
    assert after == ["armllm::rms_norm"]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_torch_norms_are_recognized() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.LayerNorm(24),
        nn.RMSNorm(24, eps=1e-6),
        nn.LayerNorm(24, elementwise_affine=False),
        nn.RMSNorm(24, eps=1e-6, elementwise_affine=False),
    )
    x = torch.randn(1, 5, 24)
    before, after, expected, got = run_norm(module, x)
    assert before == 2 * ["layer_norm", "rms_norm"]
    assert after == 2 * ["armllm::layer_norm", "armllm::rms_norm"]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_other_expressions_are_not_changed() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-5)

    before, after, _, _ = run_norm(Halved(), torch.randn(1, 5, 24))
    assert before == after


@pytest.mark.parametrize("layer", [lambda: RmsNorm(40), lambda: nn.LayerNorm(40)])
def test_residual_add_is_fused(layer: object) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layer()  # type: ignore[operator]

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            total = x + y
            return self.norm(total) * total

    torch.manual_seed(0)
    x, y = torch.randn(1, 5, 40), torch.randn(1, 5, 40)
    graph = export(Block(), x, y)
    clean.run(graph, PassContext())
    norm.run(graph, PassContext())
    before, expected = ops(graph), graph(x, y)
    assert add_norm.run(graph, PassContext()) == 1
    graph.graph.lint()
    graph.recompile()
    name = before[1].replace("::", "::add_")
    assert before == ["add", before[1], "mul"] and ops(graph) == [name, "mul"]
    torch.testing.assert_close(graph(x, y), expected, atol=1e-5, rtol=1e-5)


def test_broadcast_add_is_not_fused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.shift = nn.LayerNorm(40), nn.Parameter(torch.randn(40))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.shift)

    graph = export(Block(), torch.randn(1, 5, 40))
    norm.run(graph, PassContext())
    assert add_norm.run(graph, PassContext()) == 0


def test_norms_that_share_a_weight_are_fused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.sin() + self.norm(x)) + self.norm(x + x.cos())

    x = torch.randn(1, 4, 16)
    graph = export(Twice(), x)
    norm.run(graph, PassContext())
    expected = graph(x)
    assert add_norm.run(graph, PassContext()) == 2
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(x), expected, atol=1e-5, rtol=1e-5)
