"""Records the inputs of a stage's layers, and which layers share an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from torch_armllm.quant.layers import Layer


class FloatInputs:
    """The inputs of a layer in the float model, batch by batch.

    Attributes:
        leader: the first layer that reads them.
        inputs: one tensor per batch.
    """

    def __init__(self, leader: nn.Module) -> None:
        self.leader = leader
        self.inputs: list[Tensor] = []

    def multiply(self, factors: Tensor) -> None:
        """Multiplies the inputs by a factor for each channel (K,)."""
        self.inputs = [x * factors.to(x.dtype) for x in self.inputs]


def record_inputs(layers: Sequence[Layer], run: Callable[[], None]) -> dict[str, FloatInputs]:
    """Records the inputs of layers by name during ``run``; layers that read one tensor share an entry."""
    recorded: dict[str, FloatInputs] = {}
    last: list[Any] = [None, None]  # the last input, and its entry

    def hook(layer: Layer) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x = arguments[0]
            if layer.name not in recorded:
                recorded[layer.name] = (
                    last[1] if x is last[0] and layer.layout is None else FloatInputs(module)
                )
            entry = recorded[layer.name]
            if entry.leader is module:
                entry.inputs.append(x.detach())
                last[:] = x, entry

        return record

    handles = [x.module.register_forward_pre_hook(hook(x)) for x in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return recorded
