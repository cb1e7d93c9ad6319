"""Logits of hidden states, computed as the model itself computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_armllm.ops.linear import dense_linear
from torch_armllm.plan.plan_model import HeadWeights

if TYPE_CHECKING:
    from torch_armllm.patching.forward import PatchedForward

_SCALES = (0.1, 1.0, 8.0, 64.0)
"""Standard deviations of the rows that test for scales and soft caps after the output layer."""
_DENSE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that `dense_linear` supports; rounding of torch's own product depends on the number of rows."""


class LMHead:
    """Computes the logits of rows of hidden states.

    A model's ``forward`` may do more after the base model than the output layer: scales, soft caps, further
    layers.  So ``forward`` itself runs on the rows.  If rows of very different magnitudes show no difference
    from the output layer, that layer is called alone.

    Args:
        model: a patched causal language model.
        forward: the patched forward of its base model.
    """

    def __init__(self, model: Any, forward: PatchedForward) -> None:
        self._model = model
        self._forward = forward
        self.layer: nn.Module = model.get_output_embeddings()
        self._by_layer = _exact(self.layer)
        self._layer_only: bool | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns logits ``(R, vocab_size)`` of rows ``(R, hidden)``."""
        return self._by_layer(hidden) if self.is_alone(hidden) else self._by_model(hidden)

    def is_alone(self, like: Tensor) -> bool:
        """True if the model's ``forward`` applies only `layer` after its base model.

        Args:
            like: hidden states of the model; their values do not matter.
        """
        if self._layer_only is None:
            self._layer_only = self._is_alone(like)
        return self._layer_only

    def weights(self, like: Tensor) -> HeadWeights | None:
        """Returns the weights of a head that is one matrix product; None for any other head."""
        return weights_of(self.layer) if self.is_alone(like) else None

    def _by_model(self, hidden: Tensor) -> Tensor:
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64)
        with self._forward.returning(hidden[None]), _with_forward(self.layer, self._by_layer):
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits[0]

    def _is_alone(self, like: Tensor) -> bool:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(len(_SCALES), like.shape[-1], generator=generator, dtype=torch.float32)
        rows = (rows * torch.tensor(_SCALES, dtype=torch.float32)[:, None]).to(like.dtype)
        by_model, by_layer = self._by_model(rows), self._by_layer(rows)
        return by_model.dtype == by_layer.dtype and torch.equal(by_model, by_layer)


def weights_of(layer: nn.Module) -> HeadWeights | None:
    """Returns the weights of a layer that is one matrix product; None for any other layer."""
    from torch_armllm.quant.modules.linear import QuantLinear

    if type(layer) is QuantLinear and layer.order is None:
        weight, scheme = layer.weight_packed, layer.scheme
    elif type(layer) is nn.Linear and layer.weight.dtype in _DENSE:
        weight, scheme = layer.weight, None
    else:
        return None
    bias = None if layer.bias is None else layer.bias.detach()
    return HeadWeights(weight.detach(), bias, scheme, layer.out_features)


def _exact(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns a layer's forward whose result for a row has the same bits in every batch."""
    if type(layer) is nn.Linear and layer.weight.dtype in _DENSE:
        return lambda x: dense_linear(x, layer.weight, layer.bias)
    forward: Callable[[Tensor], Tensor] = layer.forward
    return forward


@contextmanager
def _with_forward(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    before = layer.__dict__.get("forward")
    layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before  # type: ignore[method-assign]
