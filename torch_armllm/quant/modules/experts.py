"""Packed experts of a Mixture-of-Experts layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_armllm.hf.expert_layout import ExpertLayout
from torch_armllm.ops import moe
from torch_armllm.ops.linear import GROUP, rotate_groups
from torch_armllm.quant.modules.linear import NOT_COMPUTED_WITH, Origin, shown_error
from torch_armllm.quant.packing import dequantize_matrix, split_panels
from torch_armllm.quant.schemes.base import op_name


class PackedExperts(NamedTuple):
    """Panels of gate and up and of down, and their biases: see `QuantExperts`."""

    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor | None, Tensor | None]


class QuantExperts(nn.Module):
    """All experts of a layer with packed weights; called as transformers calls its experts modules.

    Attributes:
        gate_up_packed: uint8 (E, 2·⌈I/16⌉, bytes); panels of gate and up alternate; without a gate, up alone.
        down_packed: uint8 (E, ⌈H/16⌉, bytes).
        gate_up_bias: (E, 2, I), gate first, (E, I) without a gate, or None.  down_bias: (E, H), or None.
        num_experts, hidden_dim, intermediate_dim: E, H, I.
        activation: name of the gated activation, as the ops know it.
        limit, up_limit: of the activations that clamp or cap.
        scheme, error, shell, float_dtype, rotated: as in `QuantLinear`; both weights are rotated, or none.
        layout: how the module it replaced stores its weights.
        lora: module whose ``factors`` are those of adapters; None: none.
    """

    NOT_COMPUTED_WITH = NOT_COMPUTED_WITH

    gate_up_packed: Tensor
    down_packed: Tensor
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        weights: PackedExperts,
        intermediate_dim: int,
        hidden_dim: int,
        scheme: str,
        layout: ExpertLayout,
        origin: Origin,
        rotated: bool = False,
    ) -> None:
        super().__init__()
        self.rotated = rotated
        self.lora: nn.Module | None = None
        self.float_dtype = origin.float_dtype
        self.layout = layout
        self.num_experts = weights.gate_up.shape[0]
        self.hidden_dim = hidden_dim
        self.intermediate_dim = intermediate_dim
        self.scheme = scheme
        self.activation = layout.activation
        self.limit = layout.limit
        self.error = origin.error
        self.register_buffer("gate_up_packed", weights.gate_up)
        self.register_buffer("down_packed", weights.down)
        for name, bias in zip(("gate_up_bias", "down_bias"), weights.biases, strict=True):
            self.register_parameter(name, None if bias is None else nn.Parameter(bias, requires_grad=False))
        self._shell = (origin.shell,)

    @property
    def shell(self) -> nn.Module | None:
        """The module that this module replaced."""
        return self._shell[0]

    @property
    def gated(self) -> bool:
        """True if the experts have a gate."""
        return self.layout.gated

    @property
    def identity_experts(self) -> int:
        """Number of ids after the experts' for which a row itself is the result."""
        return self.layout.identity_experts

    @property
    def up_limit(self) -> float:
        """Cap of up in ``silu_softcapped``."""
        return self.layout.up_limit

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """Sums the chosen experts of each token.

        Args:
            hidden_states: (T, H), bfloat16, float16 or float32.
            top_k_index: integers (T, k) in 0 … E − 1, or of `identity_experts` ids after them; None if the
                rows are E equal consecutive parts, one per expert.
            top_k_weights: floats (T, k), or None likewise.

        Returns:
            (T, H) of the type of `hidden_states`.
        """
        if top_k_index is None or top_k_weights is None:
            experts = torch.arange(self.num_experts, dtype=torch.int32)[:, None]
            top_k_index = experts.expand(-1, hidden_states.shape[0] // self.num_experts).reshape(-1, 1)
            top_k_weights = torch.ones(top_k_index.shape)
        if self.lora is not None:
            factors: moe.ExpertAdapters = self.lora.factors  # type: ignore[assignment]
            return moe.int4_moe_lora(
                hidden_states,
                top_k_index,
                top_k_weights,
                self.gate_up_packed,
                self.down_packed,
                self.intermediate_dim,
                factors,
                op_name(self.scheme),
                self.activation,
                self.limit,
                self.gate_up_bias,
                self.down_bias,
                self.gated,
                self.identity_experts,
                self.up_limit,
                self.rotated,
            )
        return moe.int4_moe(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_packed,
            self.down_packed,
            self.intermediate_dim,
            op_name(self.scheme),
            self.activation,
            self.limit,
            self.gate_up_bias,
            self.down_bias,
            self.gated,
            identity_experts=self.identity_experts,
            up_limit=self.up_limit,
            rotated=self.rotated,
        )

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """The dequantized float32 weights: (E, 2·I, H), gate first, or (E, I, H); and (E, H, I)."""
        sizes = (self.intermediate_dim, self.hidden_dim, self.scheme)
        parts = split_panels(self.gate_up_packed) if self.gated else (self.gate_up_packed,)
        halves = [dequantize_matrix(half, *sizes) for half in parts]
        down = dequantize_matrix(self.down_packed, self.hidden_dim, self.intermediate_dim, self.scheme)
        weights = torch.cat(halves, dim=1), down
        if self.rotated:
            return rotate_groups(weights[0]) / GROUP, rotate_groups(weights[1]) / GROUP
        return weights

    def extra_repr(self) -> str:
        """Text that `print(model)` shows."""
        return (
            f"num_experts={self.num_experts}, hidden_dim={self.hidden_dim}, "
            f"intermediate_dim={self.intermediate_dim}, activation={self.activation}, scheme={self.scheme}, "
            f"error={shown_error(self.error)}" + (", rotated" if self.rotated else "")
        )
