"""Slow reference implementations of the quantized modules in plain PyTorch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from torch_armllm.ops.activation import FUNCTIONS
from torch_armllm.ops.linear import reference_int4_linear, reference_int8_linear
from torch_armllm.quant.layers import ModuleSlots
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.schemes.base import op_name


class ReferenceLinear(nn.Module):
    """A `QuantLinear` in plain PyTorch: INT8 activations per token, exact sums, float32 scales."""

    def __init__(self, source: QuantLinear) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, in_features) to (…, out_features)."""
        source = self.source
        if source.scheme == "int8":
            return reference_int8_linear(
                x, source.weight_packed, source.out_features, source.bias, rotated=source.rotated
            )
        return reference_int4_linear(
            x, source.weight_packed, source.out_features, source.scheme, source.bias, rotated=source.rotated
        )


class ReferenceExperts(nn.Module):
    """A `QuantExperts` in plain PyTorch: activated rows stay float32, then are quantized per token."""

    def __init__(self, source: QuantExperts) -> None:
        super().__init__()
        self.source = source

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """Maps (T, H) to (T, H); the chosen experts are summed in the order of `top_k_index`."""
        if top_k_index is None or top_k_weights is None:
            rows_per_expert = hidden_states.float().chunk(self.source.num_experts)
            outputs = [self._expert(expert, rows) for expert, rows in enumerate(rows_per_expert)]
            return torch.cat(outputs).to(hidden_states.dtype)
        parts = hidden_states.new_zeros((*top_k_index.shape, self.source.hidden_dim), dtype=torch.float32)
        for expert in range(self.source.num_experts):
            tokens, slots = torch.where(top_k_index == expert)
            if len(tokens):
                parts[tokens, slots] = self._expert(expert, hidden_states[tokens].float())
        tokens, slots = torch.where(top_k_index >= self.source.num_experts)
        parts[tokens, slots] = hidden_states[tokens].float()
        total = parts.new_zeros(hidden_states.shape)
        for slot in range(top_k_index.shape[1]):
            total = total + parts[:, slot] * top_k_weights[:, slot, None].float()
        return total.to(hidden_states.dtype)

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        source = self.source
        packed, size = source.gate_up_packed[expert], source.intermediate_dim
        scheme = op_name(source.scheme)
        panels = (packed[0::2], packed[1::2]) if source.gated else (packed, packed)
        turn = source.rotated
        gate, up = (reference_int4_linear(rows, part, size, scheme, rotated=turn) for part in panels)
        if source.gate_up_bias is not None:
            bias = source.gate_up_bias[expert].float().expand(2, -1)
            gate, up = gate + bias[0], up + bias[1]
        inner = FUNCTIONS[source.activation](gate, up, source.limit, source.up_limit)
        packed = source.down_packed[expert]
        down_bias = None if source.down_bias is None else source.down_bias[expert]
        return reference_int4_linear(inner, packed, source.hidden_dim, scheme, down_bias, rotated=turn)


def emulate(model: nn.Module) -> nn.Module:
    """Returns a copy of a quantized model whose quantized modules run in plain PyTorch."""
    twin = copy.deepcopy(model)
    slots_of_model = ModuleSlots(twin)
    for module in list(twin.modules()):
        if isinstance(module, QuantLinear):
            slots_of_model.replace(module, ReferenceLinear(module))
        elif isinstance(module, QuantExperts):
            slots_of_model.replace(module, ReferenceExperts(module))
    return twin
