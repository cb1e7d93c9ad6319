"""Logits of hidden states, computed as the model itself computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_armllm.hf.output_layer import output_layer_of
from torch_armllm.ops.linear import dense_linear
from torch_armllm.plan.plan_model import HeadWeights, LogitScaling

if TYPE_CHECKING:
    from torch_armllm.patching.forwards.calls import TokenCalls
    from torch_armllm.patching.forwards.forward import PatchedForward

_SCALES = (0.1, 1.0, 8.0, 64.0)
"""Standard deviations of the rows that test for scales and soft caps after the output layer."""
_DENSE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that `dense_linear` supports; rounding of torch's own product depends on the number of rows."""
_swapping = RLock()
"""Held while a layer has another ``forward``, so that no thread takes that one for its own."""


class LMHead:
    """Computes the logits of rows of hidden states.

    A model's ``forward`` may do more after the base model than the output layer: scales, soft caps, further
    layers.  So ``forward`` itself runs on the rows.  If rows of very different magnitudes show no difference
    from the output layer, or from its results multiplied or divided by one of the model's settings, that
    layer is called alone.  A conversion of the logits to float32 makes no difference: samplers compute in
    float32.

    Args:
        model: a patched causal language model.
        forward: the patched forward of its base model.
    """

    def __init__(self, model: Any, forward: PatchedForward[TokenCalls]) -> None:
        self._model = model
        self._forward = forward
        self.layer: nn.Module = output_layer_of(model)
        self._by_layer = _exact(self.layer)
        self._scalings: list[LogitScaling | None] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns logits ``(R, vocab_size)`` of rows ``(R, hidden)``."""
        if not self.is_alone(hidden):
            return self._by_model(hidden)
        logits, scaling = self._by_layer(hidden), self._scaling
        return logits if scaling is None else scaling(logits)

    def is_alone(self, like: Tensor) -> bool:
        """True if the model's ``forward`` applies only `layer`, and perhaps a scaling, after its base model.

        Args:
            like: hidden states of the model; their values do not matter.
        """
        if self._scalings is None:
            self._scalings = self._find_scalings(like)
        return bool(self._scalings)

    def weights(self, like: Tensor) -> HeadWeights | None:
        """Returns the weights of a head that is one matrix product, perhaps scaled; None for others."""
        weights = weights_of(self.layer) if self.is_alone(like) else None
        return None if weights is None else replace(weights, scaling=self._scaling)

    @property
    def _scaling(self) -> LogitScaling | None:
        return self._scalings[0] if self._scalings else None

    def _by_model(self, hidden: Tensor) -> Tensor:
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64)
        with self._forward.returning(hidden[None]), _with_forward(self.layer, self._by_layer):
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits[0]

    def _find_scalings(self, like: Tensor) -> list[LogitScaling | None]:
        """Returns what the model's ``forward`` may do to logits of `layer`; nothing if it does more."""
        if getattr(self.layer, "in_features", like.shape[-1]) != like.shape[-1]:
            return []
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(len(_SCALES), like.shape[-1], generator=generator, dtype=torch.float32)
        rows = (rows * torch.tensor(_SCALES, dtype=torch.float32)[:, None]).to(like.dtype)
        by_model, by_layer = self._by_model(rows), self._by_layer(rows)
        if by_model.dtype not in (by_layer.dtype, torch.float32):
            return []
        settings = self._model.config.get_text_config().to_dict().values()
        numbers = dict.fromkeys(float(x) for x in settings if isinstance(x, int | float) and x not in (0, 1))
        scalings = (LogitScaling(op, number) for number in numbers for op in ("divide", "multiply"))
        candidates: list[LogitScaling | None] = [None, *scalings]
        expected = by_model.float()
        return [
            s for s in candidates if torch.equal(expected, (by_layer if s is None else s(by_layer)).float())
        ]


def weights_of(layer: nn.Module) -> HeadWeights | None:
    """Returns the weights of a layer that is one matrix product; None for any other layer."""
    from torch_armllm.lora.slots import LoraSlots
    from torch_armllm.quant.modules.linear import QuantLinear

    lora = None
    if type(layer) is QuantLinear and layer.order is None:
        weight, scheme = layer.weight_packed, layer.scheme
        digits, rotated = layer.digits, layer.rotated
        lora = layer.lora if isinstance(layer.lora, LoraSlots) else None
    elif type(layer) is nn.Linear and layer.weight.dtype in _DENSE:
        weight, scheme, digits, rotated = layer.weight, None, 1, False
    else:
        return None
    bias = None if layer.bias is None else layer.bias.detach()
    return HeadWeights(
        weight.detach(), bias, scheme, layer.out_features, digits=digits, rotated=rotated, lora=lora
    )


def _exact(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns a layer's forward whose result for a row has the same bits in every batch."""
    if type(layer) is nn.Linear and layer.weight.dtype in _DENSE:
        return lambda x: dense_linear(x, layer.weight, layer.bias)
    forward: Callable[[Tensor], Tensor] = layer.forward
    return forward


@contextmanager
def _with_forward(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    with _swapping:
        before = layer.__dict__.get("forward")
        layer.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            del layer.forward
            if before is not None:
                layer.forward = before  # type: ignore[method-assign]
