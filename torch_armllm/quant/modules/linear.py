"""The packed linear layer that replaces ``nn.Linear``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_armllm.ops import linear
from torch_armllm.quant.packing import dequantize_matrix
from torch_armllm.system.forks import prepare_for_forks

NOT_COMPUTED_WITH = frozenset({"error", "_shell"})
"""Attributes that may differ between two modules that compute the same from their weights."""


@dataclass(frozen=True)
class Origin:
    """The layer that a packed module replaced.

    Attributes:
        shell: the module; without its weight, unless the original weights are kept.
        float_dtype: type of the weight before it was quantized.
        error: relative round-trip error ‖W − Ŵ‖ / ‖W‖ of the weight; None if the float weight is unknown.
    """

    shell: nn.Module | None
    float_dtype: torch.dtype
    error: float | None = 0.0


@dataclass(frozen=True)
class Form:
    """The form of a packed weight and its activations; see `QuantLinear`."""

    order: Tensor | None = None
    digits: int = 1
    blocks: int = 1
    rotated: bool = False


_PLAIN = Form()


class QuantLinear(nn.Module):
    """``y = x · Wᵀ (+ bias)`` with a packed INT4 or INT8 weight; activations become INT8 per token inside.

    Attributes:
        weight_packed: uint8 (⌈out_features / 16⌉, bytes).
        bias: the float bias of the layer it replaces, or None.
        in_features, out_features: sizes of the weight.
        scheme: a name of `torch_armllm.quant.SCHEMES`.
        shell, float_dtype, error: see `Origin`.
        order: int32 (in_features,): column j of the packed weight belongs to input ``order[j]``; None if
            columns are in the order of the inputs.
        digits: INT8 digits of each activation, 1 or 2: the second holds what the first rounds off. A plan
            takes it over when the model is patched.
        rotated: the packed weight is W · H, group by group, and activations are rotated in the op: see
            `torch_armllm.ops.linear.rotate_groups`.
        lora: module that adds adapters to the result (…, out_features), called with it and x; None: none.
        blocks: number of diagonal blocks of the weight.  With more than one, ``y[…, i] = x[…, i] · W[i]ᵀ`` of
            tokens (…, blocks, in_features), where W[i] is the i-th part of the rows: INT8, without bias.
    """

    NOT_COMPUTED_WITH = NOT_COMPUTED_WITH

    weight_packed: Tensor
    bias: nn.Parameter | None
    order: Tensor | None

    def __init__(
        self,
        weight_packed: Tensor,
        in_features: int,
        out_features: int,
        scheme: str,
        bias: Tensor | None,
        origin: Origin,
        form: Form = _PLAIN,
    ) -> None:
        super().__init__()
        prepare_for_forks()
        self.lora: nn.Module | None = None
        self.float_dtype = origin.float_dtype
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self.error = origin.error
        self.digits = form.digits
        self.blocks = form.blocks
        self.rotated = form.rotated
        self.register_buffer("weight_packed", weight_packed)
        self.register_buffer("order", form.order)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        # In a tuple: a shell is no submodule, its parameters are not the model's any more.
        self._shell = (origin.shell,)

    @property
    def shell(self) -> nn.Module | None:
        """The module that this module replaced."""
        return self._shell[0]

    @property
    def op(self) -> str:
        """Name of the op that it calls."""
        if self.blocks > 1:
            return "int8_heads_linear"
        return "int8_linear" if self.scheme == "int8" else "int4_linear"

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) of bfloat16, float16 or float32 to (…, out_features) of the same type."""
        if self.blocks > 1:
            rows = self.out_features // self.blocks
            weight = self.weight_packed.view(self.blocks, -1, self.weight_packed.shape[-1])
            tokens = x.reshape(-1, self.blocks, self.in_features)
            return linear.int8_heads_linear(tokens, weight, rows).view(*x.shape[:-1], rows)
        out = self._product(x if self.order is None else x.index_select(-1, self.order))
        return out if self.lora is None else self.lora(out, x)  # type: ignore[no-any-return]

    def _product(self, x: Tensor) -> Tensor:
        inputs = None, self.digits, self.rotated
        if self.scheme == "int8":
            return linear.int8_linear(x, self.weight_packed, self.out_features, self.bias, *inputs)
        return linear.int4_linear(x, self.weight_packed, self.out_features, self.scheme, self.bias, *inputs)

    def dequantize(self, rows: slice = slice(None)) -> Tensor:
        """Returns the dequantized float32 weight (out_features, in_features), or rows of whole panels."""
        first, last, _ = rows.indices(self.out_features)
        panels = self.weight_packed[first // linear.PANEL : linear.panel_count(last)]
        value = dequantize_matrix(panels, last - first, self.in_features, self.scheme)
        if self.rotated:
            value = linear.rotate_groups(value) / linear.GROUP
        if self.order is None:
            return value
        return torch.empty_like(value).index_copy_(1, self.order.long(), value)

    def extra_repr(self) -> str:
        """Text that `print(model)` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme}, "
            f"bias={self.bias is not None}, error={shown_error(self.error)}"
            + (f", digits={self.digits}" if self.digits > 1 else "")
            + (", rotated" if self.rotated else "")
            + (f", blocks={self.blocks}" if self.blocks > 1 else "")
        )


def shown_error(error: float | None) -> str:
    """Formats a round-trip error for `print(model)`."""
    return "unknown" if error is None else f"{error:.4f}"
