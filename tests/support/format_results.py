"""A float reference of the quantized model: float32 weights, and inputs rounded to INT8."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.ops.linear.reference import quantize_activations

_UNQUANTIZED = ("lm_head", "gate", "router", "shared_expert_gate")


def rounded(x: Tensor) -> Tensor:
    """Rounds rows to INT8 with one scale each, as float64."""
    q, scale = quantize_activations(x.float())
    return q.double() * scale.double()


class _Linear(nn.Module):
    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias

    def forward(self, x: Tensor) -> Tensor:
        y = rounded(x) @ self.weight.double().t()
        return (y if self.bias is None else y + self.bias.double()).to(x.dtype)


class _Experts(nn.Module):
    """Stacked experts that compute their own gate, or Llama 4's batched experts."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = (source,)
        self._batched = not hasattr(source, "_apply_gate")
        transposed = self._batched or source.is_transposed
        self._weights = [
            weight.double().transpose(1, 2) if not transposed else weight.double()
            for weight in (source.gate_up_proj, source.down_proj)
        ]
        self._biases = [getattr(source, f"{name}_proj_bias", None) for name in ("gate_up", "down")]

    def forward(self, x: Tensor, ids: Tensor | None = None, shares: Tensor | None = None) -> Tensor:
        if ids is None or shares is None:
            parts = x.view(len(self._weights[0]), -1, x.shape[-1])
            return torch.cat([self._expert(e, part) for e, part in enumerate(parts)]).to(x.dtype)
        out = torch.zeros_like(x, dtype=torch.float64)
        for token in range(len(x)):
            for expert, share in zip(ids[token].tolist(), shares[token].double(), strict=True):
                out[token] += share * self._expert(expert, x[token : token + 1])[0]
        return out.to(x.dtype)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        [source] = self._source
        inner = self._product(0, expert, x)
        if self._batched:
            gate, up = inner.chunk(2, dim=-1)
            return self._product(1, expert, up * source.act_fn(gate))
        return self._product(1, expert, source._apply_gate(inner))

    def _product(self, index: int, expert: int, x: Tensor) -> Tensor:
        bias = self._biases[index]
        y = rounded(x) @ self._weights[index][expert]
        return y if bias is None else y + bias[expert].double()


def with_rounded_inputs(model: nn.Module, names: Collection[str] | None = None) -> Any:
    """Returns a copy of a float32 model whose layers round their inputs.

    Args:
        model: the model.
        names: quantized modules; by default all except heads and routers.
    """
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        owner, _, attribute = name.rpartition(".")
        if names is not None and name not in names:
            continue
        if isinstance(module, nn.Linear) and attribute not in _UNQUANTIZED:
            setattr(twin.get_submodule(owner), attribute, _Linear(module))
        elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            setattr(twin.get_submodule(owner), attribute, _Experts(module))
    return twin


def relative(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest ‖got − wanted‖ / ‖wanted‖ of all tokens."""
    distance = (actual - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    return float(distance.detach().max())
