"""Check that a captured graph computes what its model does, and a sample of its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from torch_armllm.capture.markers.encoder_states import sample_keys
from torch_armllm.capture.markers.given_rows import sample_of
from torch_armllm.capture.sample import Sample
from torch_armllm.capture.step_inputs import step_arguments
from torch_armllm.hf.model_kind import ModelKind

_TOLERANCE = 0.1
"""Largest error of a token's hidden state, relative to the largest value of all."""
_LAYER_TOLERANCE = 0.03
"""The same of half of the tokens, after one layer."""


class OtherRounding(fx.Interpreter):
    """Runs a graph on embeddings whose last bits differ, for which some routers choose other experts.

    Args:
        module: the graph.
        seed: chooses the embeddings.
    """

    def __init__(self, module: fx.GraphModule, seed: int = 0) -> None:
        super().__init__(module)
        self._seed = seed

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a node; changes the result of an embedding."""
        result = super().call_function(target, args, kwargs)
        if target is not torch.ops.aten.embedding.default or not result.is_floating_point():
            return result
        return with_other_bits(result, self._seed)


def with_other_bits(x: Tensor, seed: int = 0) -> Tensor:
    """Returns floats of which half have another last bit, chosen by a seed."""
    up = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return x * torch.where(up, 1 + torch.finfo(x.dtype).eps, 1.0).to(x.dtype)


class _LayerByLayer(fx.Interpreter):
    """Runs a graph in which each layer computes from what the model computed before it.

    Other experts of a few tokens then change these tokens' results of one layer, not of all layers after it.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._nodes = list(self.graph.nodes)
        numbers = {node: number for number, node in enumerate(self._nodes)}
        self._last_use = {n: max((numbers[user] for user in n.users), default=numbers[n]) for n in numbers}

    def equals(self, expected: list[Tensor], *inputs: Tensor) -> bool:
        """True if the graph has, for each tensor, a node with these results for most tokens.

        Args:
            expected: results of the model's layers, one after another.
            inputs: the graph's inputs.
        """
        self.env = {}
        self.args_iter = iter(inputs)
        begin = 0
        for tensor in expected:
            found = self._closest(begin, tensor, len(self._nodes) // len(expected))
            if found is None:
                return False
            self.env[self._nodes[found]] = tensor.to(self.env[self._nodes[found]].dtype)
            begin = found + 1
            self.env = {n: value for n, value in self.env.items() if self._last_use[n] >= begin}
        return True

    def _closest(self, begin: int, expected: Tensor, beyond: int) -> int | None:
        """Runs nodes and returns the number of that with the closest results; None if they differ.

        Args:
            begin: number of the first node.
            expected: a layer's results.
            beyond: nodes to run after the first that is close: others may be closer, as the sum that
                residual layers return is close to what they add to it.
        """
        closest, smallest = None, _LAYER_TOLERANCE
        for number in range(begin, len(self._nodes)):
            if closest is not None and number > closest + beyond:
                break
            node = self._nodes[number]
            if node.op == "output":
                break
            if node.op != "placeholder" or node not in self.env:
                self.env[node] = self.run_node(node)
            result = self.env[node]
            if not isinstance(result, Tensor) or result.shape != expected.shape:
                continue
            error = float(_token_errors(result, expected).median())
            if error < smallest:
                closest, smallest = number, error
        return closest


def _token_errors(hidden: Tensor, expected: Tensor) -> Tensor:
    """Returns the largest error of each token, relative to the largest value of all."""
    return (hidden.float() - expected.float()).abs().amax(-1) / expected.float().abs().max()


def _differing_tokens(hidden: Tensor, expected: Tensor) -> int:
    return int((_token_errors(hidden, expected) > _TOLERANCE).sum())


class lowest_first(TorchFunctionMode):  # noqa: N801 - a context manager
    """Lets `topk` take the lowest of equal values, as markers and ops do; torch promises no order."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.Tensor.topk, torch.topk) or kwargs.get("largest") is False:
            return func(*args, **kwargs)
        x, count, dim = (*args, *(kwargs[name] for name in ("k", "dim") if name in kwargs), -1)[:3]
        values, indices = x.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, count), indices.narrow(dim, 0, count)))


@torch.no_grad()
def compare_outputs(
    kind: ModelKind, module: fx.GraphModule, input_ids: Tensor, position_ids: Tensor
) -> Sample | None:
    """Compares a graph with its model: ALiBi masks or internal positions would be lost in the graph.

    Rounding may send tokens to other experts.  In a deep model whose routers are undecided, random ones above
    all, that changes most tokens.  Where the graph differs from the model by no more than from itself on
    other rounding, every layer has to agree on what the model computed before it instead.

    Args:
        kind: of the model.
        module: its captured graph.
        input_ids: int64 ``(1, T)``.
        position_ids: likewise.

    Returns:
        The graph's results; None if they are not the model's.
    """
    expected, layers = run_model(kind, input_ids)
    hidden = module(input_ids, position_ids)
    sample = Sample(
        input_ids=input_ids,
        position_ids=position_ids,
        hidden=hidden[0].float(),
        given=sample_of(module, input_ids),
        encoder=sample_keys(module, input_ids, position_ids),
    )
    shaken = OtherRounding(module).run(input_ids, position_ids)
    rounding = max(map(sample.error, (expected, shaken)))
    most = input_ids.shape[1] // 2
    if _differing_tokens(hidden, expected) > most:
        if sample.error(expected) > sample.error(shaken) or not layers:
            return None
        if not _LayerByLayer(module).equals([*layers, expected], input_ids, position_ids):
            return None
    return replace(sample, rounding=rounding)


@torch.no_grad()
def sample_of_text(module: fx.GraphModule, sample: Sample, input_ids: Tensor) -> Sample:
    """Returns a sample of a checked graph's results for another text.

    Args:
        module: the graph that computes ``sample``, before any pass.
        sample: has as many tokens.
        input_ids: int64 ``(1, T)``.
    """
    positions = sample.position_ids
    other = replace(
        sample,
        input_ids=input_ids,
        hidden=module(input_ids, positions)[0].float(),
        given=sample_of(module, input_ids),
        encoder=sample_keys(module, input_ids, positions),
    )
    return replace(other, rounding=other.error(OtherRounding(module).run(input_ids, positions)))


def run_model(kind: ModelKind, input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns a model's last hidden state, and those after each layer."""
    base: nn.Module = kind.base
    results: list[Tensor] = []

    def record(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor):
            results.append(hidden.clone())

    lists = [list(m) for m in base.modules() if isinstance(m, nn.ModuleList)]
    hooks = [layer.register_forward_hook(record) for layer in sum(lists[:1], [])]
    try:
        with lowest_first():
            others = step_arguments(kind, input_ids)
            out = base(input_ids=input_ids, use_cache=False, return_dict=True, **others)
            hidden: Tensor = out.last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, [r for r in results if r.shape == hidden.shape]
