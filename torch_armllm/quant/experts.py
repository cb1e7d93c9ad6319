"""Reading the weights of transformers' experts modules, whatever their layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS: tuple[str, ...] = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertLayout:
    """How an experts module stores its weights and which activation joins gate and up.

    Attributes:
        transposed: weights are (E, in, out) and not (E, out, in).
        interleaved: gate and up rows alternate instead of following one another.
        biased: there are ``gate_up_proj_bias`` and ``down_proj_bias``.
        activation: name of the gated activation, as the ops know it.
        limit: clamp of ``swiglu_clamped``.
    """

    transposed: bool
    interleaved: bool
    biased: bool
    activation: str
    limit: float = 7.0

    def gate_up(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the gate and the up matrices (I, H), one an expert."""
        weight = _parameter(module, "gate_up_proj")
        weight = weight.transpose(1, 2) if self.transposed else weight
        gate, up = self._halves(weight)
        return list(gate), list(up)

    def down(self, module: nn.Module) -> list[Tensor]:
        """Views of the down matrices (H, I), one an expert."""
        weight = _parameter(module, "down_proj")
        return list(weight.transpose(1, 2) if self.transposed else weight)

    def biases(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Biases (E, 2, I), gate first, and (E, H)."""
        if not self.biased:
            return None, None
        halves = self._halves(_parameter(module, "gate_up_proj_bias"))
        return torch.stack(halves, dim=1), _parameter(module, "down_proj_bias")

    def store_biases(self, module: nn.Module, gate_up: Tensor | None, down: Tensor | None) -> None:
        """Gives a module that has none its biases back, from (E, 2, I) and (E, H)."""
        if gate_up is not None and down is not None and module.gate_up_proj_bias.is_meta:
            rows = gate_up.transpose(1, 2) if self.interleaved else gate_up
            for name, bias in (("gate_up_proj_bias", rows.flatten(1)), ("down_proj_bias", down)):
                setattr(module, name, nn.Parameter(bias, requires_grad=False))

    def store(self, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """Brings (E, 2·I, H), gate first, and (E, H, I) into the module's own layout."""
        if self.interleaved:
            gate_up = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1, 2)
        if self.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return gate_up.contiguous(), down.contiguous()

    def _halves(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up of (E, 2·I) or (E, 2·I, H)."""
        if self.interleaved:
            return rows[:, 0::2], rows[:, 1::2]
        half = rows.shape[1] // 2
        return rows[:, :half], rows[:, half:]


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' ``use_experts_implementation`` made the module's class."""
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
    return hasattr(type(module), "_apply_gate") and all(hasattr(module, flag) for flag in flags)


def read_layout(module: nn.Module) -> ExpertLayout | str:
    """The layout of an experts module, or the reason why the fused op cannot compute it."""
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over several processes"
    if not module.has_gate:
        return "experts without a gate have no fused op"
    if getattr(module, "has_post_expert_norm", False):
        return "experts followed by a norm of their own have no fused op"
    missing = [name for name in WEIGHTS if not isinstance(getattr(module, name, None), Tensor)]
    if missing:
        return f"it has no parameter {missing[0]}"
    interleaved = not module.is_concatenated
    found = _recognise(module, interleaved)
    if found is None:
        return "its activation has no fused op"
    return ExpertLayout(bool(module.is_transposed), interleaved, bool(module.has_bias), *found)


def _parameter(module: nn.Module, name: str) -> Tensor:
    value = getattr(module, name)
    assert isinstance(value, Tensor)
    return value.detach()


def _swiglu_clamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "silu": lambda gate, up, limit: F.silu(gate) * up,
    "gelu": lambda gate, up, limit: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up, limit: F.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up, limit: F.relu(gate) * up,
    "swiglu_clamped": _swiglu_clamped,
}


def _recognise(module: nn.Module, interleaved: bool) -> tuple[str, float] | None:
    """Finds the gated activation by what it computes: class names say too little."""
    limit = next(
        (v for n in ("limit", "swiglu_limit") if isinstance(v := getattr(module, n, None), (int, float))), 7.0
    )
    points = torch.linspace(-12.0, 12.0, 97)
    gate, up = (axis.flatten() for axis in torch.meshgrid(points, points, indexing="ij"))
    joined = torch.stack([gate, up], dim=-1)
    assert joined.shape[-1] == 2, "one pair a row: interleaved and concatenated are the same"
    gated: Callable[[Tensor], Tensor] = module._apply_gate  # type: ignore[assignment]
    try:
        with torch.no_grad():
            got = gated(joined)[..., 0]
    except Exception:  # noqa: BLE001 - a gate of another signature is one that the op cannot compute
        return None
    for name, function in ACTIVATIONS.items():
        if torch.allclose(got, function(gate, up, limit), rtol=1e-5, atol=1e-5):
            return name, limit
    return None
