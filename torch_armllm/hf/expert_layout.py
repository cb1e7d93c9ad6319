"""Layouts of the weights of experts modules, and access to the weights in any layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ExpertLayout:
    """The weight layout and the activation of an experts module.

    Attributes:
        transposed: weights are (E, in, out), not (E, out, in).
        interleaved: gate and up rows alternate; otherwise gates precede ups.
        biased: each weight has a bias, named after it.
        activation: the ops' name of the gated activation.
        limit: the limit of clamping activations, or the cap of the gate in ``silu_softcapped``.
        gated: the experts have a gate; without one, ``up_proj`` stands alone and the activation is
            ``act(up) · up``.
        batched: the input has rows for each expert, expert after expert (Llama 4), not a choice of experts
            for each row.
        identity_experts: number of ids after the experts' for which a row itself is the result (LongCat).
            ``gate_up_proj`` holds rows for them too, which nothing reads.
        up_limit: the cap of up in ``silu_softcapped``.
    """

    transposed: bool
    interleaved: bool
    biased: bool
    activation: str
    limit: float = 7.0
    gated: bool = True
    batched: bool = False
    identity_experts: int = 0
    up_limit: float = 7.0

    @property
    def weights(self) -> tuple[str, str]:
        """The names of the parameters."""
        return ("gate_up_proj" if self.gated else "up_proj"), "down_proj"

    def inner(self, weight: Tensor) -> tuple[list[Tensor], ...]:
        """Returns views of each expert's gate and up matrices (I, H); only of up without a gate."""
        weight = weight.detach()[: weight.shape[0] - self.identity_experts]
        weight = weight.transpose(1, 2) if self.transposed else weight
        return tuple(list(part) for part in self._parts(weight))

    def outer(self, weight: Tensor) -> list[Tensor]:
        """Returns views of each expert's down matrix (H, I)."""
        weight = weight.detach()
        return list(weight.transpose(1, 2) if self.transposed else weight)

    def inner_bias(self, bias: Tensor) -> Tensor:
        """Returns biases (E, 2, I), gate first; (E, I) without a gate."""
        return torch.stack(self._parts(bias.detach()), dim=1) if self.gated else bias.detach()

    def up_biases(self, bias: Tensor) -> list[Tensor]:
        """Returns views of each expert's bias of up (I,)."""
        return list(self._parts(bias.detach())[-1])

    def biases(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Returns the module's biases in the op's layout: (E, 2, I) or (E, I), and (E, H)."""
        if not self.biased:
            return None, None
        inner, outer = (parameter(module, f"{name}_bias") for name in self.weights)
        return self.inner_bias(inner), outer

    def store_biases(self, module: nn.Module, inner: Tensor | None, outer: Tensor | None) -> None:
        """Restores the biases of a module on the meta device, from (E, 2, I) or (E, I), and (E, H)."""
        names = [f"{name}_bias" for name in self.weights]
        if inner is not None and outer is not None and getattr(module, names[0]).is_meta:
            rows = inner.transpose(1, 2) if self.interleaved and self.gated else inner
            for name, bias in zip(names, (rows.flatten(1), outer), strict=True):
                setattr(module, name, nn.Parameter(bias, requires_grad=False))

    def store(self, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        """Converts (E, 2·I, H), gate first, or (E, I, H), and (E, H, I) to the module's layout."""
        if self.interleaved and self.gated:
            inner = torch.stack(inner.chunk(2, dim=1), dim=2).flatten(1, 2)
        if self.identity_experts:
            inner = torch.cat([inner, inner.new_zeros(self.identity_experts, *inner.shape[1:])])
        if self.transposed:
            inner, outer = inner.transpose(1, 2), outer.transpose(1, 2)
        return inner.contiguous(), outer.contiguous()

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Splits (E, 2·I) or (E, 2·I, H) into gate and up; without a gate, returns the input."""
        if not self.gated:
            return (rows,)
        if self.interleaved:
            return rows[:, 0::2], rows[:, 1::2]
        half = rows.shape[1] // 2
        return rows[:, :half], rows[:, half:]


def parameter(module: nn.Module, name: str) -> Tensor:
    """Returns a parameter of a module, detached."""
    value = getattr(module, name)
    assert isinstance(value, Tensor)
    return value.detach()
