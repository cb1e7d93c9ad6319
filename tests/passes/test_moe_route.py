"""Tests of the pass moe_route: equivalent routers are fused, all others are not changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.capture.markers import experts  # noqa: F401  (registers the marker op)
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes import clean, dense_linear, moe_route
from torch_armllm.passes.lib.context import PassContext

EXPERTS, TOP_K = 12, 3
Router = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def softmax(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """OLMoE."""
    return torch.topk(F.softmax(logits, dim=-1, dtype=torch.float), TOP_K)


def renormalized(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Mixtral, Qwen3; the division is in place."""
    weights, ids = torch.topk(F.softmax(logits.float(), dim=-1), TOP_K, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), ids


def scattered(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weights are scattered to a row of all experts, and gathered again."""
    weights, ids = torch.topk(F.softmax(logits.float(), dim=-1), TOP_K, dim=-1)
    row = torch.zeros_like(logits).scatter_(1, ids, weights)
    return row.gather(1, ids) * 0.5, ids


def among_the_best(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gpt-oss, Granite."""
    best, ids = logits.float().topk(TOP_K, dim=-1)
    return F.softmax(best, dim=1).type_as(logits), ids


def grouped_softmax(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V2."""
    scores = logits.softmax(dim=-1)
    best = scores.view(-1, 4, EXPERTS // 4).max(dim=-1).values
    mask = torch.zeros_like(best)
    mask.scatter_(1, torch.topk(best, k=2, dim=-1, sorted=False)[1], 1)
    kept = mask.unsqueeze(-1).expand(-1, 4, EXPERTS // 4).reshape(-1, EXPERTS)
    weights, ids = torch.topk(scores.masked_fill(~kept.bool(), 0.0), TOP_K, dim=-1, sorted=False)
    return weights * 16.0, ids


def grouped_sigmoid(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3, GLM-4.5."""
    scores = logits.sigmoid()
    choice = scores + bias
    best = choice.view(-1, 3, EXPERTS // 3).topk(2, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(best)
    mask.scatter_(1, torch.topk(best, k=2, dim=-1, sorted=False)[1], 1)
    kept = mask.unsqueeze(-1).expand(-1, 3, EXPERTS // 3).reshape(-1, EXPERTS)
    ids = torch.topk(choice.masked_fill(~kept.bool(), float("-inf")), TOP_K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5, ids


def corrected_sigmoid(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """MiniMax-M2."""
    scores = F.sigmoid(logits.float())
    ids = torch.topk(scores + bias, TOP_K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / weights.sum(dim=-1, keepdim=True), ids


def corrected_softmax(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """ERNIE 4.5."""
    scores = F.softmax(logits.float(), dim=-1)
    ids = torch.topk(scores + bias, TOP_K, dim=-1)[1]
    weights = torch.gather(scores, -1, ids)
    return weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=1e-12), ids


def sigmoid_of_the_best(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Cohere 2 MoE."""
    best, ids = torch.topk(logits, TOP_K, dim=-1)
    return torch.sigmoid(best), ids


def all_but_the_best_off(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4: all experts are passed, most with a weight of zero."""
    best, ids = torch.topk(logits, TOP_K, dim=-1)
    scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, best).sigmoid()
    return scores, torch.arange(EXPERTS).expand_as(scores)


def corrected_logits(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Kolibri: selection by logits and a bias, weights by sigmoids."""
    ids = torch.topk(logits + bias, TOP_K, dim=-1)[1]
    return logits.gather(1, ids).sigmoid(), ids


def sparse_mixer(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Phi-3.5-MoE: shares of the logits near each choice."""
    left, weights, ids = logits, [], []
    for _ in range(TOP_K):
        top, best = left.max(dim=-1, keepdim=True)
        far = ((top - logits) / logits.abs().clamp(min=top)) > 0.3
        weights.append(torch.softmax(left.masked_fill(far, float("-inf")), dim=-1).gather(-1, best))
        ids.append(best)
        left = torch.scatter(left, -1, best, float("-inf"))
    return torch.concat(weights, -1), torch.concat(ids, -1)


def scaled_by_expert(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gemma 4: one factor per expert."""
    weights, ids = renormalized(logits, bias)
    return weights * bias[ids], ids


def with_a_floor(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """LFM2: a constant added to the sum, visible if all scores are low."""
    weights, ids = torch.topk(logits.sigmoid(), TOP_K, dim=-1)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-6), ids


def with_two_floors(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A constant added to the sum, and another one to the weights."""
    weights, ids = with_a_floor(logits, bias)
    return weights + 1e-3, ids


def worst(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The experts with the lowest scores."""
    return torch.topk(F.softmax(logits, dim=-1), TOP_K, largest=False)


KNOWN: dict[Router, tuple[object, ...]] = {
    softmax: ("softmax", False),
    renormalized: ("softmax", True),
    scattered: ("softmax", False, 0.5),
    among_the_best: ("softmax", True),  # the same but for the spelling
    grouped_softmax: ("softmax", False, 16.0, None, 4, 2),
    grouped_sigmoid: ("sigmoid", True, 2.5, "bias", 3, 2),
    corrected_sigmoid: ("sigmoid", True, 1.0, "bias"),
    corrected_softmax: ("softmax", True, 1.0, "bias"),
    sigmoid_of_the_best: ("sigmoid", False),
    with_a_floor: ("sigmoid", True, 1.0, None, 1, 1, 1e-6),
    corrected_logits: ("topk_sigmoid", False, 1.0, "bias"),
    sparse_mixer: ("sparsemixer", False, 1.0, None, 1, 1, 0.3),
    all_but_the_best_off: ("sigmoid", False),
}


class Layer(nn.Module):
    """A router and small experts, on tokens (1, T, 16)."""

    def __init__(self, router: Router, read_logits: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate = nn.Linear(16, EXPERTS, bias=False)
        self.router, self.read_logits = router, read_logits
        for name, shape in (("gate_up", (EXPERTS, 16, 16)), ("down", (EXPERTS, 16, 8)), ("bias", (EXPERTS,))):
            self.register_buffer(name, torch.randn(shape, generator=generator) * 0.4)
        nn.init.normal_(self.gate.weight, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, 16)
        logits = self.gate(flat)
        weights, ids = self.router(logits, self.bias)
        out = torch.ops.armllm.experts(flat, ids, weights, self.gate_up, self.down, "silu")
        return (out + logits.sum(-1, keepdim=True) if self.read_logits else out).view(x.shape)


def captured(module: nn.Module) -> tuple[torch.fx.GraphModule, Tensor]:
    x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(1))
    graph = export(module, x)
    clean.run(graph, PassContext())
    return graph, x


@pytest.mark.parametrize("router", KNOWN, ids=lambda router: router.__name__)
def test_equivalent_routers_are_recognized(router: Router) -> None:
    graph, x = captured(Layer(router))
    expected = graph(x)
    assert moe_route.run(graph, PassContext()) == 1
    graph.recompile()
    (node,) = (n for n in graph.graph.nodes if "moe_route" in str(n.target))
    scoring, renormalize, scale, bias, groups, kept, *floor = (
        *KNOWN[router],
        *(1.0, None, 1, 1)[len(KNOWN[router]) - 2 :],
    )
    route = OpCall(node)
    assert (route.top_k, route.scoring, route.renormalize) == (TOP_K, scoring, renormalize)
    assert (route.groups, route.top_k_groups, route.epsilon) == (groups, kept, *(floor or [1e-20]))
    assert route.scale == pytest.approx(scale, rel=1e-6)
    assert (route.correction_bias is None) == (bias is None)
    left = set(ops(graph)) - {"view", "reshape", "linear", "armllm::moe_route", "armllm::experts"}
    assert not left
    torch.testing.assert_close(graph(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "router", [scaled_by_expert, with_two_floors, worst], ids=lambda router: router.__name__
)
def test_other_routers_are_not_changed(router: Router) -> None:
    graph, x = captured(Layer(router))
    before, expected = ops(graph), graph(x)
    assert moe_route.run(graph, PassContext()) == 0
    graph.recompile()
    assert ops(graph) == before
    assert torch.equal(graph(x), expected)


@pytest.mark.parametrize(
    ("router", "value", "fused"),
    [
        (corrected_sigmoid, 0.0, 1),
        (grouped_sigmoid, 0.0, 1),
        (corrected_logits, 0.0, 1),
        (scaled_by_expert, 1.0, 0),
    ],
)
def test_fusion_is_right_for_weights_that_are_assigned_later(
    router: Router, value: float, fused: int
) -> None:
    layer = Layer(router)
    assigned = layer.bias.clone()
    layer.bias.fill_(value)
    graph, x = captured(layer)
    assert moe_route.run(graph, PassContext()) == fused
    graph.recompile()
    torch.testing.assert_close(graph(x), layer(x), atol=1e-5, rtol=1e-5)
    layer.bias.copy_(assigned)
    torch.testing.assert_close(graph(x), layer(x), atol=1e-5, rtol=1e-5)


def only_one(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """AFMoE with one expert a token: all weights are 1, so that the choice alone tells the scoring."""
    scores = logits.sigmoid()
    ids = torch.topk(scores + bias, 1, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


def test_small_bias_is_not_lost() -> None:
    """A bias too small to change the choice of the probes' experts was taken for none."""
    layer = Layer(only_one)
    layer.bias.mul_(0.01)
    graph, x = captured(layer)
    assert moe_route.run(graph, PassContext()) == 1
    (node,) = (n for n in graph.graph.nodes if "moe_route" in str(n.target))
    assert node.args[5] is not None
    graph.recompile()
    x = torch.randn(1, 2000, 16, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(graph(x), layer(x), atol=1e-5, rtol=1e-5)


def test_logits_with_other_readers_are_kept() -> None:
    graph, x = captured(Layer(grouped_sigmoid, read_logits=True))
    expected = graph(x)
    assert moe_route.run(graph, PassContext()) == 1
    graph.recompile()
    assert ops(graph).count("linear") == 1
    assert "scatter_" not in ops(graph)
    torch.testing.assert_close(graph(x), expected, atol=1e-5, rtol=1e-5)


def test_scores_with_other_readers_are_kept() -> None:
    class Probabilities(Layer):
        def forward(self, x: Tensor) -> Tensor:
            flat = x.view(-1, 16)
            scores = F.softmax(self.gate(flat), dim=-1)
            weights, ids = torch.topk(scores, TOP_K)
            total = weights.sum(-1, keepdim=True)
            weights /= total
            out = torch.ops.armllm.experts(flat, ids, weights, self.gate_up, self.down, "silu")
            return (out + weights.sum(-1, keepdim=True) + scores[:, :1]).view(x.shape)

    graph, x = captured(Probabilities(softmax))
    expected = graph(x)
    assert moe_route.run(graph, PassContext()) == 1
    graph.recompile()
    assert "div_" in ops(graph)
    torch.testing.assert_close(graph(x), expected, atol=1e-5, rtol=1e-5)


def test_correction_bias_of_other_shape_and_dtype() -> None:
    """ERNIE 4.5's bias has the shape (1, experts), and is bfloat16 in a bfloat16 model."""
    layer = Layer(lambda logits, bias: corrected_softmax(logits, bias.squeeze()))
    layer.bias = layer.bias[None].bfloat16()
    graph, x = captured(layer)
    expected = graph(x)
    assert moe_route.run(graph, PassContext()) == 1
    graph.recompile()
    (node,) = (n for n in graph.graph.nodes if "moe_route" in str(n.target))
    assert node.args[5].op == "get_attr" and node.args[5].meta["val"].shape == (EXPERTS,)
    torch.testing.assert_close(graph(x), expected, atol=1e-5, rtol=1e-5)


def test_float32_router_in_a_16_bit_model_is_one_layer() -> None:
    class Wide(Layer):
        def forward(self, x: Tensor) -> Tensor:
            flat = x.view(-1, 16)
            logits = F.linear(flat.float(), self.gate.weight.float())
            weights, ids = corrected_sigmoid(logits, self.bias)
            gate_up, down = self.gate_up.bfloat16(), self.down.bfloat16()
            return torch.ops.armllm.experts(flat, ids, weights, gate_up, down, "silu").view(x.shape)

    layer = Wide(corrected_sigmoid)
    layer.gate.bfloat16()
    x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    graph = export(layer, x)
    clean.run(graph, PassContext())
    expected = graph(x)
    assert (moe_route.run(graph, PassContext()), dense_linear.run(graph, PassContext())) == (1, 1)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    (node,) = (n for n in graph.graph.nodes if "dense_linear" in str(n.target))
    assert node.args[3] is True
    assert node.meta["val"].dtype == torch.float32
    assert node.args[0].meta["val"].dtype == node.args[1].meta["val"].dtype == torch.bfloat16
    torch.testing.assert_close(graph(x), expected, atol=2e-2, rtol=2e-2)


class SharedRouter(Layer):
    """Divides the scores of routed and shared experts by their sum, as Inkling does."""

    joint_scores = True

    def __init__(self) -> None:
        super().__init__(softmax)
        self.gate = nn.Linear(16, EXPERTS + 2, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.7]))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 16)
        logits = self.gate(flat)
        choice = logits.sigmoid()[..., :-2] + self.bias
        ids = torch.topk(choice, TOP_K, dim=-1, sorted=False)[1]
        both = torch.cat([logits[..., :-2].gather(-1, ids), logits[..., -2:]], -1)
        shares = F.logsigmoid(both)
        total = shares if self.joint_scores else shares[..., :TOP_K]
        shares = (shares - torch.logsumexp(total, -1, keepdim=True)).exp() * 8.0 * self.scale
        routed, shared = shares[..., :TOP_K].contiguous(), shares[..., -2:].contiguous()
        out = torch.ops.armllm.experts(flat, ids, routed, self.gate_up, self.down, "silu")
        return (out + shared.sum(-1, keepdim=True) * shared[:, :1]).view(x.shape)


def test_router_of_routed_and_shared_experts_is_fused() -> None:
    graph, x = captured(SharedRouter())
    expected = graph(x)
    assert moe_route.run(graph, PassContext()) == 1
    graph.recompile()
    assert "armllm::moe_route" in ops(graph)
    assert not {"topk", "gather", "logsumexp"} & set(ops(graph))
    torch.testing.assert_close(graph(x), expected, atol=1e-5, rtol=1e-5)


def test_router_with_another_sum_is_kept() -> None:
    class RoutedAlone(SharedRouter):
        joint_scores = False

    graph, x = captured(RoutedAlone())
    assert moe_route.run(graph, PassContext()) == 0
    assert "topk" in ops(graph)
