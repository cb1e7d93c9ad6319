"""Checks of the values of a loaded model: norms, biases, packed weights, and permutations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.packing import panel_fault
from torch_armllm.quant.parallel import each

_SMALL = 1 << 20
"""Values of the largest tensor that is checked: norms, biases and routers, not embeddings and matrices."""

_NO_BOUND = {"_min": -torch.inf, "_max": torch.inf}
"""Values of clip bounds, such as ``input_max``, that clip nothing, by the ends of their names."""

FileOf = Callable[[str], str]
"""Returns the file of a tensor, for messages."""


def check_small_tensors(model: nn.Module, file_of: FileOf) -> None:
    """Raises ValueError if a norm, a bias or another small float holds a NaN or an infinity.

    A clip bound may be infinite.
    """
    stored = set(model.state_dict())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        small = tensor.is_floating_point() and tensor.numel() <= _SMALL
        if small and name in stored and not tensor.is_meta and not bool(tensor.isfinite().all()):
            values = tensor.detach()
            wrong = ~values.isfinite() & (values != _NO_BOUND.get(f"_{name.rpartition('_')[2]}", torch.nan))
            if not bool(wrong.any()):
                continue
            index = tuple(int(axis) for axis in wrong.nonzero()[0])
            raise ValueError(
                f"{name} in {file_of(name)} holds {float(values[index])} at {index}, and finite "
                "values are expected: the checkpoint is damaged; get it anew"
            )


def check_packed(model: nn.Module, file_of: FileOf) -> None:
    """Raises ValueError if packed weights have a scale or a multiplier out of range, or an order is none."""
    panels: list[tuple[str, Tensor, int, str]] = []
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            own = module.weight_packed, module.in_features, module.scheme
            panels.append((f"{name}.weight_packed", *own))
            if module.order is not None:
                _check_order(f"{name}.order", module.order, module.in_features, file_of)
        elif isinstance(module, QuantExperts):
            sizes = {"gate_up_packed": module.hidden_dim, "down_packed": module.intermediate_dim}
            for part, columns in sizes.items():
                flat = getattr(module, part).flatten(0, -2)
                panels.append((f"{name}.{part}", flat, columns, module.scheme))
    # each matrix on one thread: the ops are small
    faults = each(lambda one: panel_fault(*one[1:]), panels)
    for (name, *_), fault in zip(panels, faults, strict=True):
        if fault is not None:
            raise ValueError(
                f"{name} in {file_of(name)} has {fault} are expected: the checkpoint is damaged; get it anew"
            )


def _check_order(name: str, order: Tensor, columns: int, file_of: FileOf) -> None:
    found = order.long()
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= columns:
        wrong = low if low < 0 else high
        raise ValueError(
            f"{name} in {file_of(name)} holds {wrong}, and a permutation of 0 … {columns - 1} is expected: "
            "the checkpoint is damaged; get it anew"
        )
    counts = torch.bincount(found, minlength=columns)
    if bool((counts != 1).any()):
        raise ValueError(
            f"{name} in {file_of(name)} holds {int(counts.argmax())} {int(counts.max())} times, and a "
            f"permutation of 0 … {columns - 1} is expected: the checkpoint is damaged; get it anew"
        )
