"""Check that a captured graph computes what its model does, and a sample of its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.sample import Sample

_TOLERANCE = 0.1
"""Largest error of a token's hidden state, relative to the largest value of all."""
_FIRST_LAYERS = 4


class _OtherRounding(fx.Interpreter):
    """Runs a graph on embeddings whose last bits differ, for which some routers choose other experts."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        if target is not torch.ops.aten.embedding.default or not result.is_floating_point():
            return result
        generator = torch.Generator().manual_seed(0)
        up = torch.rand(result.shape, generator=generator) < 0.5
        return result * torch.where(up, 1 + torch.finfo(result.dtype).eps, 1.0).to(result.dtype)


class _ClosestResults(fx.Interpreter):
    """Runs a graph and finds for each expected tensor how many tokens differ in the node closest to it."""

    def __init__(self, module: fx.GraphModule, expected: list[Tensor]) -> None:
        super().__init__(module)
        self.expected = expected
        self.differing = [expected[0].shape[-2]] * len(expected)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for number, tensor in enumerate(self.expected):
            if isinstance(result, Tensor) and result.shape == tensor.shape:
                self.differing[number] = min(self.differing[number], _differing_tokens(result, tensor))
        return result


def _differing_tokens(hidden: Tensor, expected: Tensor) -> int:
    errors = (hidden.float() - expected.float()).abs().amax(-1)
    return int((errors > _TOLERANCE * expected.float().abs().max()).sum())


@torch.no_grad()
def compare_outputs(
    base: nn.Module, module: fx.GraphModule, input_ids: Tensor, position_ids: Tensor
) -> Sample | None:
    """Compares a graph with its model: ALiBi masks or internal positions would be lost in the graph.

    Rounding may send tokens to other experts.  In a deep model whose routers are undecided, random ones above
    all, that changes most tokens.  Where the graph differs from the model by no more than from itself on
    other rounding, the hidden states after the first layers have to agree instead.

    Args:
        base: the model.
        module: its captured graph.
        input_ids: int64 ``(1, T)``.
        position_ids: likewise.

    Returns:
        The graph's results; None if they are not the model's.
    """
    expected, first_layers = _run_model(base, input_ids)
    hidden = module(input_ids, position_ids)
    sample = Sample(input_ids, position_ids, hidden[0].float())
    shaken = _OtherRounding(module).run(input_ids, position_ids)
    rounding = max(map(sample.error, (expected, shaken)))
    most = input_ids.shape[1] // 2
    if _differing_tokens(hidden, expected) > most:
        if sample.error(expected) > sample.error(shaken) or not first_layers:
            return None
        closest = _ClosestResults(module, first_layers)
        closest.run(input_ids, position_ids)
        if max(closest.differing) > most:
            return None
    return replace(sample, rounding=rounding)


def _run_model(base: nn.Module, input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns a model's last hidden state, and those after its first layers."""
    results: list[Tensor] = []

    def record(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor):
            results.append(hidden.clone())

    lists = [list(m) for m in base.modules() if isinstance(m, nn.ModuleList)]
    hooks = [layer.register_forward_hook(record) for layer in sum(lists[:1], [])[:_FIRST_LAYERS]]
    try:
        hidden: Tensor = base(input_ids=input_ids, use_cache=False, return_dict=True).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, [r for r in results if r.shape == hidden.shape]
