"""Where the channels of an activation can be scaled without changing what a model computes.

Channels that a module writes and linear layers read are divided where they are written and multiplied where
they are read.  Scales are powers of two: no product changes but in its exponent, the model stays the same to
the last bit, and dividing again gives back its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torch_armllm.quant.layers import is_linear, weight_of


@dataclass(frozen=True)
class ChannelScaling:
    """Channels that one module writes and others read.

    Attributes:
        writer: a norm, or a linear layer.
        readers: linear layers.
        repeat: how often a head that the writer writes stands one behind the other in what is read.
        head: channels of a head; 0 where they are read as they are written.
    """

    writer: nn.Module
    readers: tuple[nn.Module, ...]
    repeat: int = 1
    head: int = 0

    @property
    def written(self) -> int:
        """Channels that the writer writes."""
        return _written(self.writer)

    def spread(self, values: Tensor) -> Tensor:
        """Values a written channel for the channels that are read."""
        if self.repeat == 1:
            return values
        return values.view(-1, 1, self.head).expand(-1, self.repeat, -1).flatten()

    def gathered(self, values: Tensor) -> Tensor:
        """The mean over the channels that are read, for each that is written."""
        return values if self.repeat == 1 else values.view(-1, self.repeat, self.head).mean(1).flatten()

    @torch.no_grad()
    def scale(self, powers: Tensor) -> None:
        """Divides what is written by powers of two (written,), and multiplies what is read by them."""
        for parameter in self.writer.parameters(recurse=False):
            columns = isinstance(self.writer, Conv1D) and parameter.dim() == 2
            parameter.div_(powers if columns or parameter.dim() == 1 else powers[:, None])
        for reader in self.readers:
            inputs = self.spread(powers)
            weight_of(reader).mul_(inputs[:, None] if isinstance(reader, Conv1D) else inputs)


def find_scalings(
    stage: nn.Module, linears: Sequence[nn.Module], call: Any
) -> tuple[list[ChannelScaling], list[str]]:
    """Finds what can be scaled in a decoder layer, and proves each by running the layer.

    Norms go with all the linear layers that read them, and linear layers with one that reads, after whatever
    happens channel by channel, what they write: ups with downs, values with outputs.

    Args:
        stage: the decoder layer.
        linears: its linear layers, as they are to be quantized.
        call: runs it, and returns what it gives.

    Returns:
        The scalings, and the names of writers whose channels cannot be scaled.
    """
    wanted = call()
    scalings, refused = [], []
    for scaling, name in _candidates(stage, linears, call):
        powers = torch.exp2(torch.arange(scaling.written) % 3 - 1.0).to(weight_of(scaling.readers[0]).dtype)
        scaling.scale(powers)
        try:
            same = torch.equal(call(), wanted)
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
    found = []
    names = {id(module): name for name, module in stage.named_modules()}
    readers = _readers(stage, linears, call)
    for writer, read in readers:
        found.append((ChannelScaling(writer, tuple(read)), names[id(writer)]))
    for parent in stage.modules():
        inside = [m for m in parent.children() if any(m is x for x in linears)]
        for reader in inside:
            for writer in inside:
                scaling = _pair(parent, writer, reader)
                if scaling is not None and writer is not reader:
                    found.append((scaling, f"{names[id(writer)]} for {names[id(reader)]}"))
    return found


def _pair(parent: nn.Module, writer: nn.Module, reader: nn.Module) -> ChannelScaling | None:
    """A pair of linear layers of one module whose channels might be the same."""
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
    """Norms with the linear layers whose input is what they gave."""
    gave: list[tuple[nn.Module, Tensor]] = []
    found: dict[int, tuple[nn.Module, list[nn.Module]]] = {}

    def wrote(module: nn.Module, arguments: Any, output: Any) -> None:
        gave.append((module, output))

    def reads(module: nn.Module, arguments: Any) -> None:
        for norm, output in gave:
            if output is arguments[0]:
                found.setdefault(id(norm), (norm, []))[1].append(module)

    norms = [m for m in stage.modules() if _is_norm(m)]
    handles = [m.register_forward_hook(wrote) for m in norms]
    handles += [m.register_forward_pre_hook(reads) for m in linears]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())


def _is_norm(module: nn.Module) -> bool:
    own = [p for p in module.parameters(recurse=False)]
    return bool(own) and all(p.dim() == 1 for p in own) and not list(module.children())


def _written(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1] if isinstance(module, Conv1D) else weight.shape[0]


def _read(module: nn.Module) -> int:
    assert is_linear(module)
    return weight_of(module).shape[0 if isinstance(module, Conv1D) else 1]
