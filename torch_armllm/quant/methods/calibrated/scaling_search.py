"""The channel scalings of a decoder layer, found by running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.hf.expert_layout import ExpertLayout
from torch_armllm.ops.activation import FUNCTIONS
from torch_armllm.quant.layers import is_linear
from torch_armllm.quant.methods.calibrated.channel_scaling import MAX_EXPONENT, ChannelScaling
from torch_armllm.quant.methods.calibrated.channels import Channels
from torch_armllm.quant.offset_norm import offset_factor


def find_scalings(
    stage: nn.Module, readers: Sequence[Channels], call: Callable[[], Tensor]
) -> tuple[list[ChannelScaling], list[str]]:
    """Finds the scalings of a decoder layer, and checks each by running the layer.

    Candidates are each norm with all modules that read it; pairs of linear layers with only channel-wise ops
    between them, such as up with down projection, and value with output projection; and the up and down
    projections of experts.

    Args:
        stage: the decoder layer.
        readers: its linear layers, routers and experts.
        call: runs the layer on a few tokens and returns its output.

    Returns:
        The scalings, and the names of writers whose channels cannot be scaled and are read by modules that
        no scaling is for.
    """
    by_norm, expected = _readers_of_norms(stage, readers, call)
    # large powers, so that a clamp between writer and reader shows; float16 activations would lose bits
    exponent = 1 if expected.dtype == torch.float16 else MAX_EXPONENT
    scalings, refused = [], {}
    for scaling, name in _candidates(stage, readers, by_norm):
        powers = scaling.limited(torch.exp2(exponent * (torch.arange(scaling.written) % 3 - 1.0)))
        if bool((powers != 1).any()) and _is_same(scaling, powers, call, expected):
            scalings.append(scaling)
        else:
            refused[name] = scaling
    covered = {id(reader.module) for scaling in scalings for reader in scaling.readers}
    left = [n for n, x in refused.items() if not covered.issuperset(id(r.module) for r in x.readers)]
    return scalings, left


def _is_same(scaling: ChannelScaling, powers: Tensor, call: Callable[[], Tensor], expected: Tensor) -> bool:
    """True if a layer's output has the same bits with a scaling as without."""
    applied = scaling.apply(powers)
    try:
        return torch.equal(call(), expected)
    finally:
        applied.undo()


def _candidates(
    stage: nn.Module, readers: Sequence[Channels], by_norm: Sequence[tuple[nn.Module, list[Channels]]]
) -> list[tuple[ChannelScaling, str]]:
    candidates = []
    names = {id(module): name for name, module in stage.named_modules()}
    for norm, read in by_norm:
        scaling = ChannelScaling(Channels(norm), tuple(read), factor=offset_factor(norm))
        if all(reader.count_read == scaling.written for reader in read):
            candidates.append((scaling, names[id(norm)]))
    of_norms = {id(reader.module) for _, read in by_norm for reader in read}
    linears = {id(reader.module): reader for reader in readers if is_linear(reader.module)}
    for parent in stage.modules():
        inside = [linears[id(m)] for m in parent.children() if id(m) in linears]
        for reader in inside:
            if id(reader.module) in of_norms:
                continue  # what it reads is written by no linear layer
            for writer in inside:
                pair = _pair(parent, writer, reader)
                if pair is not None and writer is not reader:
                    name = f"{names[id(writer.module)]} for {names[id(reader.module)]}"
                    candidates.append((pair, name))
    for experts in readers:
        if experts.layout is not None and _is_linear_in_up(experts.layout):
            own = Channels(experts.module, experts.layout, inside=True)
            candidates.append((ChannelScaling(own, (own,)), f"{names[id(own.module)]} inside"))
    return candidates


def _pair(parent: nn.Module, writer: Channels, reader: Channels) -> ChannelScaling | None:
    """Returns the scaling of two linear layers of one module if their channel counts match, else None."""
    written, read = writer.count_written, reader.count_read
    if written == read:
        return ChannelScaling(writer, (reader,))
    head = getattr(parent, "head_dim", None)
    if isinstance(head, int) and read % written == 0 and written % head == 0:
        return ChannelScaling(writer, (reader,), read // written, head)
    return None


def _is_linear_in_up(layout: ExpertLayout) -> bool:
    """True if the experts' activation is linear in the up projection, however large: clamped ones are not."""
    gate, up = torch.tensor([-3.0, 0.5, 4.0]), torch.tensor([[-(2.0**20)], [1.0], [2.0**20]])
    function = FUNCTIONS[layout.activation]
    limits = (layout.limit, layout.up_limit)
    return layout.gated and torch.equal(2 * function(gate, up / 2, *limits), function(gate, up, *limits))


def _readers_of_norms(
    stage: nn.Module, readers: Sequence[Channels], call: Callable[[], Tensor]
) -> tuple[list[tuple[nn.Module, list[Channels]]], Tensor]:
    """Returns each norm with the modules that read its output, or a view of it; and the layer's output."""
    outputs: list[tuple[nn.Module, Tensor]] = []
    found: dict[int, tuple[nn.Module, list[Channels]]] = {}
    by_module = {id(reader.module): reader for reader in readers}

    def record_output(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((module, output))

    def match_input(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        given = next((x for x in (*arguments, *named.values()) if isinstance(x, Tensor)), None)
        for norm, output in outputs:
            if given is not None and _is_view(given, output):
                found.setdefault(id(norm), (norm, []))[1].append(by_module[id(module)])

    norms = [m for m in stage.modules() if _is_norm(m)]
    handles = [m.register_forward_hook(record_output) for m in norms]
    handles += [reader.module.register_forward_pre_hook(match_input, with_kwargs=True) for reader in readers]
    try:
        result = call()
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values()), result


def _is_view(one: Tensor, other: Tensor) -> bool:
    """True if two tensors hold the same rows in the same memory; both must be alive."""
    alike = one.dtype == other.dtype and one.numel() == other.numel() and one.shape[-1:] == other.shape[-1:]
    return alike and one.data_ptr() == other.data_ptr() and one.is_contiguous() == other.is_contiguous()


def _is_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    return bool(parameters) and all(p.dim() == 1 for p in parameters) and not list(module.children())
