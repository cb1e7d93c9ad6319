"""Norms that multiply by 1 + weight: the factors that they compute, and exact weights for other factors.

Such a weight, divided, needs more bits than bfloat16 has: (1 + w)/2 − 1 is no multiple of w.  It becomes a
float32 buffer.  A buffer, as transformers takes the dtype of a model's first parameter for that of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_WIDE = "_armllm_float32"
"""Attribute of a module: its parameters became float32 buffers."""
_SEED = 0


def is_wide(module: nn.Module) -> bool:
    """True if `widen` replaced the module's parameters by float32 buffers."""
    return _WIDE in vars(module)


def widen(module: nn.Module) -> dict[str, nn.Parameter]:
    """Replaces a module's own parameters by float32 buffers of the same values, and returns them."""
    originals = {name: p for name, p in module._parameters.items() if p is not None}
    for name, parameter in originals.items():
        del module._parameters[name]
        module.register_buffer(name, parameter.detach().float())
    module.__dict__[_WIDE] = True
    return originals


def narrow(module: nn.Module, originals: dict[str, nn.Parameter]) -> None:
    """Reverts `widen`; if the model has another dtype by now, the parameters get it too."""
    for name, parameter in originals.items():
        dtype = module._buffers.pop(name).dtype  # type: ignore[union-attr]  # `widen` made it
        if dtype != torch.float32:
            parameter.data = parameter.data.to(dtype)
        module.register_parameter(name, parameter)
    del module.__dict__[_WIDE]


@torch.no_grad()
def offset_factor(norm: nn.Module) -> Tensor | None:
    """Returns what a norm multiplies by, float32 (N,), if it is 1 + its weight; None for other norms.

    The norm runs on random numbers, with its weight and with that of other factors, to find out.
    """
    weight = norm._parameters.get("weight")
    if weight is None or weight.dim() != 1 or weight.is_meta:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a weight in another dtype
            return next((x for x in _factors(weight.detach()) if _has_factor(norm, x, weight.dtype)), None)
    except Exception:  # noqa: BLE001 - a norm with other arguments, or that takes no float32 weight
        return None


def _has_factor(norm: nn.Module, factor: Tensor, dtype: torch.dtype) -> bool:
    """True if a norm multiplies inputs of a dtype by a factor (N,), and its new weights by other factors."""
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(4, len(factor), generator=generator).to(dtype)
    powers = torch.exp2(torch.arange(len(factor)) % 3 - 1.0)
    powers = torch.where(divides(factor, powers), powers, 1.0)
    expected = norm(x)
    originals = widen(norm)
    try:
        divide(norm, factor, powers)
        actual = norm(x)
    finally:
        narrow(norm, originals)
    same = actual.dtype == expected.dtype and torch.equal(actual * powers.to(dtype), expected)
    return same and bool((powers != 1).any())


def divides(factor: Tensor, powers: Tensor) -> Tensor:
    """True for each channel whose factor, divided by a power of two, is 1 + a float32 weight exactly."""
    divided = factor / powers
    return (1 + (divided - 1) == divided) & (divided * powers == factor)


def divide(norm: nn.Module, factor: Tensor, powers: Tensor) -> None:
    """Sets the float32 weight of a wide norm so that it multiplies by factor / powers, (N,) each."""
    for name, buffer in norm._buffers.items():
        if name == "weight":
            norm._buffers[name] = factor / powers - 1
        elif buffer is not None and buffer.shape == powers.shape:
            norm._buffers[name] = buffer / powers


def _factors(weight: Tensor) -> Iterator[Tensor]:
    """Yields 1 + weight as float32 arithmetic computes it, and as that of the weight's dtype does."""
    yield 1 + weight.float()
    if weight.dtype != torch.float32:
        yield (1 + weight).float()
