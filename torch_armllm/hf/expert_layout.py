"""How experts modules store their weights, and reading them whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ExpertLayout:
    """How an experts module stores its weights and which activation joins gate and up.

    Attributes:
        transposed: weights are (E, in, out) and not (E, out, in).
        interleaved: gate and up rows alternate instead of following one another.
        biased: every weight has one, named after it.
        activation: name of the gated activation, as the ops know it.
        limit: of the activations that clamp.
        gated: there is a gate; without, ``up_proj`` stands alone and the activation is ``act(up) · up``.
        batched: the module takes rows for each of its experts, one expert's behind the other's (Llama 4), and
            not a choice of experts for each row.
    """

    transposed: bool
    interleaved: bool
    biased: bool
    activation: str
    limit: float = 7.0
    gated: bool = True
    batched: bool = False

    @property
    def weights(self) -> tuple[str, str]:
        """Names of the parameters."""
        return ("gate_up_proj" if self.gated else "up_proj"), "down_proj"

    def inner(self, weight: Tensor) -> tuple[list[Tensor], ...]:
        """Views of the gate and the up matrices (I, H), one an expert; of the latter alone without a gate."""
        weight = weight.detach()
        weight = weight.transpose(1, 2) if self.transposed else weight
        return tuple(list(part) for part in self._parts(weight))

    def outer(self, weight: Tensor) -> list[Tensor]:
        """Views of the down matrices (H, I), one an expert."""
        weight = weight.detach()
        return list(weight.transpose(1, 2) if self.transposed else weight)

    def inner_bias(self, bias: Tensor) -> Tensor:
        """Biases (E, 2, I), gate first; (E, I) without a gate."""
        return torch.stack(self._parts(bias.detach()), dim=1) if self.gated else bias.detach()

    def biases(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """The module's biases as the op takes them, (E, 2, I) or (E, I), and (E, H)."""
        if not self.biased:
            return None, None
        inner, outer = (parameter(module, f"{name}_bias") for name in self.weights)
        return self.inner_bias(inner), outer

    def store_biases(self, module: nn.Module, inner: Tensor | None, outer: Tensor | None) -> None:
        """Gives a module that has none its biases back, from (E, 2, I) or (E, I) and (E, H)."""
        names = [f"{name}_bias" for name in self.weights]
        if inner is not None and outer is not None and getattr(module, names[0]).is_meta:
            rows = inner.transpose(1, 2) if self.interleaved and self.gated else inner
            for name, bias in zip(names, (rows.flatten(1), outer), strict=True):
                setattr(module, name, nn.Parameter(bias, requires_grad=False))

    def store(self, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        """Brings (E, 2·I, H), gate first, or (E, I, H) and (E, H, I) into the module's own layout."""
        if self.interleaved and self.gated:
            inner = torch.stack(inner.chunk(2, dim=1), dim=2).flatten(1, 2)
        if self.transposed:
            inner, outer = inner.transpose(1, 2), outer.transpose(1, 2)
        return inner.contiguous(), outer.contiguous()

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Gate and up of (E, 2·I) or (E, 2·I, H); without a gate, what is given."""
        if not self.gated:
            return (rows,)
        if self.interleaved:
            return rows[:, 0::2], rows[:, 1::2]
        half = rows.shape[1] // 2
        return rows[:, :half], rows[:, half:]


def parameter(module: nn.Module, name: str) -> Tensor:
    """A parameter of a module, detached."""
    value = getattr(module, name)
    assert isinstance(value, Tensor)
    return value.detach()
