"""Reuse of exported layers: one layer of each kind is exported, the others are copies of its nodes.

Most of a capture's time is export, and a model of 48 layers has two or three kinds of layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.markers.declare import marker
from torch_armllm.ops.op_call import OpCall

_MODULE_STATE = frozenset(vars(nn.Module())) | {"layer_idx"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


def _copy(hidden: Tensor, *numbers: int) -> Tensor:
    return hidden.clone()


def _like_hidden(a: Any) -> Tensor:
    return torch.empty_like(a.hidden)


for _schema in ("layer_begin(Tensor hidden, int number)", "layer_end(Tensor hidden, int number)"):
    marker(f"{_schema} -> Tensor", _like_hidden)(_copy)
marker("layer_repeat(Tensor hidden, int number, int like) -> Tensor", _like_hidden)(_copy)


class LayersDiffer(RuntimeError):
    """Layers that look the same compute different functions: each must be exported."""


class _LayerIndex:
    """Replaces ``layer_idx``, which may only identify the layer's cache; any computation with it raises."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number

    def _used(self, *_: Any) -> Any:
        raise LayersDiffer("a layer computes with its own number, layer_idx")

    def __eq__(self, other: object) -> bool:
        return bool(self._used())

    def __add__(self, other: Any) -> _LayerIndex:
        """Returns another layer of the cache: that of a layer which runs several times."""
        return _LayerIndex(self._number + other) if isinstance(other, int) else self._used()

    __radd__ = __add__
    __index__ = __hash__ = __bool__ = __float__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __sub__ = __mul__ = __mod__ = __floordiv__ = __truediv__ = __rsub__ = __rmul__ = _used


class _StateDescriber:
    """Describes module state by comparable values.

    Keeps the objects that it describes by identity alive, so that no id is reused.
    """

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def describe(self, value: Any, own_tensors: dict[int, str]) -> Any:
        """Returns equal values for equivalent objects; the layer's own tensors become their names."""
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if isinstance(value, list | tuple):
            return (type(value), *(self.describe(v, own_tensors) for v in value))
        if isinstance(value, Tensor) and id(value) in own_tensors:
            return own_tensors[id(value)]
        if isinstance(value, functools.partial):
            return (
                value.func,
                self.describe(value.args, own_tensors),
                self.describe(sorted(value.keywords.items()), own_tensors),
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
            # not by getattr: a configuration with per-layer values raises on access to them
            fields = (vars(value).get(f.name) for f in dataclasses.fields(value))
            return (type(value), *(self.describe(v, own_tensors) for v in fields))
        self._objects.append(value)
        return id(value)


@dataclasses.dataclass
class _Layer:
    """A decoder layer."""

    name: str
    module: nn.Module
    index: int | None

    def signature(self, describer: _StateDescriber) -> Any:
        """Returns a value that is equal for layers that compute the same function of their own weights."""
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        own_tensors = {id(tensor): name for name, tensor in tensors.items()}
        described: list[Any] = [(n, t.shape, t.dtype) for n, t in tensors.items()]
        for name, module in self.module.named_modules():
            left_out = _MODULE_STATE | getattr(module, "NOT_COMPUTED_WITH", frozenset())
            if module is self.module:
                left_out |= {"forward"}  # the replacement of `_replacement_forward`
            state = sorted((key, value) for key, value in vars(module).items() if key not in left_out)
            hooks = [tuple(getattr(module, hook).values()) for hook in _HOOKS]
            described.append((name, type(module), describer.describe(hooks, own_tensors), module.training))
            described.extend((key, describer.describe(value, own_tensors)) for key, value in state)
        return tuple(described)


def _layers(base: nn.Module) -> list[_Layer]:
    """Returns the elements of the outermost module lists."""
    layers: list[_Layer] = []
    lists: list[str] = []
    for name, module in base.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in lists):
            continue
        lists.append(name)
        for number, layer in enumerate(module):
            numbers = {vars(m)["layer_idx"] for m in layer.modules() if "layer_idx" in vars(m)}
            if len(numbers) <= 1 and "forward" not in vars(layer):
                layers.append(_Layer(f"{name}.{number}", layer, next(iter(numbers), None)))
    return layers


class LayerReuse:
    """Exports a model with one node for each repeated layer, and expands these nodes afterwards.

    Args:
        base: the base model.
    """

    def __init__(self, base: nn.Module) -> None:
        self._layers = _layers(base)
        self._weights = {name for name, _ in base.named_parameters(remove_duplicate=False)}
        self._weights |= {name for name, _ in base.named_buffers(remove_duplicate=False)}
        self._describer = _StateDescriber()
        self._called: list[_Layer] = []
        """The layer of each call, which markers have the number of; a layer may be called several times."""
        self._first: dict[Any, tuple[int, Callable[[Tensor], Any]]] = {}

    @contextlib.contextmanager
    def export_once(self) -> Iterator[None]:
        """Lets only the first layer of each kind compute while the context lasts."""
        indexed = [
            (m, vars(m)["layer_idx"])
            for layer in self._layers
            for m in layer.module.modules()
            if isinstance(vars(m).get("layer_idx"), int)
        ]
        try:
            for module, index in indexed:
                module.__dict__["layer_idx"] = _LayerIndex(index)
            for layer in self._layers:
                layer.module.__dict__["forward"] = self._replacement_forward(layer)
            # a result of an operator is hardly asked for twice: to keep them takes a tenth of the time
            with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
                yield
        finally:
            for layer in self._layers:
                layer.module.__dict__.pop("forward", None)
            for module, index in indexed:
                module.__dict__["layer_idx"] = index

    def _replacement_forward(self, layer: _Layer) -> Callable[..., Any]:
        original = layer.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not args or not isinstance(args[0], Tensor):
                return original(*args, **kwargs)
            hidden, other_inputs = args[0], (args[1:], *sorted(kwargs.items()))
            inputs = (str(hidden.shape), hidden.dtype, self._describer.describe(other_inputs, {}))
            key = (layer.signature(self._describer), inputs)
            number = len(self._called)
            self._called.append(layer)
            if key in self._first:
                like, wrap = self._first[key]
                return wrap(torch.ops.armllm.layer_repeat(hidden, number, like))
            result = original(torch.ops.armllm.layer_begin(hidden, number), *args[1:], **kwargs)
            if isinstance(result, Tensor):
                self._first[key] = (number, lambda out: out)
                return torch.ops.armllm.layer_end(result, number)
            if isinstance(result, tuple) and isinstance(result[0], Tensor):
                others = result[1:]
                # a list of rotary embeddings is not a list of layers: they return two tensors
                if not any(isinstance(other, Tensor) or other for other in others):
                    self._first[key] = (number, lambda out: (out, *others))
                    return (torch.ops.armllm.layer_end(result[0], number), *others)
            return result

        return forward

    def insert_copies(self, module: fx.GraphModule, names: dict[str, str]) -> None:
        """Replaces the nodes of repeated layers by copies of the exported layers.

        Args:
            module: the graph, changed in place.
            names: attribute of ``module`` → name of the weight in the model.

        Raises:
            LayersDiffer: a layer lacks a weight of its exported layer.
        """
        graph = module.graph
        weights = {names[n.target]: n for n in graph.nodes if n.op == "get_attr" and n.target in names}
        regions = self._regions(graph)
        for node in list(graph.nodes):
            if node.target is torch.ops.armllm.layer_repeat.default:
                hidden, number, like = node.args
                self._insert_copy(graph, node, regions[like], names, weights, (like, number))
        for node in list(graph.nodes):
            if node.target in (torch.ops.armllm.layer_begin.default, torch.ops.armllm.layer_end.default):
                node.replace_all_uses_with(OpCall(node).hidden)
                graph.erase_node(node)
        graph.lint()
        module.recompile()

    @staticmethod
    def _regions(graph: fx.Graph) -> dict[int, list[fx.Node]]:
        """Returns the nodes of each exported call, from its begin marker to its end marker, inclusive."""
        regions: dict[int, list[fx.Node]] = {}
        region: list[fx.Node] | None = None
        for node in graph.nodes:
            if node.target is torch.ops.armllm.layer_begin.default:
                region = []
            if region is not None:
                region.append(node)
            if node.target is torch.ops.armllm.layer_end.default and region:
                regions[int(OpCall(node).number)] = region
                region = None
        return regions

    def _insert_copy(
        self,
        graph: fx.Graph,
        repeat: fx.Node,
        region: list[fx.Node],
        names: dict[str, str],
        weights: dict[str, fx.Node],
        numbers: tuple[int, int],
    ) -> None:
        first, other = (self._called[n] for n in numbers)
        copies: dict[fx.Node, fx.Node] = {region[0]: OpCall(repeat).hidden}
        read = {n for node in region for n in node.all_input_nodes if n.op == "get_attr"}
        for node in read:
            name = names.get(str(node.target))
            if name not in self._weights:  # a constant of the model's code
                continue
            own_weight = weights.get(other.name + name.removeprefix(first.name))
            if not name.startswith(f"{first.name}.") or own_weight is None:
                raise LayersDiffer(f"{other.name} or {first.name} shares {name} with other layers")
            copies[node] = own_weight
        with graph.inserting_before(repeat):
            for node in region[1:-1]:
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
                _renumber(copies[node], first.index, other.index)
        repeat.replace_all_uses_with(copies[OpCall(region[-1]).hidden])
        graph.erase_node(repeat)


def _renumber(node: fx.Node, old: int | None, new: int | None) -> None:
    """Sets the layer number of an attention marker."""
    if new is None or not hasattr(node.target, "_schema") or "layer" not in OpCall(node).names:
        return
    if OpCall(node).layer == old:
        OpCall(node).replace(layer=new)
