"""Markers of a decoder that attends to an encoder's tokens: their hidden states, and attention to them.

An encoder's tokens are the same in all steps, so a step reads their keys and values and does not compute
them.  Outside of a step the encoder's hidden states are a fixed sample of a few tokens, which lets every
check of a graph or a plan run as on other models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from torch_armllm.capture.markers.declare import like_attention, marker

_TOKENS = 11


@marker(
    "encoder_states(Tensor input_ids, int columns, ScalarType dtype) -> Tensor",
    lambda a: a.input_ids.new_empty((1, _TOKENS, a.columns), dtype=a.dtype),
)
def _sample_states(input_ids: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns the sample ``(1, 11, columns)``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, _TOKENS, columns, generator=generator, dtype=torch.float32).to(dtype)


@marker(
    "encoder_attention(Tensor q, Tensor k, Tensor v, int layer, float scale, Tensor? bias=None) -> Tensor",
    like_attention,
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Computes attention of each token to all of the encoder's, in float32.

    Args:
        q: queries, ``(1, q_heads, T, head_size)``.
        k: keys of the encoder's tokens, ``(1, kv_heads, S, head_size)``.
        v: values, ``(1, kv_heads, S, value_size)``.
        layer: index of the cache layer; unused here.
        scale: factor of the scores.
        bias: added to the scores; `resolve_biases` removes those of zeros and refuses others.

    Returns:
        ``(1, T, q_heads, value_size)`` in the dtype of ``q``.
    """
    groups = q.shape[1] // k.shape[1]
    scores = (q.float() * scale) @ k.float().repeat_interleave(groups, 1).transpose(2, 3)
    if bias is not None:
        scores = scores + bias.float()
    out = scores.softmax(-1) @ v.float().repeat_interleave(groups, 1)
    return out.transpose(1, 2).contiguous().to(q.dtype)


def encoder_attentions(graph: fx.Graph) -> list[fx.Node]:
    """Returns the attentions of a graph to an encoder's tokens."""
    target = torch.ops.armllm.encoder_attention.default
    return list(graph.find_nodes(op="call_function", target=target))


class _KeysAndValues(fx.Interpreter):
    """Runs a graph and keeps the keys and values of attentions to an encoder's tokens, by layer."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[int, tuple[Tensor, Tensor]] = {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.armllm.encoder_attention.default:
            self.found[args[3]] = args[1][0], args[2][0]
        return super().call_function(target, args, kwargs)


def sample_keys(module: fx.GraphModule, *inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns keys and values ``(heads, S, size)`` of the sample of an encoder's tokens, layer by layer.

    Args:
        module: a captured graph, before any pass.
        inputs: the graph's inputs.
    """
    if not encoder_attentions(module.graph):
        return []
    run = _KeysAndValues(module)
    run.run(*inputs)
    return [run.found[layer] for layer in sorted(run.found)]
