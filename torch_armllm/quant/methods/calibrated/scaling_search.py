"""The channel scalings of a decoder layer, found by running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torch_armllm.quant.layers import is_linear, weight_of
from torch_armllm.quant.methods.calibrated.channel_scaling import ChannelScaling
from torch_armllm.quant.offset_norm import offset_factor


def find_scalings(
    stage: nn.Module, linears: Sequence[nn.Module], call: Any, expected: Tensor
) -> tuple[list[ChannelScaling], list[str]]:
    """Finds the scalings of a decoder layer, and checks each by running the layer.

    Candidates are each norm with all linear layers that read it, and pairs of linear layers with only
    channel-wise ops between them, such as up with down projection, and value with output projection.

    Args:
        stage: the decoder layer.
        linears: its linear layers.
        call: runs the layer and returns its output.
        expected: that output.

    Returns:
        The scalings, and the names of writers whose channels cannot be scaled.
    """
    scalings, refused = [], []
    for scaling, name in _candidates(stage, linears, call):
        powers = scaling.limited(torch.exp2(torch.arange(scaling.written) % 3 - 1.0))
        if bool((powers != 1).any()) and _is_same(scaling, powers, call, expected):
            scalings.append(scaling)
        else:
            refused.append(name)
    return scalings, refused


def _is_same(scaling: ChannelScaling, powers: Tensor, call: Any, expected: Tensor) -> bool:
    """True if a layer's output has the same bits with a scaling as without."""
    applied = scaling.apply(powers)
    try:
        return torch.equal(call(), expected)
    finally:
        applied.undo()


def _candidates(
    stage: nn.Module, linears: Sequence[nn.Module], call: Any
) -> list[tuple[ChannelScaling, str]]:
    candidates = []
    names = {id(module): name for name, module in stage.named_modules()}
    readers = _readers(stage, linears, call)
    for writer, read in readers:
        scaling = ChannelScaling(writer, tuple(read), factor=offset_factor(writer))
        candidates.append((scaling, names[id(writer)]))
    of_norms = {id(reader) for _, read in readers for reader in read}
    for parent in stage.modules():
        inside = [m for m in parent.children() if any(m is x for x in linears)]
        for reader in inside:
            if id(reader) in of_norms:
                continue  # what it reads is written by no linear layer
            for writer in inside:
                pair = _pair(parent, writer, reader)
                if pair is not None and writer is not reader:
                    candidates.append((pair, f"{names[id(writer)]} for {names[id(reader)]}"))
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


def _is_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    return bool(parameters) and all(p.dim() == 1 for p in parameters) and not list(module.children())


def _written(module: nn.Module) -> int:
    weight = weight_of(module)
    return weight.shape[1] if isinstance(module, Conv1D) else weight.shape[0]


def _read(module: nn.Module) -> int:
    assert is_linear(module)
    return weight_of(module).shape[0 if isinstance(module, Conv1D) else 1]
