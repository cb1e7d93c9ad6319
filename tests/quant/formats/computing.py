"""A float model that computes as ours does: float32 weights, and what reaches them rounded to INT8."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.ops.linear.reference import quantize_activations

_PLAIN = ("lm_head", "gate", "router", "shared_expert_gate")


def rounded(x: Tensor) -> Tensor:
    """Rows as INT8 with one scale each, in float64."""
    q, scale = quantize_activations(x)
    return q.double() * scale.double()


class _Linear(nn.Module):
    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias

    def forward(self, x: Tensor) -> Tensor:
        y = rounded(x) @ self.weight.double().t()
        return (y if self.bias is None else y + self.bias.double()).to(x.dtype)


class _Experts(nn.Module):
    """Stacked experts with SiLU: gates and ups (E, 2·I, H), downs (E, H, I)."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.gate_up, self.down = source.gate_up_proj.double(), source.down_proj.double()

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float64)
        rows = rounded(x)
        for token in range(len(x)):
            for expert, share in zip(ids[token].tolist(), shares[token].double(), strict=True):
                gate, up = (rows[token] @ self.gate_up[expert].t()).chunk(2)
                inner = (nn.functional.silu(gate) * up).float()
                out[token] += share * (rounded(inner) @ self.down[expert].t())
        return out.to(x.dtype)


def as_ours(model: nn.Module) -> Any:
    """A copy of a float32 model whose layers, but the head and routers, round what reaches them."""
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        owner, _, attribute = name.rpartition(".")
        if isinstance(module, nn.Linear) and attribute not in _PLAIN:
            setattr(twin.get_submodule(owner), attribute, _Linear(module))
        elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            setattr(twin.get_submodule(owner), attribute, _Experts(module))
    return twin


def relative(got: Tensor, wanted: Tensor) -> float:
    """‖got − wanted‖ / ‖wanted‖ of the token that is furthest."""
    distance = (got - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)
    return float(distance.max())
