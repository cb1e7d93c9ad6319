"""What reaches the layers of a stage, and which of them read the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from torch_armllm.quant.layers import Layer


class FloatInputs:
    """What reaches a layer in the float model, batch by batch, and the first layer that reads it."""

    def __init__(self, leader: nn.Module) -> None:
        self.leader = leader
        self.inputs: list[Tensor] = []


def record_inputs(layers: Sequence[Layer], run: Callable[[], None]) -> dict[str, FloatInputs]:
    """The inputs of some layers by name while something runs; layers that read one tensor share theirs."""
    found: dict[str, FloatInputs] = {}
    last: list[Any] = [None, None]

    def hook(layer: Layer) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x = arguments[0]
            if layer.name not in found:
                found[layer.name] = last[1] if x is last[0] and layer.layout is None else FloatInputs(module)
            own = found[layer.name]
            if own.leader is module:
                if layer.layout is None:
                    own.inputs.append(x.detach())
                last[:] = x, own

        return see

    handles = [x.module.register_forward_pre_hook(hook(x)) for x in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found
