"""Tuning of row scales: a quantized model learns to predict what its float model predicts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_armllm.hf.output_layer import output_layer_of
from torch_armllm.ops.linear import GROUP, PANEL, quantize_activations, rotate_groups, traits_of
from torch_armllm.quant.methods.calibrated.matmul_dtype import fast_matmul_dtype
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.schemes.base import op_name
from torch_armllm.system.progress import progress_bar

logger = logging.getLogger(__name__)

_RATE = 1e-3
"""Largest relative change of a scale in one step."""
_BATCH = 4
"""Texts whose gradients are added up before a step."""
_WARM_UP = 0.05
"""Part of the steps in which the rate rises to `_RATE`; after it, the rate falls to 0 as a cosine does."""
_HELD_OUT = 8
"""An eighth of the texts, at most as many, are kept to measure on."""


class Tuned(NamedTuple):
    """Divergence KL(float ‖ quantized) in nats a token, on texts that were not tuned on."""

    before: float
    after: float


@torch.no_grad()
def tune_scales(model: nn.Module, teacher: nn.Module, tokens: Tensor, *, progress: bool = True) -> Tuned:
    """Tunes the row scales of a quantized model, in place, by distillation from its float model.

    Rounding chooses the integers layer by layer; the scales of their rows are then tuned together, by the
    gradient of KL(float ‖ quantized) of the predictions (end-to-end training of scales, EfficientQAT, arXiv
    2407.11062).  Integers, multipliers and zero points stay as they are, so nothing changes at run time.  If
    the divergence of the held-out texts does not fall, the scales stay too.

    Tuned are the linear layers whose scheme has one scale a row, as ``int4``, ``int6`` and ``int8`` have; not
    the head, since an embedding may share its integers.

    The memory is that of both models and of the quantized layers in bfloat16; the time is about four times
    that of reading the texts in floats.

    Args:
        model: a quantized model, not patched: see `torch_armllm.quantize` and ``load(fuse=False)``.
        teacher: the float model that it was made of.
        tokens: ids (texts, length), such as 128 texts of 512 that the float model writes.
        progress: show a progress bar.

    Raises:
        ValueError: there are fewer than two texts; the model is patched, holds experts, or has no layer whose
            scales can be tuned; or a loss is not finite.
    """
    if len(tokens) < 2:
        raise ValueError(f"tuning takes two texts or more, not {len(tokens)}: give it about 128")
    layers = _layers_of(model)
    held_out = tokens[-min(_HELD_OUT, -(-len(tokens) // 8)) :]
    training = tokens[: len(tokens) - len(held_out)]
    with _differentiable(model, layers), torch.autocast("cpu", torch.bfloat16, _mixed(teacher)):
        before = _divergence(model, teacher, held_out)
        _train(model, teacher, layers, training, progress)
        after = _divergence(model, teacher, held_out)
    if not after < before:
        logger.warning(
            "tuning did not lower the divergence (%.4f, and %.4f before): scales stay", after, before
        )
        return Tuned(before, before)
    for layer in layers:
        layer.store()
    logger.info(
        "row scales of %d layers tuned: KL %.4f, %.4f before (%d held-out texts)",
        sum(layer.gain is not None for layer in layers),
        after,
        before,
        len(held_out),
    )
    return Tuned(before, after)


class _DifferentiableLinear:
    """Stands in for the forward of a packed linear layer: the same products, with gradients.

    Attributes:
        gain: float32 (N,), factors of the row scales; None if the layer has no scale a row, or is the head.
    """

    def __init__(self, module: QuantLinear, tuned: bool) -> None:
        self._module = module
        self._dtype = fast_matmul_dtype() if module.float_dtype == torch.float32 else module.float_dtype
        weight = module.dequantize()
        self._weight = (rotate_groups(weight) if module.rotated else weight).to(self._dtype)
        tuned = tuned and not traits_of(op_name(module.scheme)).span
        self.gain = torch.ones(module.out_features, requires_grad=True) if tuned else None

    def __call__(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if self._module.rotated:
            x = rotate_groups(x) / GROUP
        rounded = x if self._module.digits > 1 else _rounded(x)
        with torch.autocast("cpu", enabled=False):
            y = nn.functional.linear(rounded.to(self._dtype), self._weight).float()
        if self.gain is not None:
            y = y * self.gain
        if self._module.bias is not None:
            y = y + self._module.bias
        return y.to(dtype)

    def store(self) -> None:
        """Multiplies the packed row scales by the gains."""
        if self.gain is None:
            return
        packed = self._module.weight_packed
        gains = torch.ones(packed.shape[0] * PANEL)
        gains[: len(self.gain)] = self.gain.detach()
        scaled = packed.clone()  # the loaded panels may be a file's own bytes
        scaled[:, : PANEL * 4].view(torch.float32).mul_(gains.view(-1, PANEL))
        self._module.weight_packed = scaled


def _layers_of(model: Any) -> list[_DifferentiableLinear]:
    """Returns a stand-in for each packed linear layer.

    Raises:
        ValueError: the model holds experts, or no layer has a scale a row.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, QuantExperts)]
    if names:
        raise ValueError(
            f"{names[0]} holds packed experts, through which no gradient is known: the scales of a "
            "Mixture-of-Experts cannot be tuned"
        )
    head = output_layer_of(model)
    modules = [module for module in model.modules() if isinstance(module, QuantLinear)]
    if any(module.blocks > 1 for module in modules):
        raise ValueError("the model multiplies blocks of a weight, through which no gradient is known")
    layers = [_DifferentiableLinear(module, module is not head) for module in modules]
    if all(layer.gain is None for layer in layers):
        raise ValueError("no layer of the model has a scheme with one scale a row, such as int4 or int8")
    return layers


@contextmanager
def _differentiable(model: nn.Module, layers: list[_DifferentiableLinear]) -> Iterator[None]:
    """Lets packed layers compute with gradients, and no other parameter have one."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    for layer in layers:
        layer._module.forward = layer  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer._module.__dict__["forward"]
        for parameter in wanted:
            parameter.requires_grad_(True)


def _train(
    model: nn.Module, teacher: nn.Module, layers: list[_DifferentiableLinear], texts: Tensor, progress: bool
) -> None:
    """Takes one step for each batch of texts, each text once."""
    gains = [layer.gain for layer in layers if layer.gain is not None]
    steps = -(-len(texts) // _BATCH)
    optimizer = torch.optim.Adam(gains, lr=_RATE, betas=(0.9, 0.99), eps=1e-12)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate_over(steps))
    bar = progress_bar(texts.split(_BATCH), show=progress, desc="Tuning scales", unit="step")
    for batch in bar:
        for text in batch:
            expected = _log_probabilities(teacher, text)
            with torch.enable_grad():
                logits = model(text[None], use_cache=False).logits[0]
            if not logits.requires_grad:
                raise ValueError("the model is patched: tune its scales before torch_armllm.patch")
            found = logits.detach().float().log_softmax(-1)
            loss = _kl(expected, found)
            if not math.isfinite(loss):
                raise ValueError(f"the divergence is {loss} on a text: the model computes no finite numbers")
            # the gradient of KL(p ‖ q) by the logits of q is q − p
            gradient = found.exp_().sub_(expected.exp_()).div_(batch.numel())
            logits.backward(gradient.to(logits.dtype))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _rate_over(steps: int) -> Callable[[int], float]:
    """Returns the part of the rate by step: a short rise, then half a cosine."""
    rise = max(1.0, _WARM_UP * steps)
    return lambda step: min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _divergence(model: nn.Module, teacher: nn.Module, texts: Tensor) -> float:
    """Returns the mean KL(teacher ‖ model) a token."""
    nats = (
        _kl(_log_probabilities(teacher, text), _log_probabilities(model, text)) * len(text) for text in texts
    )
    return sum(nats) / texts.numel()


def _log_probabilities(model: Any, text: Tensor) -> Tensor:
    """Returns the predictions (length, vocabulary) for a text."""
    logits: Tensor = model(text[None], use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def _kl(expected: Tensor, found: Tensor) -> float:
    """Returns the mean KL a token of log-probabilities (length, vocabulary)."""
    return float((expected.exp() * (expected - found)).sum()) / len(expected)


def _rounded(x: Tensor) -> Tensor:
    """Rounds inputs to INT8, one scale a token; the gradient passes as if they were not rounded."""
    q, scales = quantize_activations(x.detach())
    return x + (q * scales - x.detach()).to(x.dtype)


def _mixed(teacher: nn.Module) -> bool:
    """True if float32 products may be rounded to bfloat16, which is twice as fast."""
    dtypes = {parameter.dtype for parameter in teacher.parameters()}
    return dtypes == {torch.float32} and fast_matmul_dtype() == torch.bfloat16
