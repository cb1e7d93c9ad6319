"""Layers that repeat: one of each kind is exported, and the others become copies of its nodes.

Exporting is most of what capturing takes, and a model of 48 layers has two or three kinds of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

_library = torch.library.Library("armllm", "FRAGMENT")
_library.define("layer_begin(Tensor hidden, int number) -> Tensor")
_library.define("layer_end(Tensor hidden, int number) -> Tensor")
_library.define("layer_again(Tensor hidden, int number, int like) -> Tensor")

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"layer_idx"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


def _copy(hidden: Tensor, *numbers: int) -> Tensor:
    return hidden.clone()


def _fake(hidden: Tensor, *numbers: int) -> Tensor:
    return torch.empty_like(hidden)


for _name in ("layer_begin", "layer_end", "layer_again"):
    _library.impl(_name, _copy, "CompositeExplicitAutograd")
    torch.library.register_fake(f"armllm::{_name}", _fake, lib=_library)


class NotAlike(RuntimeError):
    """Layers that look the same are not: each has to be exported."""


class _LayerIndex:
    """Stands for a layer's number where it only names the layer's cache; any other use tells layers apart."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number

    def _used(self, *_: Any) -> Any:
        raise NotAlike("a layer computes with its own number")

    def __eq__(self, other: object) -> bool:
        return bool(self._used())

    __index__ = __hash__ = __bool__ = __float__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __add__ = __sub__ = __mul__ = __mod__ = __floordiv__ = __truediv__ = __radd__ = __rsub__ = __rmul__ = (
        _used
    )


class _Held:
    """Identities of objects; those seen are kept, so that none is given again."""

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def describe(self, value: Any, own: dict[int, str]) -> Any:
        """Equal for what is computed with in the same way; tensors of the layer's own by their names."""
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if isinstance(value, list | tuple):
            return (type(value), *(self.describe(v, own) for v in value))
        if isinstance(value, Tensor) and id(value) in own:
            return own[id(value)]
        if isinstance(value, functools.partial):
            return (
                value.func,
                self.describe(value.args, own),
                self.describe(sorted(value.keywords.items()), own),
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
            # not by getattr: a configuration whose layers differ refuses to give what they differ in
            fields = (vars(value).get(f.name) for f in dataclasses.fields(value))
            return (type(value), *(self.describe(v, own) for v in fields))
        self._objects.append(value)
        return id(value)


@dataclasses.dataclass
class _Layer:
    """A layer among its kind."""

    name: str
    module: nn.Module
    index: int | None

    def kind(self, held: _Held) -> Any:
        """What makes two layers compute the same from their own weights."""
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        own = {id(tensor): name for name, tensor in tensors.items()}
        described: list[Any] = [(n, t.shape, t.dtype) for n, t in tensors.items()]
        for name, module in self.module.named_modules():
            left_out = _OF_EVERY_MODULE | getattr(module, "NOT_COMPUTED_WITH", frozenset())
            if module is self.module:
                left_out |= {"forward"}  # the stand-in
            state = sorted((key, value) for key, value in vars(module).items() if key not in left_out)
            hooks = [tuple(getattr(module, hook).values()) for hook in _HOOKS]
            described.append((name, type(module), held.describe(hooks, own), module.training))
            described.extend((key, held.describe(value, own)) for key, value in state)
        return tuple(described)


def _layers(base: nn.Module) -> list[_Layer]:
    """The elements of the outermost lists of modules."""
    found: list[_Layer] = []
    lists: list[str] = []
    for name, module in base.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in lists):
            continue
        lists.append(name)
        for number, layer in enumerate(module):
            numbers = {vars(m)["layer_idx"] for m in layer.modules() if "layer_idx" in vars(m)}
            if len(numbers) <= 1 and "forward" not in vars(layer):
                found.append(_Layer(f"{name}.{number}", layer, next(iter(numbers), None)))
    return found


class Folded:
    """A model whose repeated layers leave one node each in a graph."""

    def __init__(self, base: nn.Module) -> None:
        self._layers = _layers(base)
        self._weights = {name for name, _ in base.named_parameters(remove_duplicate=False)}
        self._weights |= {name for name, _ in base.named_buffers(remove_duplicate=False)}
        self._held = _Held()
        self._first: dict[Any, tuple[int, Callable[[Tensor], Any]]] = {}

    @contextlib.contextmanager
    def fold(self) -> Iterator[None]:
        """While it lasts, only the first layer of each kind computes."""
        indexed = [
            (m, vars(m)["layer_idx"])
            for layer in self._layers
            for m in layer.module.modules()
            if isinstance(vars(m).get("layer_idx"), int)
        ]
        try:
            for module, index in indexed:
                module.__dict__["layer_idx"] = _LayerIndex(index)
            for number, layer in enumerate(self._layers):
                layer.module.__dict__["forward"] = self._stand_in(number, layer)
            yield
        finally:
            for layer in self._layers:
                layer.module.__dict__.pop("forward", None)
            for module, index in indexed:
                module.__dict__["layer_idx"] = index

    def _stand_in(self, number: int, layer: _Layer) -> Callable[..., Any]:
        own = layer.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not args or not isinstance(args[0], Tensor):
                return own(*args, **kwargs)
            hidden, rest = args[0], (args[1:], *sorted(kwargs.items()))
            given = (str(hidden.shape), hidden.dtype, self._held.describe(rest, {}))
            key = (layer.kind(self._held), given)
            if key in self._first:
                like, wrap = self._first[key]
                return wrap(torch.ops.armllm.layer_again(hidden, number, like))
            result = own(torch.ops.armllm.layer_begin(hidden, number), *args[1:], **kwargs)
            if isinstance(result, Tensor):
                self._first[key] = (number, lambda out: out)
                return torch.ops.armllm.layer_end(result, number)
            if isinstance(result, tuple) and isinstance(result[0], Tensor):
                others = result[1:]
                # a list of rotary embeddings is no list of layers: they return two tensors
                if not any(isinstance(other, Tensor) or other for other in others):
                    self._first[key] = (number, lambda out: (out, *others))
                    return (torch.ops.armllm.layer_end(result[0], number), *others)
            return result

        return forward

    def unfold(self, module: fx.GraphModule, names: dict[str, str]) -> None:
        """Puts copies of the exported layers where the others stood.

        Args:
            module: the graph, changed in place.
            names: attribute of ``module`` → name of the weight in the model.

        Raises:
            NotAlike: a layer lacks a weight that the one it should be like has.
        """
        graph = module.graph
        weights = {names[n.target]: n for n in graph.nodes if n.op == "get_attr" and n.target in names}
        regions = self._regions(graph)
        for node in list(graph.nodes):
            if node.target is torch.ops.armllm.layer_again.default:
                hidden, number, like = node.args
                self._insert_copy(graph, node, regions[like], names, weights, (like, number))
        for node in list(graph.nodes):
            if node.target in (torch.ops.armllm.layer_begin.default, torch.ops.armllm.layer_end.default):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        graph.lint()
        module.recompile()

    @staticmethod
    def _regions(graph: fx.Graph) -> dict[int, list[fx.Node]]:
        """Of each layer that was exported, the nodes from its beginning to its end, both included."""
        regions: dict[int, list[fx.Node]] = {}
        begun: list[fx.Node] | None = None
        for node in graph.nodes:
            if node.target is torch.ops.armllm.layer_begin.default:
                begun = []
            if begun is not None:
                begun.append(node)
            if node.target is torch.ops.armllm.layer_end.default and begun:
                regions[int(node.args[1])] = begun
                begun = None
        return regions

    def _insert_copy(
        self,
        graph: fx.Graph,
        again: fx.Node,
        region: list[fx.Node],
        names: dict[str, str],
        weights: dict[str, fx.Node],
        numbers: tuple[int, int],
    ) -> None:
        first, other = (self._layers[n] for n in numbers)
        copies: dict[fx.Node, fx.Node] = {region[0]: again.args[0]}  # type: ignore[dict-item]
        read = {n for node in region for n in node.all_input_nodes if n.op == "get_attr"}
        for node in read:
            name = names.get(str(node.target))
            if name not in self._weights:  # a constant of the code
                continue
            its_own = weights.get(other.name + name.removeprefix(first.name))
            if not name.startswith(f"{first.name}.") or its_own is None:
                raise NotAlike(f"{other.name} or {first.name} shares {name} with other layers")
            copies[node] = its_own
        with graph.inserting_before(again):
            for node in region[1:-1]:
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
                _renumber(copies[node], first.index, other.index)
        again.replace_all_uses_with(copies[region[-1].args[0]])  # type: ignore[index]
        graph.erase_node(again)


def _renumber(node: fx.Node, old: int | None, new: int | None) -> None:
    """Gives an attention marker the number of its layer."""
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema else ()):
        if argument.name == "layer" and i < len(node.args) and node.args[i] == old and new is not None:
            node.update_arg(i, new)
