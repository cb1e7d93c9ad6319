"""Channel scaling that does not change a model's outputs, as AWQ needs it.

Channels that one module writes and linear layers read are divided in the writer and multiplied in the
readers.  The scales are powers of two: they only change exponents, so the model computes the same bits, and
dividing again restores its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torch_armllm.quant.layers import is_linear, weight_of

MAX_EXPONENT = 4
"""Largest exponent of a channel's scale, a power of two."""
_TWO_SCALINGS = 2.0 ** (2 * MAX_EXPONENT)
"""Largest factor of a weight that one scaling writes and another reads."""
_CHECKED_TOGETHER = 1 << 18


@dataclass(frozen=True)
class ChannelScaling:
    """Channels that one module writes and other modules read.

    Attributes:
        writer: a norm, or a linear layer.
        readers: linear layers.
        repeat: query heads per KV head (grouped-query attention); 1 if each channel is read once.
        head: channels per head; 0 if each channel is read once.
    """

    writer: nn.Module
    readers: tuple[nn.Module, ...]
    repeat: int = 1
    head: int = 0

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The writer and the readers."""
        return (self.writer, *self.readers)

    @property
    def written(self) -> int:
        """Number of channels that the writer writes."""
        return _written(self.writer)

    def spread(self, values: Tensor) -> Tensor:
        """Repeats one value per written channel for the channels that are read."""
        if self.repeat == 1:
            return values
        return values.view(-1, 1, self.head).expand(-1, self.repeat, -1).flatten()

    def gathered(self, values: Tensor) -> Tensor:
        """Returns the mean over the read channels of each written channel."""
        return values if self.repeat == 1 else values.view(-1, self.repeat, self.head).mean(1).flatten()

    @torch.no_grad()
    def scale(self, powers: Tensor) -> None:
        """Divides the written channels by powers of two (written,), and multiplies the readers by them."""
        for parameter in self.writer.parameters(recurse=False):
            parameter.div_(_divisor(self.writer, parameter, powers))
        for reader in self.readers:
            inputs = self.spread(powers)
            weight_of(reader).mul_(inputs[:, None] if isinstance(reader, Conv1D) else inputs)


class AppliedScaling(NamedTuple):
    """A scaling, and the powers of two (written,) that it was applied with."""

    scaling: ChannelScaling
    powers: Tensor


def undo_scalings(applied: Sequence[AppliedScaling]) -> None:
    """Restores the weights of scalings that were applied in this order."""
    for scaling, powers in reversed(applied):
        scaling.scale(1 / powers)


def find_scalings(
    stage: nn.Module, linears: Sequence[nn.Module], call: Any
) -> tuple[list[ChannelScaling], list[str]]:
    """Finds the scalings of a decoder layer, and checks each by running the layer.

    Candidates are each norm with all linear layers that read it, and pairs of linear layers with only
    channel-wise ops between them, such as up with down projection, and value with output projection.

    Weights that would lose bits are not scaled.  The scales may be up to 2 to the power of `MAX_EXPONENT`.

    Args:
        stage: the decoder layer.
        linears: its linear layers that are quantized.
        call: runs the layer and returns its output.

    Returns:
        The scalings, and the names of writers whose channels cannot be scaled.
    """
    expected = call()
    exact = cache(_scales_exactly)
    scalings, refused = [], []
    for scaling, name in _candidates(stage, linears, call):
        powers = torch.exp2(torch.arange(scaling.written) % 3 - 1.0).to(weight_of(scaling.readers[0]).dtype)
        if not all(exact(module) for module in scaling.modules):
            refused.append(name)
            continue
        scaling.scale(powers)
        try:
            same = torch.equal(call(), expected)
        finally:
            scaling.scale(1 / powers)
        if same:
            scalings.append(scaling)
        else:
            refused.append(name)
    return scalings, refused


def _candidates(
    stage: nn.Module, linears: Sequence[nn.Module], call: Any
) -> list[tuple[ChannelScaling, str]]:
    candidates = []
    names = {id(module): name for name, module in stage.named_modules()}
    readers = _readers(stage, linears, call)
    for writer, read in readers:
        candidates.append((ChannelScaling(writer, tuple(read)), names[id(writer)]))
    of_norms = {id(reader) for _, read in readers for reader in read}
    for parent in stage.modules():
        inside = [m for m in parent.children() if any(m is x for x in linears)]
        for reader in inside:
            if id(reader) in of_norms:
                continue  # what it reads is written by no linear layer
            for writer in inside:
                scaling = _pair(parent, writer, reader)
                if scaling is not None and writer is not reader:
                    candidates.append((scaling, f"{names[id(writer)]} for {names[id(reader)]}"))
    return candidates


def _pair(parent: nn.Module, writer: nn.Module, reader: nn.Module) -> ChannelScaling | None:
    """Returns the scaling of two linear layers of one module if their channel counts match, else None."""
    written, read = _written(writer), _read(reader)
    if written == read:
        return ChannelScaling(writer, (reader,))
    head = getattr(parent, "head_dim", None)
    if isinstance(head, int) and read % written == 0 and written % head == 0:
        return ChannelScaling(writer, (reader,), read // written, head)
    return None


def _readers(
    stage: nn.Module, linears: Sequence[nn.Module], call: Any
) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Returns each norm with the linear layers that read its output."""
    outputs: list[tuple[nn.Module, Tensor]] = []
    readers: dict[int, tuple[nn.Module, list[nn.Module]]] = {}

    def record_output(module: nn.Module, arguments: Any, output: Any) -> None:
        outputs.append((module, output))

    def match_input(module: nn.Module, arguments: Any) -> None:
        for norm, output in outputs:
            if output is arguments[0]:
                readers.setdefault(id(norm), (norm, []))[1].append(module)

    norms = [m for m in stage.modules() if _is_norm(m)]
    handles = [m.register_forward_hook(record_output) for m in norms]
    handles += [m.register_forward_pre_hook(match_input) for m in linears]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return list(readers.values())


def _scales_exactly(module: nn.Module) -> bool:
    """True if no parameter overflows or loses bits by two scalings, as small ones of float16 may."""
    for parameter in module.parameters(recurse=False):
        limits = torch.finfo(parameter.dtype)
        least, most = limits.tiny * _TWO_SCALINGS, limits.max / _TWO_SCALINGS
        for part in parameter.detach().flatten().split(_CHECKED_TOGETHER):
            sizes = part.abs()
            if bool((sizes > most).any()) or bool(((sizes < least) & (sizes != 0)).any()):
                return False
    return True


def _divisor(writer: nn.Module, parameter: Tensor, powers: Tensor) -> Tensor:
    """Returns the powers (written,) in the shape that broadcasts over a parameter of the writer."""
    columns = isinstance(writer, Conv1D) and parameter.dim() == 2
    return powers if columns or parameter.dim() == 1 else powers[:, None]


def _is_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    return bool(parameters) and all(p.dim() == 1 for p in parameters) and not list(module.children())


def _written(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1] if isinstance(module, Conv1D) else weight.shape[0]


def _read(module: nn.Module) -> int:
    assert is_linear(module)
    return weight_of(module).shape[0 if isinstance(module, Conv1D) else 1]
